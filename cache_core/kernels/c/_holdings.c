/* What of a tree is locked, and which of the rest goes next. */

#include "_common.h"

typedef struct {
    PyObject_HEAD
    PyObject *queue; /* of the unlocked leaves */
    Py_ssize_t evictable, protected; /* tokens */
} Holdings;

static PyObject *name_push, *name_discard, *name_touch, *name_pop, *name_offer, *name_bare;

/* ---------------------------------------------------------------- the queue, whatever its type */

/* Call a method of the queue, with a node or without; NULL with an exception set on an error. */
static PyObject *
ask(const Holdings *holdings, PyObject *name, PyObject *node)
{
    PyObject *queue = holdings->queue;
    if (queue == NULL) {
        PyErr_SetString(PyExc_AttributeError, "_queue");
        return NULL;
    }
    Py_INCREF(queue); /* and the node: whoever is called may let go of either */
    Py_XINCREF(node);
    PyObject *said = node == NULL ? PyObject_CallMethodNoArgs(queue, name) : PyObject_CallMethodOneArg(queue, name, node);
    Py_XDECREF(node);
    Py_DECREF(queue);
    return said;
}

static int
tell(const Holdings *holdings, PyObject *name, PyObject *node)
{
    PyObject *said = ask(holdings, name, node);
    Py_XDECREF(said);
    return said == NULL ? -1 : 0;
}

static PyObject *
holdings_use(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Node *end = expect_args("use", nargs, 4) ? as_node(args[0]) : NULL;
    Py_ssize_t now = end == NULL ? -1 : PyLong_AsSsize_t(args[1]);
    Py_ssize_t num_hits = PyErr_Occurred() ? -1 : size_of(args[2], "num_hits");
    int is_raised = num_hits < 0 ? -1 : is_below(end, args[3]);
    if (is_raised < 0)
        return NULL;
    if (is_raised)
        set_member(&end->own_priority, args[3]);
    end->own_access_time = now;
    end->own_hits = (Py_ssize_t)((size_t)end->own_hits + (size_t)num_hits);
    int done = is_childless(end);
    if (done > 0) /* of all that was gone through, only this can be a leaf */
        done = tell((Holdings *)self, name_touch, args[0]);
    return done < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
holdings_add(PyObject *self, PyObject *object)
{
    Node *leaf = as_node(object), *parent = leaf == NULL ? NULL : as_node(leaf->parent);
    const Children *siblings = parent == NULL ? NULL : children_of(parent);
    if (PyErr_Occurred())
        return NULL;
    ((Holdings *)self)->evictable += leaf->end - parent->end;
    int was_leaf = siblings != NULL && num_children(siblings) == 1;
    if (was_leaf && tell((Holdings *)self, name_discard, (PyObject *)parent) < 0)
        return NULL;
    return ask((Holdings *)self, name_push, object);
}

/* ---------------------------------------------------------------- locks */

/* Count a lock of this very node more or less. A leaf that changes sides is no candidate any more, or may be one. Returns
 * 0, or -1 with an exception set. */
static int
change_lock(PyObject *self, Node *node, Py_ssize_t step)
{
    Holdings *holdings = (Holdings *)self;
    int childless = is_childless(node);
    Py_ssize_t moved = childless < 0 ? -1 : count_lock(node, step);
    if (moved < 0)
        return -1;
    holdings->evictable -= step * moved;
    holdings->protected += step * moved;
    if (moved == 0 || !childless)
        return 0;
    PyObject *said = step > 0 ? ask(holdings, name_discard, (PyObject *)node)
                              : PyObject_CallMethodOneArg(self, name_offer, (PyObject *)node);
    Py_XDECREF(said);
    return said == NULL ? -1 : 0;
}

static PyObject *
holdings_lock(PyObject *self, PyObject *object)
{
    Node *node = as_node(object);
    return node == NULL || change_lock(self, node, 1) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
holdings_unlock(PyObject *self, PyObject *object)
{
    Node *node = as_node(object);
    int is_locked = node != NULL && node->own_locks > 0;
    return node == NULL || (is_locked && change_lock(self, node, -1) < 0) ? NULL : PyBool_FromLong(is_locked);
}

/* ---------------------------------------------------------------- eviction */

/* How many tokens a leaf holds, and the bytes of a page of them; 0 with an exception set if that cannot be told. */
static int
measure(const Node *leaf, const Node *parent, Py_ssize_t page, Py_ssize_t *num_tokens, Py_ssize_t *page_bytes)
{
    if (!is_bytes(leaf->data, "a node's data"))
        return 0;
    *num_tokens = leaf->end > parent->end && parent->end >= 0 ? leaf->end - parent->end : 0;
    Py_ssize_t unit = *num_tokens == 0 ? 0 : PyBytes_GET_SIZE(leaf->data) / *num_tokens;
    if (unit == 0 || page > PY_SSIZE_T_MAX / unit) {
        PyErr_SetString(PyExc_ValueError, "a leaf ends after its parent, and holds tokens in pages that can be counted");
        return 0;
    }
    *page_bytes = page * unit;
    return 1;
}

/* Take out a leaf below `parent`, and note it; returns how many tokens it held, -1 on an error. */
static Py_ssize_t
fell_leaf(Holdings *holdings, Node *leaf, Node *parent, Py_ssize_t page, Victims *victims)
{
    Py_ssize_t num_tokens, page_bytes;
    if (!measure(leaf, parent, page, &num_tokens, &page_bytes))
        return -1;
    PyObject *row = take_leaf(leaf, parent, page_bytes), *told = NULL;
    if (row != NULL && add_victim(victims, (PyObject *)leaf, row, num_tokens) == 0) {
        holdings->evictable -= num_tokens;
        int bare = is_childless(parent);
        if (bare == 0)
            told = Py_NewRef(Py_None);
        else if (bare > 0)
            told = PyObject_CallMethodOneArg((PyObject *)holdings, name_bare, (PyObject *)parent);
    }
    Py_XDECREF(row);
    Py_XDECREF(told);
    return told == NULL ? -1 : num_tokens;
}

/* Take out the leaf that goes next; returns how many tokens it held, 0 if there is none, -1 on an error. */
static Py_ssize_t
fell_next(Holdings *holdings, Py_ssize_t page, Victims *victims)
{
    PyObject *next = ask(holdings, name_pop, NULL);
    Py_ssize_t num_tokens = next == Py_None ? 0 : -1;
    Node *leaf = next == NULL || next == Py_None ? NULL : as_node(next);
    Node *parent = leaf == NULL ? NULL : as_node(leaf->parent);
    if (parent != NULL) {
        Py_INCREF(parent); /* whoever is called meanwhile may let go of it */
        num_tokens = fell_leaf(holdings, leaf, parent, page, victims);
        Py_DECREF(parent);
    }
    Py_XDECREF(next);
    return num_tokens;
}

/* Fell leaves until the victims hold as many tokens as the first argument says; 0, or -1 with an exception set. */
static int
fell_enough(Holdings *holdings, PyObject *const *args, Victims *victims)
{
    Py_ssize_t wanted = PyNumber_AsSsize_t(args[0], PyExc_OverflowError);
    Py_ssize_t page = PyErr_Occurred() ? -1 : size_of(args[1], "page_size"), felled = page < 0 ? -1 : 1;
    while (felled > 0 && victims->num_tokens < wanted)
        felled = fell_next(holdings, page, victims);
    if (felled < 0)
        return -1;
    expect_removal(next_of(holdings->queue), page);
    return 0;
}

static PyObject *
holdings_fell(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (!expect_args("fell", nargs, 3))
        return NULL;
    if (!is_of(args[2], &VictimsType))
        return PyErr_Format(PyExc_TypeError, "victims are needed, not %s", Py_TYPE(args[2])->tp_name);
    if (fell_enough((Holdings *)self, args, (Victims *)args[2]) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *
holdings_free_leaves(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Victims *victims = expect_args("free_leaves", nargs, 4) ? new_victims() : NULL;
    if (victims == NULL)
        return NULL;
    int done = fell_enough((Holdings *)self, args, victims);
    if (victims->count > 0) /* be it that another one could not be felled */
        done = give_back(victims, PyLong_AsSsize_t(args[1]), args[2], args[3]);
    PyObject *freed = done < 0 ? NULL : PyLong_FromSsize_t(victims->num_tokens);
    Py_DECREF(victims);
    return freed;
}

/* ---------------------------------------------------------------- the type */

static int
holdings_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"queue", NULL};
    PyObject *queue;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:Holdings", names, &queue))
        return -1;
    set_member(&((Holdings *)self)->queue, queue);
    return 0;
}

static int
holdings_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(((Holdings *)self)->queue);
    return 0;
}

static int
holdings_clear(PyObject *self)
{
    Py_CLEAR(((Holdings *)self)->queue);
    return 0;
}

static void
holdings_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    holdings_clear(self);
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef methods[] = {
    {"add", holdings_add, METH_O, NULL},
    {"use", (PyCFunction)(void (*)(void))holdings_use, METH_FASTCALL, NULL},
    {"lock", holdings_lock, METH_O, NULL},
    {"unlock", holdings_unlock, METH_O, NULL},
    {"fell", (PyCFunction)(void (*)(void))holdings_fell, METH_FASTCALL, NULL},
    {"free_leaves", (PyCFunction)(void (*)(void))holdings_free_leaves, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"_queue", T_OBJECT_EX, offsetof(Holdings, queue), 0, NULL},
    {"evictable", T_PYSSIZET, offsetof(Holdings, evictable), 0, NULL},
    {"protected", T_PYSSIZET, offsetof(Holdings, protected), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject HoldingsType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "raydix.cache_core.kernels._compiled.Holdings",
    .tp_doc = PyDoc_STR("Holdings(queue)\n--\n\nWhat of a tree is locked, and which of the rest goes next: see "
                        "plain_kernels."),
    .tp_basicsize = sizeof(Holdings),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = holdings_init,
    .tp_dealloc = holdings_dealloc,
    .tp_traverse = holdings_traverse,
    .tp_clear = holdings_clear,
    .tp_methods = methods,
    .tp_members = members,
};

int
knows_holdings(void)
{
    name_push = PyUnicode_InternFromString("push");
    name_discard = PyUnicode_InternFromString("discard");
    name_touch = PyUnicode_InternFromString("touch");
    name_pop = PyUnicode_InternFromString("pop");
    name_offer = PyUnicode_InternFromString("_offer");
    name_bare = PyUnicode_InternFromString("_left_bare");
    return name_push != NULL && name_discard != NULL && name_touch != NULL && name_pop != NULL && name_offer != NULL &&
           name_bare != NULL;
}
