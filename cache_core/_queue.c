/* Rows of nodes in the order in which they are to go: each node names its neighbours, and stands in one row at most. */

#include "_kernels.h"

struct row {
    PyObject_HEAD
    PyObject *rank; /* what orders the nodes: called with one */
    Node *first, *last;
    Py_ssize_t length;
    Py_ssize_t num_late; /* what its heir in Python keeps beside the row */
};

static PyObject *name_push_late, *name_discard_late, *name_touch_late, *name_pop_late;

/* ---------------------------------------------------------------- links */

static void
append(Row *row, Node *node, PyObject *rank)
{
    Py_INCREF(node);
    Py_INCREF(rank);
    node->row = row;
    node->row_rank = rank;
    node->row_before = row->last;
    node->row_after = NULL;
    if (row->last != NULL)
        row->last->row_after = node;
    else
        row->first = node;
    row->last = node;
    row->length++;
}

/* Take a node out of its row; the row's reference to it becomes the caller's. */
static void
unlink_node(Row *row, Node *node)
{
    if (node->row_before != NULL)
        node->row_before->row_after = node->row_after;
    else
        row->first = node->row_after;
    if (node->row_after != NULL)
        node->row_after->row_before = node->row_before;
    else
        row->last = node->row_before;
    node->row = NULL;
    node->row_before = node->row_after = NULL;
    row->length--;
    Py_CLEAR(node->row_rank);
}

static int
empty_row(PyObject *self)
{
    Row *row = (Row *)self;
    while (row->first != NULL) {
        Node *node = row->first;
        unlink_node(row, node);
        Py_DECREF(node);
    }
    return 0;
}

/* Whether one object goes before another: 1 or 0, -1 on an error. */
static int
compare(PyObject *one, PyObject *other, int how)
{
    Py_INCREF(other); /* what Python code compares may change the row */
    int said = PyObject_RichCompareBool(one, other, how);
    Py_DECREF(other);
    return said;
}

/* Whether a node of that rank stands last if it is put at the end: 1 or 0, -1 on an error. */
static int
goes_last(const Row *row, const Node *node, PyObject *rank)
{
    if (row->last == NULL)
        return 1;
    int higher = compare(rank, row->last->row_rank, Py_GT);
    if (higher != 0 || row->last == NULL)
        return higher;
    int equal = compare(rank, row->last->row_rank, Py_EQ);
    return equal > 0 && row->last != NULL ? node->id >= row->last->id : equal;
}

/* ---------------------------------------------------------------- methods */

/* Put a node at the end, or have it kept beside the row if it goes before the last one. */
static PyObject *
put(Row *row, Node *node, PyObject *rank)
{
    int last = goes_last(row, node, rank);
    if (last < 0)
        return NULL;
    if (!last)
        return PyObject_CallMethodObjArgs((PyObject *)row, name_push_late, node, rank, NULL);
    if (node->row != NULL)
        return PyErr_Format(PyExc_AssertionError, "%R stands in a queue", node);
    append(row, node, rank);
    Py_RETURN_NONE;
}

static PyObject *
rank_of(const Row *row, Node *node)
{
    if (row->rank != NULL)
        return PyObject_CallOneArg(row->rank, (PyObject *)node);
    PyErr_SetString(PyExc_AttributeError, "rank");
    return NULL;
}

static PyObject *
row_push(PyObject *self, PyObject *object)
{
    Row *row = (Row *)self;
    Node *node = as_node(object);
    if (node == NULL)
        return NULL;
    if (node->row != NULL)
        return PyErr_Format(PyExc_AssertionError, "%R stands in a queue", node);
    PyObject *rank = rank_of(row, node);
    PyObject *done = rank == NULL ? NULL : put(row, node, rank);
    Py_XDECREF(rank);
    return done;
}

static PyObject *
row_discard(PyObject *self, PyObject *object)
{
    Row *row = (Row *)self;
    Node *node = as_node(object);
    if (node == NULL)
        return NULL;
    if (node->row == row) {
        unlink_node(row, node);
        Py_DECREF(node);
    }
    else if (row->num_late != 0)
        return PyObject_CallMethodOneArg(self, name_discard_late, object);
    Py_RETURN_NONE;
}

static PyObject *
row_touch(PyObject *self, PyObject *object)
{
    Row *row = (Row *)self;
    Node *node = as_node(object);
    if (node == NULL)
        return NULL;
    if (node->row != row) {
        if (row->num_late != 0)
            return PyObject_CallMethodOneArg(self, name_touch_late, object);
        Py_RETURN_NONE;
    }
    PyObject *rank = rank_of(row, node), *done = NULL;
    int same = rank == NULL || node->row != row ? -1 : compare(rank, node->row_rank, Py_EQ);
    if (same > 0 || (same == 0 && node->row != row)) {
        Py_INCREF(Py_None);
        done = Py_None;
    }
    else if (same == 0) {
        unlink_node(row, node);
        done = put(row, node, rank);
        Py_DECREF(node); /* the reference that the row had */
    }
    else if (!PyErr_Occurred())
        PyErr_SetString(PyExc_RuntimeError, "a rank may not change the queue");
    Py_XDECREF(rank);
    return done;
}

/* Who goes next has been used by nobody for long: of it, what taking it out of the tree will want is fetched now, and of
 * the one after it the node itself. */
static void
fetch_next(const Node *next)
{
    if (next == NULL)
        return;
    fetch(next->parent, LINES(Node));
    fetch(next->data, 2);
    fetch(next->slots, 12);
    fetch(next->row_rank, 1);
    fetch(next->row_after, LINES(Node));
}

static PyObject *
row_pop(PyObject *self, PyObject *nothing)
{
    Row *row = (Row *)self;
    if (row->num_late != 0)
        return PyObject_CallMethodNoArgs(self, name_pop_late);
    Node *node = row->first;
    if (node == NULL)
        Py_RETURN_NONE;
    unlink_node(row, node);
    fetch_next(row->first);
    return (PyObject *)node;
}

/* A row's own, and what orders it: (rank, id, node). */
static PyObject *
entry_of(const Node *node)
{
    return Py_BuildValue("OnO", node->row_rank, node->id, node);
}

static PyObject *
row_head(PyObject *self, PyObject *nothing)
{
    const Row *row = (Row *)self;
    if (row->first != NULL)
        return entry_of(row->first);
    Py_RETURN_NONE;
}

static PyObject *
row_entries(PyObject *self, PyObject *nothing)
{
    const Row *row = (Row *)self;
    PyObject *entries = PyList_New(row->length);
    Py_ssize_t at = 0;
    for (const Node *node = row->first; entries != NULL && node != NULL; node = node->row_after) {
        PyObject *entry = entry_of(node); /* a collection may run here, and code of anybody's with it */
        if (entry != NULL && node->row == row && at < PyList_GET_SIZE(entries)) {
            PyList_SET_ITEM(entries, at++, entry);
            continue;
        }
        if (entry != NULL)
            PyErr_SetString(PyExc_RuntimeError, "the row has changed meanwhile");
        Py_XDECREF(entry);
        Py_CLEAR(entries);
    }
    return entries;
}

static PyObject *
row_holds(PyObject *self, PyObject *object)
{
    const Node *node = as_node(object);
    return node == NULL ? NULL : PyBool_FromLong(node->row == (Row *)self);
}

static PyObject *
row_clear(PyObject *self, PyObject *nothing)
{
    empty_row(self);
    Py_RETURN_NONE;
}

/* ---------------------------------------------------------------- the type */

static int
row_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"rank", NULL};
    PyObject *rank;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:Row", names, &rank))
        return -1;
    set_member(&((Row *)self)->rank, rank);
    return 0;
}

static int
row_traverse(PyObject *self, visitproc visit, void *arg)
{
    const Row *row = (Row *)self;
    Py_VISIT(row->rank);
    for (const Node *node = row->first; node != NULL; node = node->row_after)
        Py_VISIT(node);
    return 0;
}

static int
row_forget(PyObject *self)
{
    Py_CLEAR(((Row *)self)->rank);
    return empty_row(self);
}

static void
row_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    row_forget(self);
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef methods[] = {
    {"push", row_push, METH_O, NULL},
    {"discard", row_discard, METH_O, NULL},
    {"touch", row_touch, METH_O, NULL},
    {"pop", row_pop, METH_NOARGS, NULL},
    {"row_clear", row_clear, METH_NOARGS, NULL},
    {"row_entries", row_entries, METH_NOARGS, NULL},
    {"row_head", row_head, METH_NOARGS, NULL},
    {"row_holds", row_holds, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"rank", T_OBJECT_EX, offsetof(Row, rank), READONLY, NULL},
    {"num_late", T_PYSSIZET, offsetof(Row, num_late), 0, NULL},
    {"row_length", T_PYSSIZET, offsetof(Row, length), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject RowType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "raydix.cache_core._kernels.Row",
    .tp_doc = PyDoc_STR("Row(rank)\n--\n\nNodes in the order of their ranks: see plain_kernels."),
    .tp_basicsize = sizeof(Row),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = row_init,
    .tp_dealloc = row_dealloc,
    .tp_traverse = row_traverse,
    .tp_clear = row_forget,
    .tp_methods = methods,
    .tp_members = members,
};

int
knows_rows(void)
{
    name_push_late = PyUnicode_InternFromString("_push_late");
    name_discard_late = PyUnicode_InternFromString("_discard_late");
    name_touch_late = PyUnicode_InternFromString("_touch_late");
    name_pop_late = PyUnicode_InternFromString("_pop_late");
    return name_push_late != NULL && name_discard_late != NULL && name_touch_late != NULL && name_pop_late != NULL;
}
