/* The nodes of a tree: what they are made of, and how one more is hung below another. */

#include "_common.h"

#define FIELD(name) {#name, T_OBJECT_EX, offsetof(Node, name), 0, NULL}
#define NUMBER(name) {#name, T_PYSSIZET, offsetof(Node, name), 0, NULL}

static PyMemberDef members[] = {
    FIELD(parent), FIELD(space), FIELD(children), FIELD(data),
    FIELD(slots), FIELD(own_priority), FIELD(hash_values), FIELD(swa_boundary_id),
    NUMBER(end), NUMBER(id), NUMBER(own_access_time), NUMBER(creation_time), NUMBER(own_hits),
    NUMBER(lock_ref), NUMBER(own_locks), NUMBER(swa_access_time), NUMBER(swa_lock_ref),
    {"swa_tombstone", T_BOOL, offsetof(Node, swa_tombstone), 0, NULL},
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
fill(Node *node, const NodeParts *parts)
{
    PyObject *zero = PyLong_FromLong(0);
    if (zero == NULL)
        return -1;
    set_member(&node->parent, parts->parent);
    set_member(&node->space, parts->space);
    set_member(&node->data, parts->data);
    set_member(&node->slots, parts->slots);
    set_member(&node->children, (PyObject *)no_children());
    set_member(&node->own_priority, zero);
    set_member(&node->hash_values, Py_None);
    set_member(&node->swa_boundary_id, Py_None);
    Py_DECREF(zero);
    node->id = parts->id;
    node->end = parts->end;
    node->own_access_time = node->creation_time = node->swa_access_time = parts->now;
    node->own_hits = node->lock_ref = node->own_locks = node->swa_lock_ref = 0;
    node->swa_tombstone = 0;
    return 0;
}

static int
node_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"node_id", "parent", "space", "data", "slots", "end", "now", NULL};
    NodeParts given;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "nOOOOnn:Node", names, &given.id, &given.parent, &given.space,
                                     &given.data, &given.slots, &given.end, &given.now))
        return -1;
    return fill((Node *)self, &given);
}

static Py_ssize_t
node_length(PyObject *self)
{
    return ((Node *)self)->parent == Py_None ? 0 : length_of((Node *)self);
}

static PySequenceMethods as_sequence = {.sq_length = node_length};

PyTypeObject NodeType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "raydix.cache_core.kernels._compiled.Node",
    .tp_doc = PyDoc_STR("Node(node_id, parent, space, data, slots, end, now)\n--\n\n"
                        "What a node of a tree is made of: see plain_kernels."),
    .tp_basicsize = sizeof(Node),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = node_init,
    .tp_dealloc = node_dealloc,
    .tp_traverse = node_traverse,
    .tp_clear = node_clear,
    .tp_as_sequence = &as_sequence,
    .tp_members = members,
};

/* A node of a type that has a constructor of its own. */
static Node *
called_for(PyTypeObject *type, const NodeParts *parts)
{
    PyObject *made = PyObject_CallFunction((PyObject *)type, "nOOOOnn", parts->id, parts->parent, parts->space, parts->data,
                                           parts->slots, parts->end, parts->now);
    Node *node = made == NULL ? NULL : as_node(made);
    if (node == NULL)
        Py_XDECREF(made);
    return node;
}

/* Whether a type has no constructor of its own. */
int
is_plain_type(PyTypeObject *type)
{
    return type->tp_init == node_init && type->tp_new == NodeType.tp_new;
}

/* A node of that type, made in one go if it can be. */
Node *
new_node(PyTypeObject *type, const NodeParts *parts)
{
    if (!is_plain_type(type))
        return called_for(type, parts);
    PyObject *node = type->tp_alloc(type, 0);
    if (node != NULL && fill((Node *)node, parts) < 0)
        Py_CLEAR(node);
    return (Node *)node;
}

/* ---------------------------------------------------------------- reading them */

/* The node that it is; NULL with an exception set if it is none. */
Node *
as_node(PyObject *object)
{
    if (object != NULL && is_of(object, &NodeType))
        return (Node *)object;
    PyErr_Format(PyExc_TypeError, "a node is needed, not %s", object == NULL ? "nothing" : Py_TYPE(object)->tp_name);
    return NULL;
}

PyObject *
last_use(PyObject *module, PyObject *object)
{
    if (is_of(object, &NodeType))
        return PyLong_FromSsize_t(((Node *)object)->own_access_time);
    return PyObject_GetAttrString(object, "own_access_time");
}

/* Where its run ends, in tokens; -1 with an exception set if that cannot be. */
Py_ssize_t
end_of(const Node *node)
{
    if (node->end >= 0)
        return node->end;
    PyErr_SetString(PyExc_ValueError, "end must not be negative");
    return -1;
}

/* Whether its priority is below another one: 1 or 0, -1 with an exception set if that cannot be told. */
int
is_below(const Node *node, PyObject *priority)
{
    if (node->own_priority == NULL || priority == NULL) {
        PyErr_SetString(PyExc_AttributeError, "own_priority");
        return -1;
    }
    PyObject *own = Py_NewRef(node->own_priority), *other = Py_NewRef(priority); /* who compares them may set others */
    int said = own == other ? 0 : PyObject_RichCompareBool(own, other, Py_LT);
    Py_DECREF(own);
    Py_DECREF(other);
    return said;
}

/* How many tokens its run holds; -1 with an exception set if that cannot be told. */
Py_ssize_t
length_of(const Node *node)
{
    const Node *parent = as_node(node->parent);
    Py_ssize_t start = parent == NULL ? -1 : end_of(parent);
    if (start < 0 || node->end >= start)
        return start < 0 ? -1 : node->end - start;
    PyErr_SetString(PyExc_ValueError, "a node must not end before its parent");
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

/* Whether it has no children: 1 or 0, -1 with an exception set if that cannot be told. */
int
is_childless(const Node *node)
{
    const Children *children = children_of(node);
    if (children == NULL && PyErr_Occurred())
        return -1;
    return children == NULL || num_children(children) == 0;
}
