/* Children as Python sees them: something like a dict. `_children.c` is what they are. */

#include "_children.h"

static Py_ssize_t
children_length(PyObject *self)
{
    return num_children((Children *)self);
}

static PyObject *
children_subscript(PyObject *self, PyObject *page)
{
    if (!is_bytes(page, "a page"))
        return NULL;
    PyObject *child = find_child((Children *)self, PyBytes_AS_STRING(page), PyBytes_GET_SIZE(page));
    if (child == NULL)
        PyErr_SetObject(PyExc_KeyError, page);
    return Py_XNewRef(child);
}

static int
children_set(PyObject *self, PyObject *page, PyObject *child)
{
    Children *children = (Children *)self;
    if (!is_bytes(page, "a page") || (child != NULL && as_node(child) == NULL))
        return -1;
    if (children->capacity < 0) {
        PyErr_SetString(PyExc_TypeError, "the children of a leaf cannot be changed: hang a node below it");
        return -1;
    }
    const char *start = PyBytes_AS_STRING(page);
    Py_ssize_t size = PyBytes_GET_SIZE(page);
    if (child != NULL)
        return put_child(children, start, size, child, 0);
    PyObject *gone = find_child(children, start, size);
    if (gone == NULL || !drop_child(children, start, size, gone)) {
        PyErr_SetObject(PyExc_KeyError, page);
        return -1;
    }
    Py_DECREF(gone);
    return 0;
}

static PyObject *
children_get(PyObject *self, PyObject *page)
{
    if (!is_bytes(page, "a page"))
        return NULL;
    PyObject *child = find_child((Children *)self, PyBytes_AS_STRING(page), PyBytes_GET_SIZE(page));
    return Py_NewRef(child == NULL ? Py_None : child);
}

/* Up to `limit` children, from the first on, or from the last. */
static PyObject *
some_children(const Children *children, Py_ssize_t limit, int from_last)
{
    PyObject *found = PyList_New(0);
    for (Py_ssize_t i = 0; found != NULL && i < children->filled && PyList_GET_SIZE(found) < limit; i++) {
        PyObject *child = children->entries[from_last ? children->filled - 1 - i : i].child;
        if (child != NULL && PyList_Append(found, child) < 0)
            Py_CLEAR(found);
    }
    return found;
}

static PyObject *
children_values(PyObject *self, PyObject *nothing)
{
    return some_children((Children *)self, PY_SSIZE_T_MAX, 0);
}

static PyObject *
children_first(PyObject *self, PyObject *limit)
{
    Py_ssize_t count = size_of(limit, "limit");
    return count < 0 ? NULL : some_children((Children *)self, count, 0);
}

static PyObject *
children_last(PyObject *self, PyObject *limit)
{
    Py_ssize_t count = size_of(limit, "limit");
    return count < 0 ? NULL : some_children((Children *)self, count, 1);
}

/* ---------------------------------------------------------------- the type */

static int
children_traverse(PyObject *self, visitproc visit, void *arg)
{
    const Children *children = (Children *)self;
    for (Py_ssize_t i = 0; i < children->filled; i++)
        Py_VISIT(children->entries[i].child);
    return 0;
}

static int
children_clear(PyObject *self)
{
    Children *children = (Children *)self, gone = *children;
    if (gone.entries == children->few)
        gone.entries = gone.few;
    forget_entries(children); /* first: whoever goes may look at those that are left */
    for (Py_ssize_t i = 0; i < gone.filled; i++)
        Py_XDECREF(gone.entries[i].child);
    free_entries(&gone);
    return 0;
}

static void
children_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    Py_TRASHCAN_BEGIN(self, children_dealloc)
    children_clear(self);
    Py_TYPE(self)->tp_free(self);
    Py_TRASHCAN_END
}

static PyObject *
children_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {NULL};
    return PyArg_ParseTupleAndKeywords(args, kwargs, ":Children", names) ? (PyObject *)new_children() : NULL;
}

static PyMethodDef methods[] = {
    {"get", children_get, METH_O, NULL},
    {"values", children_values, METH_NOARGS, NULL},
    {"first", children_first, METH_O, NULL},
    {"last", children_last, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMappingMethods mapping = {children_length, children_subscript, children_set};

PyTypeObject ChildrenType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "raydix.cache_core.kernels._compiled.Children",
    .tp_doc = PyDoc_STR("Children()\n--\n\nNodes by the first page of their runs: see plain_kernels."),
    .tp_basicsize = sizeof(Children),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = children_new,
    .tp_dealloc = children_dealloc,
    .tp_traverse = children_traverse,
    .tp_clear = children_clear,
    .tp_methods = methods,
    .tp_as_mapping = &mapping,
};
