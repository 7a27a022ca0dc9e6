/* What a ranking of nodes is made of. */

#include "_common.h"

struct ranking {
    PyObject_HEAD
    PyObject *rank; /* what orders the nodes: called with one */
    Node *first, *last;
    Py_ssize_t length;
    Py_ssize_t num_late; /* what its heir in Python keeps beside the ranking */
    Py_ssize_t reach;    /* so many from the end are looked at for the place of what does not go last */
};

void link_node(Ranking *ranking, Node *node, PyObject *rank, Node *before);
void unlink_node(Ranking *ranking, Node *node);
void empty_ranking(Ranking *ranking);
int find_place(const Ranking *ranking, const Node *node, PyObject *rank, Node **before);
int goes_last(const Ranking *ranking, const Node *node, PyObject *rank);
int compare_ranks(PyObject *one, PyObject *other, int how);
void fetch_next(const Node *next);
