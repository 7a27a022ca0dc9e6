/* Rankings as Python sees them. `_ranking.c` is what they are. */

#include "_ranking.h"

enum { REACH = 256 }; /* more than most caches have leases open that could end before an older one */

static PyObject *name_push_late, *name_discard_late, *name_touch_late, *name_pop_late;

/* Put a node at the end or close to it, or have it kept beside the ranking if it goes before all of the last few. */
static PyObject *
put(Ranking *ranking, Node *node, PyObject *rank)
{
    int last = goes_last(ranking, node, rank);
    if (last < 0)
        return NULL;
    Node *before = ranking->last;
    if (!last && !find_place(ranking, node, rank, &before))
        return PyObject_CallMethodObjArgs((PyObject *)ranking, name_push_late, node, rank, NULL);
    if (node->ranking != NULL)
        return PyErr_Format(PyExc_AssertionError, "%R stands in a queue", node);
    link_node(ranking, node, rank, before);
    Py_RETURN_NONE;
}

static PyObject *
rank_of(const Ranking *ranking, Node *node)
{
    if (ranking->rank != NULL)
        return PyObject_CallOneArg(ranking->rank, (PyObject *)node);
    PyErr_SetString(PyExc_AttributeError, "rank");
    return NULL;
}

static PyObject *
ranking_push(PyObject *self, PyObject *object)
{
    Ranking *ranking = (Ranking *)self;
    Node *node = as_node(object);
    if (node == NULL)
        return NULL;
    if (node->ranking != NULL)
        return PyErr_Format(PyExc_AssertionError, "%R stands in a queue", node);
    PyObject *rank = rank_of(ranking, node);
    PyObject *done = rank == NULL ? NULL : put(ranking, node, rank);
    Py_XDECREF(rank);
    return done;
}

static PyObject *
ranking_discard(PyObject *self, PyObject *object)
{
    Ranking *ranking = (Ranking *)self;
    Node *node = as_node(object);
    if (node == NULL)
        return NULL;
    if (node->ranking == ranking) {
        unlink_node(ranking, node);
        Py_DECREF(node);
    }
    else if (ranking->num_late != 0)
        return PyObject_CallMethodOneArg(self, name_discard_late, object);
    Py_RETURN_NONE;
}

static PyObject *
ranking_touch(PyObject *self, PyObject *object)
{
    Ranking *ranking = (Ranking *)self;
    Node *node = as_node(object);
    if (node == NULL)
        return NULL;
    if (node->ranking != ranking) {
        if (ranking->num_late != 0)
            return PyObject_CallMethodOneArg(self, name_touch_late, object);
        Py_RETURN_NONE;
    }
    PyObject *rank = rank_of(ranking, node), *done = NULL;
    int same = rank == NULL || node->ranking != ranking ? -1 : compare_ranks(rank, node->rank, Py_EQ);
    if (same > 0 || (same == 0 && node->ranking != ranking)) {
        Py_INCREF(Py_None);
        done = Py_None;
    }
    else if (same == 0) {
        unlink_node(ranking, node);
        done = put(ranking, node, rank);
        Py_DECREF(node); /* the reference that the ranking had */
    }
    else if (!PyErr_Occurred())
        PyErr_SetString(PyExc_RuntimeError, "a rank may not change the queue");
    Py_XDECREF(rank);
    return done;
}

static PyObject *
ranking_pop(PyObject *self, PyObject *nothing)
{
    Ranking *ranking = (Ranking *)self;
    if (ranking->num_late != 0)
        return PyObject_CallMethodNoArgs(self, name_pop_late);
    Node *node = ranking->first;
    if (node == NULL)
        Py_RETURN_NONE;
    unlink_node(ranking, node);
    fetch_next(ranking->first);
    return (PyObject *)node;
}

/* A node of the ranking, and what orders it: (rank, id, node). */
static PyObject *
entry_of(const Node *node)
{
    return Py_BuildValue("OnO", node->rank, node->id, node);
}

static PyObject *
first_ranked(PyObject *self, PyObject *nothing)
{
    const Ranking *ranking = (Ranking *)self;
    if (ranking->first != NULL)
        return entry_of(ranking->first);
    Py_RETURN_NONE;
}

static PyObject *
ranked(PyObject *self, PyObject *nothing)
{
    const Ranking *ranking = (Ranking *)self;
    PyObject *entries = PyList_New(ranking->length);
    Py_ssize_t at = 0;
    for (const Node *node = ranking->first; entries != NULL && node != NULL; node = node->after) {
        PyObject *entry = entry_of(node); /* a collection may run here, and code of anybody's with it */
        if (entry != NULL && node->ranking == ranking && at < PyList_GET_SIZE(entries)) {
            PyList_SET_ITEM(entries, at++, entry);
            continue;
        }
        if (entry != NULL)
            PyErr_SetString(PyExc_RuntimeError, "the ranking has changed meanwhile");
        Py_XDECREF(entry);
        Py_CLEAR(entries);
    }
    return entries;
}

static PyObject *
is_ranked(PyObject *self, PyObject *object)
{
    const Node *node = as_node(object);
    return node == NULL ? NULL : PyBool_FromLong(node->ranking == (Ranking *)self);
}

static PyObject *
clear_ranked(PyObject *self, PyObject *nothing)
{
    empty_ranking((Ranking *)self);
    Py_RETURN_NONE;
}

/* ---------------------------------------------------------------- the type */

static int
ranking_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"rank", NULL};
    PyObject *rank;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:Ranking", names, &rank))
        return -1;
    set_member(&((Ranking *)self)->rank, rank);
    ((Ranking *)self)->reach = REACH;
    return 0;
}

static int
ranking_traverse(PyObject *self, visitproc visit, void *arg)
{
    const Ranking *ranking = (Ranking *)self;
    Py_VISIT(ranking->rank);
    for (const Node *node = ranking->first; node != NULL; node = node->after)
        Py_VISIT(node);
    return 0;
}

static int
ranking_forget(PyObject *self)
{
    Py_CLEAR(((Ranking *)self)->rank);
    empty_ranking((Ranking *)self);
    return 0;
}

static void
ranking_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    ranking_forget(self);
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef methods[] = {
    {"push", ranking_push, METH_O, NULL},
    {"discard", ranking_discard, METH_O, NULL},
    {"touch", ranking_touch, METH_O, NULL},
    {"pop", ranking_pop, METH_NOARGS, NULL},
    {"clear_ranked", clear_ranked, METH_NOARGS, NULL},
    {"ranked", ranked, METH_NOARGS, NULL},
    {"first_ranked", first_ranked, METH_NOARGS, NULL},
    {"is_ranked", is_ranked, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"rank", T_OBJECT_EX, offsetof(Ranking, rank), READONLY, NULL},
    {"num_late", T_PYSSIZET, offsetof(Ranking, num_late), 0, NULL},
    {"reach", T_PYSSIZET, offsetof(Ranking, reach), 0, NULL},
    {"num_ranked", T_PYSSIZET, offsetof(Ranking, length), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject RankingType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "raydix.cache_core.kernels._compiled.Ranking",
    .tp_doc = PyDoc_STR("Ranking(rank)\n--\n\nNodes in the order of their ranks: see plain_kernels."),
    .tp_basicsize = sizeof(Ranking),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = ranking_init,
    .tp_dealloc = ranking_dealloc,
    .tp_traverse = ranking_traverse,
    .tp_clear = ranking_forget,
    .tp_methods = methods,
    .tp_members = members,
};

int
knows_rankings(void)
{
    name_push_late = PyUnicode_InternFromString("_push_late");
    name_discard_late = PyUnicode_InternFromString("_discard_late");
    name_touch_late = PyUnicode_InternFromString("_touch_late");
    name_pop_late = PyUnicode_InternFromString("_pop_late");
    return name_push_late != NULL && name_discard_late != NULL && name_touch_late != NULL && name_pop_late != NULL;
}
