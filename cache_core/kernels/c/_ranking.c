/* Nodes in the order in which they are to go: each names its neighbours, and stands in one ranking at most. */

#include "_ranking.h"

/* ---------------------------------------------------------------- links */

/* Put a node behind another one; NULL: before all others. */
void
link_node(Ranking *ranking, Node *node, PyObject *rank, Node *before)
{
    Py_INCREF(node);
    Py_INCREF(rank);
    node->ranking = ranking;
    node->rank = rank;
    node->before = before;
    node->after = before == NULL ? ranking->first : before->after;
    if (before != NULL)
        before->after = node;
    else
        ranking->first = node;
    if (node->after != NULL)
        node->after->before = node;
    else
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

enum { SPARSE = 4 }; /* ticks between two that stand side by side, at most, in the mean */

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

/* What a rank is if it is a plain integer, which alone can be compared without code of anybody's: 1, or 0 if it is none. */
static int
is_integer(PyObject *rank, long long *value)
{
    int overflow = 1;
    if (PyLong_CheckExact(rank))
        *value = PyLong_AsLongLongAndOverflow(rank, &overflow);
    return !overflow;
}

/* Find the one behind which a node of that rank stands, NULL if it goes before all others: 1, or 0 if it is none of the last
 * few. Ranks are times, most of them: what differs by much in rank does so in place, and is not looked for. */
int
find_place(const Ranking *ranking, const Node *node, PyObject *rank, Node **before)
{
    long long value, other;
    Node *at = ranking->last;
    if (at == NULL || !is_integer(rank, &value) || !is_integer(at->rank, &other) ||
        other / SPARSE - value / SPARSE > ranking->reach)
        return 0;
    for (Py_ssize_t steps = 0; at != NULL; at = at->before, steps++) {
        if (steps > ranking->reach || !is_integer(at->rank, &other))
            return 0;
        if (other < value || (other == value && at->id <= node->id))
            break;
    }
    *before = at;
    return 1;
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
