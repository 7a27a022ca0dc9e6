/* How nodes leave a tree. */

#include "_common.h"

/* 1 if it is a leaf with slots, below a node that has children; 0 with an exception set if not. */
static int
is_leaf(const Node *leaf, const Node *parent)
{
    int childless = is_childless(leaf);
    if (childless < 0 || is_childless(parent) < 0 || !is_bytes(leaf->data, "a node's data"))
        return 0;
    if (childless && leaf->slots != NULL && PyBytes_CheckExact(leaf->slots))
        return 1;
    PyErr_Format(PyExc_AssertionError, "not a leaf: %R", leaf);
    return 0;
}

/* What went through a leaf went through its parent as well. */
static void
inherit_use(Node *parent, const Node *leaf, int urgent)
{
    parent->own_hits = (Py_ssize_t)((size_t)parent->own_hits + (size_t)leaf->own_hits);
    if (parent->own_access_time < leaf->own_access_time)
        parent->own_access_time = leaf->own_access_time;
    if (urgent)
        set_member(&parent->own_priority, leaf->own_priority);
}

/* Take a leaf out of its parent's children; returns its slots, or NULL with an exception set and nothing changed. */
PyObject *
take_leaf(Node *leaf, Node *parent, Py_ssize_t page_bytes)
{
    int urgent = is_below(parent, leaf->own_priority); /* first: Python code that runs in it may change anything */
    if (urgent < 0 || !is_leaf(leaf, parent))
        return NULL;
    Py_ssize_t size = PyBytes_GET_SIZE(leaf->data);
    const char *data = PyBytes_AS_STRING(leaf->data);
    if (!drop_child((Children *)parent->children, data, size < page_bytes ? size : page_bytes, (PyObject *)leaf)) {
        PyErr_SetObject(PyExc_KeyError, leaf->data);
        return NULL;
    }
    PyObject *slots = leaf->slots;
    leaf->slots = Py_NewRef(Py_None);
    inherit_use(parent, leaf, urgent);
    Py_DECREF(leaf);
    return slots;
}

/* Have fetched where a leaf stands among its siblings, for who is about to take it out. */
void
expect_removal(const Node *leaf, Py_ssize_t page)
{
    const Node *parent = leaf == NULL ? NULL : (Node *)leaf->parent;
    if (parent == NULL || !is_of(leaf->parent, &NodeType) || leaf->end <= parent->end || parent->children == NULL || leaf->data == NULL ||
        !Py_IS_TYPE(parent->children, &ChildrenType) || !PyBytes_CheckExact(leaf->data))
        return;
    Py_ssize_t size = PyBytes_GET_SIZE(leaf->data), num_tokens = leaf->end - parent->end;
    expect_child((Children *)parent->children, PyBytes_AS_STRING(leaf->data), page < num_tokens ? size / num_tokens * page : size);
}

PyObject *
uproot(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (!expect_args("uproot", nargs, 2))
        return NULL;
    Node *leaf = as_node(args[0]), *parent = leaf == NULL ? NULL : as_node(leaf->parent);
    Py_ssize_t page_bytes = parent == NULL ? -1 : size_of(args[1], "page_bytes");
    if (page_bytes < 0)
        return NULL;
    Py_INCREF(parent);
    PyObject *slots = take_leaf(leaf, parent, page_bytes);
    Py_DECREF(parent);
    return slots;
}
