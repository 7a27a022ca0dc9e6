/* What the parts of `_kernels` share. `plain_kernels.py` says in Python what each of them does; a test holds both to
 * it. Whatever they are given, they read and write nothing that is not theirs: what does not fit raises. */

#ifndef RAYDIX_KERNELS_H
#define RAYDIX_KERNELS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

#if defined(__GNUC__)
#pragma GCC visibility push(hidden) /* PyInit__kernels alone is exported */
#endif

/* Rows are long: a loop over them is compiled for wide vectors, too, and chosen when the module is loaded. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define WIDE __attribute__((target_clones("avx2", "default")))
#else
#define WIDE
#endif

/* A run of tokens in a tree. What Python code may set can be anything, or nothing once deleted. */
typedef struct {
    PyObject_HEAD
    PyObject *id, *parent, *space, *data, *slots, *end, *children;
    PyObject *own_access_time, *creation_time, *own_hits, *own_priority, *hash_values;
    PyObject *swa_access_time, *swa_boundary_id, *swa_lock_ref, *swa_tombstone;
    Py_ssize_t lock_ref, own_locks;
} Node;

extern PyTypeObject NodeType;

/* arguments: _kernels.c */
int expect_args(const char *function, Py_ssize_t found, Py_ssize_t expected);
Py_ssize_t size_of(PyObject *object, const char *what);
int is_bytes(PyObject *object, const char *what);
char letter_of(const Py_buffer *view);

/* members: _members.c */
int visit_members(PyObject *self, const PyMemberDef *members, visitproc visit, void *arg);
void clear_members(PyObject *self, const PyMemberDef *members);

/* nodes: _nodes.c */
Node *as_node(PyObject *object);
Py_ssize_t end_of(const Node *node);
PyObject *children_of(const Node *node);

int knows_tensors(void); /* _rows.c */

PyObject *pack(PyObject *module, PyObject *ids);
PyObject *walk(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *grow(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *lock_path(PyObject *module, PyObject *node);
PyObject *unlock_path(PyObject *module, PyObject *node);
PyObject *expand(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *compact(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *take_back(PyObject *module, PyObject *const *args, Py_ssize_t nargs);

#endif
