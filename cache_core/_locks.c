/* Locks of nodes: each counts on its node and on all above it. */

#include "_kernels.h"

/* 1 if every node from this one up is sound, each ending after its parent does, so that the way up ends. */
static int
leads_to_root(Node *node)
{
    Py_ssize_t end = end_of(node);
    while (end >= 0 && node->parent != Py_None) {
        Node *above = as_node(node->parent);
        Py_ssize_t start = above == NULL ? -1 : end_of(above);
        if (start < 0)
            return 0;
        if (start >= end && above->parent != Py_None) {
            PyErr_SetString(PyExc_ValueError, "a node must end after its parent");
            return 0;
        }
        node = above;
        end = start;
    }
    return end >= 0;
}

/* Change the locks of a node and of all above it, the root excepted. Returns where those end that changed sides: from
 * the node up, those without locks before or afterwards. */
static Py_ssize_t
climb(Node *node, Py_ssize_t step)
{
    Py_ssize_t idle = step > 0 ? 0 : 1, reached = end_of(node);
    int changes = 1;
    for (; node->parent != Py_None; node = (Node *)node->parent) {
        changes = changes && node->lock_ref == idle;
        node->lock_ref += step;
        if (changes)
            reached = end_of((Node *)node->parent);
    }
    return reached;
}

static PyObject *
count_lock(PyObject *object, Py_ssize_t step)
{
    Node *node = as_node(object);
    if (node == NULL || !leads_to_root(node))
        return NULL;
    if (step < 0 && node->own_locks <= 0) {
        PyErr_Format(PyExc_AssertionError, "unlock of %R", node);
        return NULL;
    }
    node->own_locks += step;
    return PyLong_FromSsize_t(end_of(node) - climb(node, step));
}

PyObject *
lock_path(PyObject *module, PyObject *node)
{
    return count_lock(node, 1);
}

PyObject *
unlock_path(PyObject *module, PyObject *node)
{
    return count_lock(node, -1);
}
