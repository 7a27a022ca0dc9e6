/* The nodes of a tree: what they are made of, and how one more is hung below another. */

#include "_kernels.h"

#define FIELD(name) {#name, T_OBJECT_EX, offsetof(Node, name), 0, NULL}

static PyMemberDef members[] = {
    FIELD(parent), FIELD(space), FIELD(children), FIELD(hash_values),
    FIELD(id), FIELD(data), FIELD(slots), FIELD(end),
    FIELD(own_access_time), FIELD(creation_time), FIELD(own_hits), FIELD(own_priority),
    FIELD(swa_access_time), FIELD(swa_boundary_id), FIELD(swa_lock_ref), FIELD(swa_tombstone),
    {"lock_ref", T_PYSSIZET, offsetof(Node, lock_ref), 0, NULL},
    {"own_locks", T_PYSSIZET, offsetof(Node, own_locks), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

/* Only what can lead back to the node: all else is numbers and bytes, and a collection should not touch them. */
static int
node_traverse(PyObject *self, visitproc visit, void *arg)
{
    Node *node = (Node *)self;
    Py_VISIT(node->parent);
    Py_VISIT(node->space);
    Py_VISIT(node->children);
    Py_VISIT(node->hash_values);
    return 0;
}

static int
node_clear(PyObject *self)
{
    Node *node = (Node *)self;
    Py_CLEAR(node->parent);
    Py_CLEAR(node->space);
    Py_CLEAR(node->children);
    Py_CLEAR(node->hash_values);
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

static int
fill(Node *node, PyObject *const *args)
{
    PyObject *zero = PyLong_FromLong(0);
    if (zero != NULL) {
        set_member(&node->id, args[NODE_ID]);
        set_member(&node->parent, args[PARENT]);
        set_member(&node->space, args[SPACE]);
        set_member(&node->data, args[DATA]);
        set_member(&node->slots, args[SLOTS]);
        set_member(&node->end, args[END]);
        set_member(&node->children, (PyObject *)no_children());
        set_member(&node->own_access_time, args[NOW]);
        set_member(&node->creation_time, args[NOW]);
        set_member(&node->own_hits, zero);
        set_member(&node->own_priority, zero);
        set_member(&node->hash_values, Py_None);
        set_member(&node->swa_access_time, args[NOW]);
        set_member(&node->swa_boundary_id, Py_None);
        set_member(&node->swa_lock_ref, zero);
        set_member(&node->swa_tombstone, Py_False);
        node->lock_ref = node->own_locks = 0;
    }
    Py_XDECREF(zero);
    return zero == NULL ? -1 : 0;
}

static int
node_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"node_id", "parent", "space", "data", "slots", "end", "now", NULL};
    PyObject *given[NUM_NODE_ARGS];
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

/* A node of that type, made in one go unless the type has a constructor of its own. */
Node *
new_node(PyTypeObject *type, PyObject *const *args)
{
    if (type->tp_init != node_init || type->tp_new != NodeType.tp_new) {
        PyObject *other = PyObject_Vectorcall((PyObject *)type, args, NUM_NODE_ARGS, NULL);
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

/* Its children, borrowed; NULL if it has none, or with an exception set if they are something else. */
Children *
children_of(const Node *node)
{
    if (node->children == (PyObject *)no_children())
        return NULL;
    if (node->children != NULL && Py_IS_TYPE(node->children, &ChildrenType))
        return (Children *)node->children;
    PyErr_SetString(PyExc_TypeError, "a node's children must be Children");
    return NULL;
}
