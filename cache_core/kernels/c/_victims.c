/* Nodes that left the tree, with the slots they held. */

#include "_common.h"

/* ---------------------------------------------------------------- noting them */

static int
make_room(Victims *victims)
{
    Py_ssize_t room = 2 * victims->room;
    Victim *noted = victims->noted == victims->few ? NULL : victims->noted;
    Victim *more = room > PY_SSIZE_T_MAX / (Py_ssize_t)sizeof(Victim) ? NULL : PyMem_Realloc(noted, (size_t)room * sizeof(Victim));
    if (more == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (noted == NULL)
        memcpy(more, victims->few, sizeof(victims->few));
    victims->noted = more;
    victims->room = room;
    return 0;
}

/* Note one more, what it held, and for how many tokens; 0, or -1 with an exception set. */
int
add_victim(Victims *victims, PyObject *node, PyObject *row, Py_ssize_t num_tokens)
{
    if (num_tokens > PY_SSIZE_T_MAX - victims->num_tokens) {
        PyErr_SetString(PyExc_OverflowError, "victims hold too many tokens");
        return -1;
    }
    if (victims->count == victims->room && make_room(victims) < 0)
        return -1;
    victims->noted[victims->count++] = (Victim){Py_NewRef(node), Py_NewRef(row), num_tokens};
    victims->num_tokens += num_tokens;
    return 0;
}

static PyObject *
victims_add(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_ssize_t num_tokens = expect_args("add", nargs, 3) ? size_of(args[2], "num_tokens") : -1;
    if (num_tokens < 0)
        return NULL;
    if (args[1] == Py_None)
        return PyErr_Format(PyExc_AssertionError, "%R had been evicted before", args[0]);
    if (!is_bytes(args[1], "the slots of a victim") || add_victim((Victims *)self, args[0], args[1], num_tokens) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* ---------------------------------------------------------------- what they are */

/* One slot for each of their tokens, in a tensor. */
static PyObject *
slots_of(const Victims *victims, Py_ssize_t page)
{
    int64_t *out;
    SlotRow *slots = new_row(victims->num_tokens, &out);
    for (Py_ssize_t i = 0; slots != NULL && i < victims->count; i++) {
        const Victim *victim = &victims->noted[i];
        out = write_row(victim->row, victim->num_tokens, page, out);
        if (out == NULL) {
            drop_row(slots);
            return NULL;
        }
    }
    return slots == NULL ? NULL : as_tensor(slots);
}

static PyObject *
victims_slots(PyObject *self, PyObject *page_size)
{
    Py_ssize_t page = size_of(page_size, "page_size");
    return page < 0 ? NULL : slots_of((Victims *)self, page);
}

/* What stands at some place in each of them, in a list. */
static PyObject *
each(PyObject *self, void *place)
{
    const Victims *victims = (Victims *)self;
    PyObject *list = PyList_New(victims->count); /* a collection may run here, and code of anybody's with it */
    if (list != NULL && PyList_GET_SIZE(list) != victims->count) {
        PyErr_SetString(PyExc_RuntimeError, "the victims have changed meanwhile");
        Py_CLEAR(list);
    }
    for (Py_ssize_t i = 0; list != NULL && i < victims->count; i++)
        PyList_SET_ITEM(list, i, Py_NewRef(*(PyObject **)((char *)&victims->noted[i] + (size_t)place)));
    return list;
}

/* ---------------------------------------------------------------- handing them back */

/* Hand their slots to whoever frees them, or, if that refuses, each; 0, or -1 with an exception set. */
static int
hand_back(const Victims *victims, Py_ssize_t page, PyObject *free_slots, PyObject *free_each)
{
    PyObject *slots = slots_of(victims, page);
    PyObject *said = slots == NULL ? NULL : PyObject_CallOneArg(free_slots, slots);
    int is_refused = said == NULL && slots != NULL && PyErr_ExceptionMatches(PyExc_Exception) &&
                     !PyErr_ExceptionMatches(PyExc_AssertionError);
    if (is_refused) {
        PyErr_Clear();
        said = PyObject_CallOneArg(free_each, slots);
    }
    Py_XDECREF(slots);
    Py_XDECREF(said);
    return said == NULL ? -1 : 0;
}

/* `hand_back`, also with an exception set: that one stays, unless another one comes. */
int
give_back(const Victims *victims, Py_ssize_t page, PyObject *free_slots, PyObject *free_each)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (hand_back(victims, page, free_slots, free_each) == 0) {
        PyErr_Restore(type, value, trace);
    } else {
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(trace);
    }
    return PyErr_Occurred() == NULL ? 0 : -1;
}

/* ---------------------------------------------------------------- the type */

static PyObject *
victims_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    Victims *victims = (Victims *)type->tp_alloc(type, 0);
    if (victims != NULL) {
        victims->noted = victims->few;
        victims->room = sizeof(victims->few) / sizeof(Victim);
    }
    return (PyObject *)victims;
}

Victims *
new_victims(void)
{
    return (Victims *)victims_new(&VictimsType, NULL, NULL);
}

static int
victims_traverse(PyObject *self, visitproc visit, void *arg)
{
    const Victims *victims = (Victims *)self;
    for (Py_ssize_t i = 0; i < victims->count; i++)
        Py_VISIT(victims->noted[i].node); /* its row is bytes */
    return 0;
}

static int
victims_clear(PyObject *self)
{
    Victims *victims = (Victims *)self;
    victims->num_tokens = 0;
    while (victims->count > 0) {
        Victim victim = victims->noted[--victims->count];
        Py_DECREF(victim.row);
        Py_DECREF(victim.node);
    }
    return 0;
}

static void
victims_dealloc(PyObject *self)
{
    Victims *victims = (Victims *)self;
    PyObject_GC_UnTrack(self);
    victims_clear(self);
    if (victims->noted != victims->few)
        PyMem_Free(victims->noted);
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef methods[] = {
    {"add", (PyCFunction)(void (*)(void))victims_add, METH_FASTCALL, NULL},
    {"slots", victims_slots, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"num_tokens", T_PYSSIZET, offsetof(Victims, num_tokens), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef lists[] = {
    {"nodes", each, NULL, NULL, (void *)offsetof(Victim, node)},
    {"rows", each, NULL, NULL, (void *)offsetof(Victim, row)},
    {NULL, NULL, NULL, NULL, NULL},
};

PyTypeObject VictimsType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "raydix.cache_core.kernels._compiled.Victims",
    .tp_doc = PyDoc_STR("Victims()\n--\n\nNodes that left the tree, with the slots they held: see plain_kernels."),
    .tp_basicsize = sizeof(Victims),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = victims_new,
    .tp_dealloc = victims_dealloc,
    .tp_traverse = victims_traverse,
    .tp_clear = victims_clear,
    .tp_methods = methods,
    .tp_members = members,
    .tp_getset = lists,
};
