/* Nodes in the order in which they are to go: each names its neighbours, and stands in one ranking at most. */

#include "_ranking.h"

/* ---------------------------------------------------------------- links */

void
append_node(Ranking *ranking, Node *node, PyObject *rank)
{
    Py_INCREF(node);
    Py_INCREF(rank);
    node->ranking = ranking;
    node->rank = rank;
    node->before = ranking->last;
    node->after = NULL;
    if (ranking->last != NULL)
        ranking->last->after = node;
    else
        ranking->first = node;
    ranking->last = node;
    ranking->length++;
}

/* Take a node out of its ranking, whose reference to it becomes the caller's. */
void
unlink_node(Ranking *ranking, Node *node)
{
    if (node->before != NULL)
        node->before->after = node->after;
    else
        ranking->first = node->after;
    if (node->after != NULL)
        node->after->before = node->before;
    else
        ranking->last = node->before;
    node->ranking = NULL;
    node->before = node->after = NULL;
    ranking->length--;
    Py_CLEAR(node->rank);
}

void
empty_ranking(Ranking *ranking)
{
    while (ranking->first != NULL) {
        Node *node = ranking->first;
        unlink_node(ranking, node);
        Py_DECREF(node);
    }
}

/* ---------------------------------------------------------------- order */

/* Whether one object goes before another: 1 or 0, -1 on an error. */
int
compare_ranks(PyObject *one, PyObject *other, int how)
{
    Py_INCREF(other); /* what Python code compares may change the ranking */
    int said = PyObject_RichCompareBool(one, other, how);
    Py_DECREF(other);
    return said;
}

/* Whether a node of that rank stands last if it is put at the end: 1 or 0, -1 on an error. */
int
goes_last(const Ranking *ranking, const Node *node, PyObject *rank)
{
    if (ranking->last == NULL)
        return 1;
    int higher = compare_ranks(rank, ranking->last->rank, Py_GT);
    if (higher != 0 || ranking->last == NULL)
        return higher;
    int equal = compare_ranks(rank, ranking->last->rank, Py_EQ);
    return equal > 0 && ranking->last != NULL ? node->id >= ranking->last->id : equal;
}

/* Who goes next has been used by nobody for long: what taking it out of the tree will want is fetched while those before
 * it go. A node leads on only once it is there: of the third it is the node, of the second what it names. */
void
fetch_next(const Node *next)
{
    const Node *second = next == NULL ? NULL : next->after;
    if (second == NULL)
        return;
    fetch(second->parent, LINES(Node));
    fetch(second->data, 3);
    fetch(second->slots, 12);
    fetch(second->rank, 1);
    fetch(second->after, LINES(Node));
}

/* Who goes next, borrowed, if a ranking says so. */
const Node *
next_of(PyObject *queue)
{
    return queue != NULL && is_of(queue, &RankingType) ? ((Ranking *)queue)->first : NULL;
}
