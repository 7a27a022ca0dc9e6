/* Locks of nodes: each counts on its node and on all above it. */

#include "_common.h"

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

/* Count a lock more (1) or, of those there are, less (-1); returns how many tokens changed sides, -1 with an exception set
 * if it cannot be. */
Py_ssize_t
count_lock(Node *node, Py_ssize_t step)
{
    if (!leads_to_root(node))
        return -1;
    node->own_locks += step;
    return end_of(node) - climb(node, step);
}
