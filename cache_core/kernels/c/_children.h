/* What the children of a node are made of. */

#include "_common.h"

#define FEW 8      /* entries without an index */
#define NOWHERE -1 /* in the index: nothing has stood there yet */

typedef struct {
    uint64_t hash;
    PyObject *child; /* NULL: it has gone */
    const void *data; /* where the child's lay when somebody last came by: to be fetched, never to be read */
} Entry;

typedef struct {
    PyObject *child; /* borrowed from its entry; NULL: it has gone, or there never was one */
    uint32_t tag;    /* of its hash */
    int32_t at;      /* in the row of entries, or NOWHERE */
    const void *data, *children; /* where the child's lay when somebody last came by: to be fetched, never to be read */
} Place;

struct children {
    PyObject_HEAD
    Py_ssize_t used, filled, capacity; /* entries that are there, that ever were, and that have room; -1: read-only */
    Entry *entries;
    Place *index; /* of half as many places again as entries have room, at least; NULL while there are few */
    uint64_t mask;
    Entry few[FEW];
};

void forget_entries(Children *children);
void free_entries(const Children *children);
