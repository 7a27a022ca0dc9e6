/* How nodes come into a tree: a leaf is hung below another node, or a node is cut in two. */

#include "_common.h"

int
is_node_type(PyObject *type)
{
    if (PyType_Check(type) && PyType_IsSubtype((PyTypeObject *)type, &NodeType))
        return 1;
    PyErr_SetString(PyExc_TypeError, "a type of nodes is needed");
    return 0;
}

/* The next of an iterator over ids; -1 with an exception set if there is none. */
static Py_ssize_t
next_id(PyObject *ids)
{
    PyObject *id = PyIter_Check(ids) ? PyIter_Next(ids) : NULL;
    Py_ssize_t number = id == NULL ? -1 : size_of(id, "an id");
    Py_XDECREF(id);
    if (number < 0 && !PyErr_Occurred())
        PyErr_SetString(PyExc_TypeError, "ids come from an iterator that does not end");
    return number;
}

static PyObject *
slice(PyObject *bytes, Py_ssize_t start, Py_ssize_t stop)
{
    return PyBytes_FromStringAndSize(PyBytes_AS_STRING(bytes) + start, stop - start);
}

/* Put a node below another one, under the first page of its data, where there is none yet or one that gives way; -1 with
 * an exception set on an error. */
static int
hang(Node *parent, PyObject *data, Py_ssize_t page_bytes, PyObject *child, int is_new)
{
    Children *children = children_of(parent);
    if (PyErr_Occurred())
        return -1;
    children = children == NULL ? new_children() : (Children *)Py_NewRef((PyObject *)children);
    if (children == NULL)
        return -1;
    Py_ssize_t size = PyBytes_GET_SIZE(data);
    int done = put_child(children, PyBytes_AS_STRING(data), size < page_bytes ? size : page_bytes, child, is_new);
    if (done == 0)
        set_member(&parent->children, (PyObject *)children);
    Py_DECREF(children);
    return done;
}

/* ---------------------------------------------------------------- leaves */

/* The leaf of these parts, all but its space and its data, hung below its parent. */
static PyObject *
new_leaf(PyTypeObject *type, NodeParts *parts, Py_ssize_t page_bytes, PyObject *data)
{
    Node *parent = (Node *)parts->parent;
    if (parent->space == NULL) {
        PyErr_SetString(PyExc_AttributeError, "space");
        return NULL;
    }
    PyObject *space = Py_NewRef(parent->space);
    parts->space = space;
    parts->data = data;
    PyObject *leaf = (PyObject *)new_node(type, parts);
    if (leaf != NULL && hang(parent, data, page_bytes, leaf, 1) < 0)
        Py_CLEAR(leaf);
    Py_DECREF(space);
    return leaf;
}

/* A part of a key's ids, in bytes; what is all of its data is they. */
static PyObject *
part_of_key(const Packed *key, Py_ssize_t start, Py_ssize_t stop)
{
    if (start == 0 && stop == key->size && key->data != NULL)
        return Py_NewRef(key->data);
    return PyBytes_FromStringAndSize(key->ids + start, stop - start);
}

PyObject *
grow(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Packed key;
    if (!expect_args("grow", nargs, 8) || !is_node_type(args[0]) || !packed_ids(args[4], &key))
        return NULL;
    Py_ssize_t page = size_of(args[2], "page_size");
    Node *parent = page < 0 ? NULL : as_node(args[3]);
    Py_ssize_t start = parent == NULL ? -1 : end_of(parent), stop = start < 0 ? -1 : size_of(args[5], "stop");
    Py_ssize_t now = stop < 0 ? -1 : PyLong_AsSsize_t(args[7]);
    if (PyErr_Occurred())
        return NULL;
    if (key.unit < 1 || page < 1 || start > stop || stop > key.size / key.unit || page > PY_SSIZE_T_MAX / key.unit) {
        PyErr_SetString(PyExc_ValueError, "a unit and a page are at least 1, and a leaf lies within the key");
        return NULL;
    }
    PyObject *data = part_of_key(&key, start * key.unit, stop * key.unit);
    Py_ssize_t node_id = data == NULL ? -1 : next_id(args[1]);
    NodeParts parts = {.id = node_id, .parent = args[3], .slots = args[6], .end = stop, .now = now};
    PyObject *leaf = node_id < 0 ? NULL : new_leaf((PyTypeObject *)args[0], &parts, page * key.unit, data);
    Py_XDECREF(data);
    return leaf;
}

/* ---------------------------------------------------------------- cuts */

/* What a cut takes: where it is, in tokens from the root; the bytes of a page and of the prefix's data; and how many slots
 * and pages go to the prefix. */
typedef struct {
    Py_ssize_t end, page_bytes, data_cut, num_slots, num_pages;
} Cut;

/* 1 if the node can be cut there, and how; 0 with an exception set if not. */
static int
plan(const Node *node, Py_ssize_t end, Py_ssize_t page, Cut *cut)
{
    const Node *parent = as_node(node->parent);
    Py_ssize_t start = parent == NULL ? -1 : end_of(parent), stop = start < 0 ? -1 : end_of(node);
    if (stop < 0)
        return 0;
    if (node->space == NULL || node->own_priority == NULL) {
        PyErr_SetString(PyExc_AttributeError, "a node to be cut is whole");
        return 0;
    }
    if (!is_bytes(node->data, "a node's data") || !is_bytes(node->slots, "a node's slots"))
        return 0;
    Py_ssize_t length = end - start, num_tokens = stop - start, slots = num_slots(node->slots);
    Py_ssize_t unit = num_tokens < 1 ? 0 : PyBytes_GET_SIZE(node->data) / num_tokens;
    if (unit < 1 || page < 1 || length < 1 || length % page != 0 || length >= num_tokens || slots < 0 ||
        slots > PY_SSIZE_T_MAX / length) {
        PyErr_Format(PyExc_AssertionError, "cannot split %R at %zd", node, end);
        return 0;
    }
    *cut = (Cut){end, page * unit, length * unit, slots * length / num_tokens, length / page};
    return 1;
}

enum { SHORT = 512 - 33 }; /* bytes: what is longer lies where it can be made shorter in place */

/* Whether a prefix shall have the memory of all that is cut, less the rest: most of it would have to be copied, and no
 * constructor is to see it before it is cut. What is short would be moved by that, unless little is taken from it, and
 * room be looked for when it is too late for there to be none. */
static int
takes_over(PyTypeObject *type, PyObject *whole, Py_ssize_t size)
{
    Py_ssize_t rest = PyBytes_GET_SIZE(whole) - size;
    return rest <= (rest + size > SHORT ? size : size / 3 - 8) && is_plain_type(type);
}

/* The node over the prefix, in its place below the parent; what is cut stays as it is. Its data may still be all of that. */
static Node *
new_prefix(Node *node, PyTypeObject *type, Py_ssize_t node_id, const Cut *cut)
{
    PyObject *whole = node->data, *slots = part_of_row(node->slots, cut->num_slots, 0);
    PyObject *data = takes_over(type, whole, cut->data_cut) ? Py_NewRef(whole) : slice(whole, 0, cut->data_cut);
    Node *above = NULL;
    if (data != NULL && slots != NULL) {
        NodeParts parts = {node_id, node->parent, node->space, data, slots, cut->end, node->own_access_time};
        above = new_node(type, &parts);
    }
    if (above != NULL) {
        set_member(&above->own_priority, node->own_priority);
        above->creation_time = node->creation_time;
        above->lock_ref = node->lock_ref;
    }
    Py_XDECREF(data);
    Py_XDECREF(slots);
    return above;
}

/* See to it that data that both nodes have is read by nobody else. From then on no code may run that is not ours. */
static int
keep_others_out(Node *above, const Node *node, const Cut *cut)
{
    if (above->data != node->data || Py_REFCNT(node->data) == 2)
        return 0;
    PyObject *data = slice(node->data, 0, cut->data_cut);
    if (data == NULL)
        return -1;
    set_member(&above->data, data);
    Py_DECREF(data);
    return 0;
}

/* What a node and its prefix have once they are two; no hashes if there were none. */
typedef struct {
    PyObject *data, *slots, *hashes, *hashes_above;
} Shares;

/* The hashes of both: 0 with an exception set on an error. */
static int
plan_hashes(const Node *node, const Cut *cut, Shares *shares)
{
    PyObject *hashes = node->hash_values;
    if (hashes == Py_None)
        return 1;
    if (hashes == NULL || !PyList_CheckExact(hashes)) {
        PyErr_SetString(PyExc_TypeError, "the hashes of pages stand in a list");
        return 0;
    }
    Py_INCREF(hashes); /* a collection may run, and take them away */
    shares->hashes = PyList_GetSlice(hashes, cut->num_pages, PY_SSIZE_T_MAX);
    shares->hashes_above = PyList_GetSlice(hashes, 0, cut->num_pages);
    Py_DECREF(hashes);
    return shares->hashes != NULL && shares->hashes_above != NULL;
}

/* The shares of the rest, and the hashes of both: 0 with an exception set on an error. */
static int
plan_shares(const Node *node, const Cut *cut, Shares *shares)
{
    *shares = (Shares){0};
    shares->data = slice(node->data, cut->data_cut, PyBytes_GET_SIZE(node->data));
    shares->slots = part_of_row(node->slots, cut->num_slots, 1);
    return shares->data != NULL && shares->slots != NULL && plan_hashes(node, cut, shares);
}

/* Leave a node the rest, and its prefix all else, which stays where it is: to give memory back takes none. */
static int
share_out(Node *node, Node *above, const Shares *shares, const Cut *cut)
{
    int is_shared = above->data == node->data;
    set_member(&node->data, shares->data);
    set_member(&node->slots, shares->slots);
    if (shares->hashes != NULL) {
        set_member(&node->hash_values, shares->hashes);
        set_member(&above->hash_values, shares->hashes_above);
    }
    set_member(&node->parent, (PyObject *)above);
    return is_shared ? _PyBytes_Resize(&above->data, cut->data_cut) : 0;
}

/* Hang the rest of a node below the new one over its prefix. */
static int
put_below(Node *node, Node *above, const Cut *cut)
{
    Shares shares;
    int done = -1;
    if (plan_shares(node, cut, &shares) && hang(above, shares.data, cut->page_bytes, (PyObject *)node, 1) == 0 &&
        keep_others_out(above, node, cut) == 0)
        done = hang((Node *)node->parent, node->data, cut->page_bytes, (PyObject *)above, 0);
    if (done == 0)
        done = share_out(node, above, &shares, cut);
    Py_XDECREF(shares.data);
    Py_XDECREF(shares.slots);
    Py_XDECREF(shares.hashes);
    Py_XDECREF(shares.hashes_above);
    return done;
}

/* Cut a node, tokens from the root; returns the new one above it, NULL with an exception set on an error. */
Node *
cut_node(PyTypeObject *type, PyObject *ids, Py_ssize_t page, Node *node, Py_ssize_t end)
{
    Cut how;
    Py_ssize_t node_id = next_id(ids);
    if (node_id < 0 || !plan(node, end, page, &how))
        return NULL;
    Node *above = new_prefix(node, type, node_id, &how);
    if (above != NULL && put_below(node, above, &how) < 0)
        Py_CLEAR(above);
    return above;
}

PyObject *
cut(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (!expect_args("cut", nargs, 5) || !is_node_type(args[0]))
        return NULL;
    Py_ssize_t page = size_of(args[2], "page_size");
    Node *node = page < 0 ? NULL : as_node(args[3]);
    Py_ssize_t end = node == NULL ? -1 : size_of(args[4], "end");
    return end < 0 ? NULL : (PyObject *)cut_node((PyTypeObject *)args[0], args[1], page, node, end);
}
