/* Nodes that left the tree, with the slots they held. */

#include "_common.h"

/* Note one more, what it held, and for how many tokens; 0, or -1 with an exception set. */
int
add_victim(Victims *victims, PyObject *node, PyObject *row, Py_ssize_t num_tokens)
{
    if (victims->nodes == NULL || victims->rows == NULL || !PyList_CheckExact(victims->nodes) ||
        !PyList_CheckExact(victims->rows)) {
        PyErr_SetString(PyExc_TypeError, "victims, and their rows, are noted in lists");
        return -1;
    }
    if (PyList_Append(victims->nodes, node) < 0 || PyList_Append(victims->rows, row) < 0)
        return -1;
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

static PyObject *
victims_slots(PyObject *self, PyObject *page_size)
{
    const Victims *victims = (Victims *)self;
    Py_ssize_t page = size_of(page_size, "page_size");
    if (page < 0)
        return NULL;
    if (victims->rows != NULL)
        return expand_rows(victims->rows, victims->num_tokens, page);
    PyErr_SetString(PyExc_AttributeError, "rows");
    return NULL;
}

/* ---------------------------------------------------------------- the type */

static PyObject *
victims_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    Victims *victims = (Victims *)type->tp_alloc(type, 0);
    if (victims == NULL)
        return NULL;
    victims->nodes = PyList_New(0);
    victims->rows = PyList_New(0);
    if (victims->nodes == NULL || victims->rows == NULL)
        Py_CLEAR(victims);
    return (PyObject *)victims;
}

static int
victims_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(((Victims *)self)->nodes);
    Py_VISIT(((Victims *)self)->rows);
    return 0;
}

static int
victims_clear(PyObject *self)
{
    Py_CLEAR(((Victims *)self)->nodes);
    Py_CLEAR(((Victims *)self)->rows);
    return 0;
}

static void
victims_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    victims_clear(self);
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef methods[] = {
    {"add", (PyCFunction)(void (*)(void))victims_add, METH_FASTCALL, NULL},
    {"slots", victims_slots, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"nodes", T_OBJECT_EX, offsetof(Victims, nodes), READONLY, NULL},
    {"rows", T_OBJECT_EX, offsetof(Victims, rows), READONLY, NULL},
    {"num_tokens", T_PYSSIZET, offsetof(Victims, num_tokens), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject VictimsType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "raydix.cache_core._kernels.Victims",
    .tp_doc = PyDoc_STR("Victims()\n--\n\nNodes that left the tree, with the slots they held: see plain_kernels."),
    .tp_basicsize = sizeof(Victims),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = victims_new,
    .tp_dealloc = victims_dealloc,
    .tp_traverse = victims_traverse,
    .tp_clear = victims_clear,
    .tp_methods = methods,
    .tp_members = members,
};
