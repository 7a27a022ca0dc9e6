/* The nodes of a tree: what they are made of, and how one more is hung below another. */

#include "_kernels.h"

#define FIELD(name) {#name, T_OBJECT_EX, offsetof(Node, name), 0, NULL}

static PyMemberDef members[] = {
    FIELD(id), FIELD(parent), FIELD(space), FIELD(data), FIELD(slots), FIELD(end), FIELD(children),
    FIELD(own_access_time), FIELD(creation_time), FIELD(own_hits), FIELD(own_priority), FIELD(hash_values),
    FIELD(swa_access_time), FIELD(swa_boundary_id), FIELD(swa_lock_ref), FIELD(swa_tombstone),
    {"lock_ref", T_PYSSIZET, offsetof(Node, lock_ref), 0, NULL},
    {"own_locks", T_PYSSIZET, offsetof(Node, own_locks), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static int
node_traverse(PyObject *self, visitproc visit, void *arg)
{
    return visit_members(self, members, visit, arg);
}

static int
node_clear(PyObject *self)
{
    clear_members(self, members);
    return 0;
}

static void
node_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    Py_TRASHCAN_BEGIN(self, node_dealloc) /* a node keeps its parent alive, and so a whole path */
    clear_members(self, members);
    Py_TYPE(self)->tp_free(self);
    Py_TRASHCAN_END
}

enum { NODE_ID, PARENT, SPACE, DATA, SLOTS, END, NOW, NUM_ARGS };

static void
set(PyObject **field, PyObject *value)
{
    PyObject *old = *field;
    Py_INCREF(value);
    *field = value;
    Py_XDECREF(old);
}

static int
fill(Node *node, PyObject *const *args)
{
    PyObject *children = PyDict_New(), *zero = PyLong_FromLong(0);
    if (children != NULL && zero != NULL) {
        set(&node->id, args[NODE_ID]);
        set(&node->parent, args[PARENT]);
        set(&node->space, args[SPACE]);
        set(&node->data, args[DATA]);
        set(&node->slots, args[SLOTS]);
        set(&node->end, args[END]);
        set(&node->children, children);
        set(&node->own_access_time, args[NOW]);
        set(&node->creation_time, args[NOW]);
        set(&node->own_hits, zero);
        set(&node->own_priority, zero);
        set(&node->hash_values, Py_None);
        set(&node->swa_access_time, args[NOW]);
        set(&node->swa_boundary_id, Py_None);
        set(&node->swa_lock_ref, zero);
        set(&node->swa_tombstone, Py_False);
        node->lock_ref = node->own_locks = 0;
    }
    Py_XDECREF(children);
    Py_XDECREF(zero);
    return children == NULL || zero == NULL ? -1 : 0;
}

static int
node_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"node_id", "parent", "space", "data", "slots", "end", "now", NULL};
    PyObject *given[NUM_ARGS];
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOOO:Node", names, &given[NODE_ID], &given[PARENT],
                                     &given[SPACE], &given[DATA], &given[SLOTS], &given[END], &given[NOW]))
        return -1;
    return fill((Node *)self, given);
}

PyTypeObject NodeType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "raydix.cache_core._kernels.Node",
    .tp_doc = PyDoc_STR("Node(node_id, parent, space, data, slots, end, now)\n--\n\n"
                        "What a node of a tree is made of: see plain_kernels."),
    .tp_basicsize = sizeof(Node),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = node_init,
    .tp_dealloc = node_dealloc,
    .tp_traverse = node_traverse,
    .tp_clear = node_clear,
    .tp_members = members,
};

/* ---------------------------------------------------------------- reading them */

/* The node that it is; NULL with an exception set if it is none. */
Node *
as_node(PyObject *object)
{
    if (object != NULL && PyObject_TypeCheck(object, &NodeType))
        return (Node *)object;
    PyErr_Format(PyExc_TypeError, "a node is needed, not %s", object == NULL ? "nothing" : Py_TYPE(object)->tp_name);
    return NULL;
}

/* Where its run ends, in tokens; -1 with an exception set if it does not say so. */
Py_ssize_t
end_of(const Node *node)
{
    if (node->end != NULL)
        return size_of(node->end, "end");
    PyErr_SetString(PyExc_AttributeError, "end");
    return -1;
}

/* Its children, borrowed; NULL with an exception set if they are no dict. */
PyObject *
children_of(const Node *node)
{
    if (node->children != NULL && PyDict_CheckExact(node->children))
        return node->children;
    PyErr_SetString(PyExc_TypeError, "a node's children must be a dict");
    return NULL;
}

/* ---------------------------------------------------------------- new ones */

/* A node of that type, made in one go unless the type has a constructor of its own. */
static Node *
made(PyTypeObject *type, PyObject *const *args)
{
    if (type->tp_init != node_init || type->tp_new != NodeType.tp_new) {
        PyObject *other = PyObject_Vectorcall((PyObject *)type, args, NUM_ARGS, NULL);
        Node *node = other == NULL ? NULL : as_node(other);
        if (node == NULL)
            Py_XDECREF(other);
        return node;
    }
    PyObject *node = type->tp_alloc(type, 0);
    if (node != NULL && fill((Node *)node, args) < 0)
        Py_CLEAR(node);
    return (Node *)node;
}

static int
is_node_type(PyObject *type)
{
    if (PyType_Check(type) && PyType_IsSubtype((PyTypeObject *)type, &NodeType))
        return 1;
    PyErr_SetString(PyExc_TypeError, "a type of nodes is needed");
    return 0;
}

/* A leaf with `data`, in its place below its parent. */
static PyObject *
hung(PyTypeObject *type, PyObject *const *args, Py_ssize_t page_bytes)
{
    PyObject *data = args[DATA], *children = children_of((Node *)args[PARENT]);
    Py_ssize_t size = PyBytes_GET_SIZE(data) < page_bytes ? PyBytes_GET_SIZE(data) : page_bytes;
    PyObject *first = children == NULL ? NULL : PyBytes_FromStringAndSize(PyBytes_AS_STRING(data), size);
    if (first == NULL)
        return NULL;
    Py_INCREF(children); /* a constructor may put others in their place */
    PyObject *leaf = (PyObject *)made(type, args);
    if (leaf != NULL && PyDict_SetItem(children, first, leaf) < 0)
        Py_CLEAR(leaf);
    Py_DECREF(children);
    Py_DECREF(first);
    return leaf;
}

PyObject *
grow(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (!expect_args("grow", nargs, 9) || !is_node_type(args[0]) || !is_bytes(args[3], "the data of a key"))
        return NULL;
    Node *parent = as_node(args[2]);
    Py_ssize_t start = parent == NULL ? -1 : end_of(parent);
    Py_ssize_t unit = PyErr_Occurred() ? -1 : size_of(args[4], "unit");
    Py_ssize_t page = PyErr_Occurred() ? -1 : size_of(args[5], "page_size");
    Py_ssize_t stop = PyErr_Occurred() ? -1 : size_of(args[6], "stop");
    if (PyErr_Occurred())
        return NULL;
    if (unit < 1 || page < 1 || start > stop || stop > PyBytes_GET_SIZE(args[3]) / unit || page > PY_SSIZE_T_MAX / unit) {
        PyErr_SetString(PyExc_ValueError, "a unit and a page are at least 1, and a leaf lies within the data");
        return NULL;
    }
    if (parent->space == NULL) {
        PyErr_SetString(PyExc_AttributeError, "space");
        return NULL;
    }
    PyObject *data = PyBytes_FromStringAndSize(PyBytes_AS_STRING(args[3]) + start * unit, (stop - start) * unit);
    if (data == NULL)
        return NULL;
    PyObject *space = parent->space;
    Py_INCREF(space);
    PyObject *const of_leaf[NUM_ARGS] = {args[1], args[2], space, data, args[7], args[6], args[8]};
    PyObject *leaf = hung((PyTypeObject *)args[0], of_leaf, page * unit);
    Py_DECREF(space);
    Py_DECREF(data);
    return leaf;
}
