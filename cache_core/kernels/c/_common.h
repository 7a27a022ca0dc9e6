/* What the parts of `_compiled` share. `plain_kernels.py` says in Python what each of them does; a test holds both to
 * it. Whatever they are given, they read and write nothing that is not theirs: what does not fit raises. */

#ifndef RAYDIX_COMMON_H
#define RAYDIX_COMMON_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

#if defined(__GNUC__)
#pragma GCC visibility push(hidden) /* PyInit__compiled alone is exported */
#endif

/* Rows are long: a loop over them is compiled for wide vectors, too, and the widest that the machine has is chosen when the
 * module is loaded. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDE
#endif

/* Have lines of memory fetched that would else be waited for one by one. The address need not be valid. */
#define LINES(type) (sizeof(type) / 64 + 1)
static inline void
fetch(const void *start, size_t lines)
{
#if defined(__GNUC__)
    for (size_t line = 0; line < lines; line++)
        __builtin_prefetch((const void *)((uintptr_t)start + 64 * line));
#endif
}

typedef struct children Children;
typedef struct ranking Ranking; /* nodes in the order in which they are to go */

/* A run of tokens in a tree. What Python code may set of objects can be anything, or nothing once deleted. Numbers stand
 * in the node itself: an object for each would be one more cold line of memory. */
typedef struct node {
    PyObject_HEAD
    PyObject *parent, *space, *children, *data, *slots, *own_priority, *hash_values, *swa_boundary_id;
    Py_ssize_t end, id, own_access_time, creation_time, own_hits, lock_ref, own_locks, swa_access_time, swa_lock_ref;
    char swa_tombstone;
    Ranking *ranking; /* that it stands in, if any, which keeps it alive; what follows is the ranking's */
    struct node *before, *after;
    PyObject *rank;
} Node;

/* A row of token ids, packed; of its members holds what is said of those of a node. */
typedef struct {
    PyObject_HEAD
    PyObject *data, *extra_key, *width, *arity, *unit, *num_tokens;
    Py_buffer lent; /* ids that somebody else has packed; of nobody once they are copied to `data` */
} Key;

typedef struct {
    const char *ids;
    Py_ssize_t size, unit; /* bytes of all of them, and of one token */
    PyObject *data;        /* they are all of this, if it is not NULL */
} Packed;

/* Nodes that left the tree. */
typedef struct {
    PyObject *node, *row; /* what it held */
    Py_ssize_t num_tokens;
} Victim;

typedef struct {
    PyObject_HEAD
    Victim *noted;
    Py_ssize_t count, room, num_tokens; /* of all */
    Victim few[4];
} Victims;

extern PyTypeObject NodeType, ChildrenType, KeyType, RankingType, HoldingsType, VictimsType;

/* Whether an object is of a type: nearly all are, or of a class made from it, and take no call to tell. */
static inline int
is_of(PyObject *object, PyTypeObject *type)
{
    return Py_IS_TYPE(object, type) || Py_TYPE(object)->tp_base == type || PyType_IsSubtype(Py_TYPE(object), type);
}

/* arguments, members: _common.c */
int expect_args(const char *function, Py_ssize_t found, Py_ssize_t expected);
Py_ssize_t size_of(PyObject *object, const char *what);
int is_bytes(PyObject *object, const char *what);
void clear_members(PyObject *self, const PyMemberDef *members);
void set_member(PyObject **field, PyObject *value);

/* nodes: _nodes.c */
typedef struct { /* what one is made from; the objects stay the caller's */
    Py_ssize_t id;
    PyObject *parent, *space, *data, *slots;
    Py_ssize_t end, now;
} NodeParts;
int is_plain_type(PyTypeObject *type);
Node *new_node(PyTypeObject *type, const NodeParts *parts);
Node *as_node(PyObject *object);
Py_ssize_t end_of(const Node *node);
Py_ssize_t length_of(const Node *node);
Children *children_of(const Node *node);
int is_childless(const Node *node);
int is_below(const Node *node, PyObject *priority);

/* how they come into a tree: _growth.c */
int is_node_type(PyObject *type);
Node *cut_node(PyTypeObject *type, PyObject *ids, Py_ssize_t page, Node *node, Py_ssize_t end);

/* locks of nodes: _locks.c */
Py_ssize_t count_lock(Node *node, Py_ssize_t step);

/* leaves that go: _removal.c */
PyObject *take_leaf(Node *leaf, Node *parent, Py_ssize_t page_bytes);
void expect_removal(const Node *leaf, Py_ssize_t page);

/* what has gone: _victims.c */
Victims *new_victims(void);
int add_victim(Victims *victims, PyObject *node, PyObject *row, Py_ssize_t num_tokens);
int give_back(const Victims *victims, Py_ssize_t page, PyObject *free_slots, PyObject *free_each);

/* the next of a queue: _ranking.c */
const Node *next_of(PyObject *queue);

/* keys: _keys.c */
int packed_ids(PyObject *key, Packed *packed);

/* packing: _pack.c */
char letter_of(const Py_buffer *view);
int has_no_sign(const uint32_t *ids, Py_ssize_t count);

/* children: _children.c */
Children *new_children(void);
Children *no_children(void);
PyObject *find_child(const Children *children, const char *page, Py_ssize_t size);
void expect_child(const Children *children, const char *page, Py_ssize_t size);
int put_child(Children *children, const char *page, Py_ssize_t size, PyObject *child, int is_new);
int drop_child(Children *children, const char *page, Py_ssize_t size, const PyObject *child);
Py_ssize_t num_children(const Children *children);

/* rows of slots, which are bytes: _rows.c */
Py_ssize_t num_slots(PyObject *row);
int64_t *write_row(PyObject *row, Py_ssize_t num_tokens, Py_ssize_t page, int64_t *out);
PyObject *part_of_row(PyObject *row, Py_ssize_t count, int is_rest);

/* those that are runs: _runs.c */
Py_ssize_t run_length(const int64_t *slots, Py_ssize_t count);
PyObject *as_runs(const int64_t *slots, Py_ssize_t count);
PyObject *starts_of_runs(const int64_t *slots, Py_ssize_t count, Py_ssize_t page);
int is_runs(PyObject *row);
Py_ssize_t num_in_runs(PyObject *row, Py_ssize_t most);
void write_runs(PyObject *row, Py_ssize_t count, Py_ssize_t page, int64_t *out);
PyObject *part_of_runs(PyObject *row, Py_ssize_t count, int is_rest);

typedef struct slot_row SlotRow; /* slots on their way into a tensor */

/* tensors: _tensors.c */
int slots_in_tensor(PyObject *tensor, const int64_t **slots, Py_ssize_t *count);
SlotRow *new_row(Py_ssize_t num_tokens, int64_t **out);
PyObject *as_tensor(SlotRow *row);
void drop_row(SlotRow *row);

void spread(void *table, size_t size); /* _arenas.c */

/* what each part needs, once, when the module is loaded: 0 with an exception set if it is not to be had */
int knows_children(void);
int knows_holdings(void);
int knows_keys(void);
int knows_makers(void);
int knows_rankings(void);
int knows_tensors(void);

PyObject *pack(PyObject *module, PyObject *ids);
PyObject *top_of(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *walk(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *reach(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *grow(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *cut(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *uproot(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *last_use(PyObject *module, PyObject *node);
PyObject *leads_to(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *is_row(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *gather(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *expand(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *join(PyObject *module, PyObject *rows);
PyObject *use_huge_pages(PyObject *module, PyObject *nothing);
PyObject *maker(PyObject *module, PyObject *class);
PyObject *compact(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *take_back(PyObject *module, PyObject *const *args, Py_ssize_t nargs);

#endif
