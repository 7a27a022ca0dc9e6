/* The children of a node, by the first page of their runs, in the order in which they came.
 *
 * Entries stand in a row, each with the hash of its page; what the page is, its child's data say, which a walk reads
 * next anyway. A few are looked through; of more, an index tells where to look, as that of a dict does. Against a dict,
 * a lookup in a large tree waits for two cold lines of memory less, and a child takes a hundred bytes less. */

#include "_kernels.h"

#define FEW 8      /* entries without an index */
#define NOWHERE -1 /* in the index: nothing has stood there yet */

typedef struct {
    uint64_t hash;
    PyObject *child; /* NULL: it has gone */
} Entry;

struct children {
    PyObject_HEAD
    Py_ssize_t used, filled, capacity; /* entries that are there, that ever were, and that have room; -1: read-only */
    Entry *entries;
    int32_t *index; /* of twice as many places as entries have room, at least; NULL while there are few */
    uint64_t mask;
};

static uint64_t secret;   /* so that nobody can choose pages that collide */
static Children *nothing; /* the children of all leaves */

int
knows_children(void)
{
    PyObject *seed = PyUnicode_FromString("where children are");
    Py_hash_t hash = seed == NULL ? -1 : PyObject_Hash(seed); /* another one in each process */
    Py_XDECREF(seed);
    secret = (uint64_t)hash;
    if (hash == -1 || PyType_Ready(&ChildrenType) < 0 || (nothing = new_children()) == NULL)
        return 0;
    nothing->capacity = -1;
    return 1;
}

/* Those of a leaf, borrowed: empty, and read-only, since all leaves share them. */
Children *
no_children(void)
{
    return nothing;
}

/* ---------------------------------------------------------------- pages */

static uint64_t
folded(uint64_t one, uint64_t other)
{
    unsigned __int128 product = (unsigned __int128)one * other;
    return (uint64_t)(product >> 64) ^ (uint64_t)product;
}

/* The multiply-and-fold hash of wyhash (Wang Yi), keyed. */
static uint64_t
hash_of(const char *page, Py_ssize_t size)
{
    uint64_t hash = secret ^ (uint64_t)size, word;
    for (; size >= 8; page += 8, size -= 8) {
        memcpy(&word, page, 8);
        hash = folded(hash ^ word, 0x9E3779B97F4A7C15u);
    }
    word = 0;
    memcpy(&word, page, (size_t)size);
    return folded(hash ^ word, secret | 1);
}

/* Have lines of memory fetched at once that would be waited for one by one: in a large tree none is at hand. */
static void
fetch(const void *start, int lines)
{
#if defined(__GNUC__)
    for (int line = 0; line < lines; line++)
        __builtin_prefetch((const char *)start + 64 * line);
#endif
}

static int
begins_with(PyObject *child, const char *page, Py_ssize_t size)
{
    const Node *node = (Node *)child;
    fetch(node, sizeof(Node) / 64 + 1);
    PyObject *data = node->data;
    fetch(data, 3);
    fetch(node->children, 1);
    fetch(node->slots, 2);
    return data != NULL && PyBytes_CheckExact(data) && PyBytes_GET_SIZE(data) >= size &&
           memcmp(PyBytes_AS_STRING(data), page, (size_t)size) == 0;
}

/* ---------------------------------------------------------------- entries */

static Entry *
entry_for(const Children *children, uint64_t hash, const char *page, Py_ssize_t size)
{
    if (children->index == NULL) {
        for (Entry *entry = children->entries; entry < children->entries + children->filled; entry++)
            if (entry->hash == hash && entry->child != NULL && begins_with(entry->child, page, size))
                return entry;
        return NULL;
    }
    for (uint64_t place = hash & children->mask;; place = (place + 1) & children->mask) {
        int32_t at = children->index[place];
        if (at == NOWHERE)
            return NULL;
        Entry *entry = &children->entries[at];
        if (entry->hash == hash && entry->child != NULL && begins_with(entry->child, page, size))
            return entry;
    }
}

static void
note_place(Children *children, Py_ssize_t at)
{
    uint64_t place = children->entries[at].hash & children->mask;
    while (children->index[place] != NOWHERE)
        place = (place + 1) & children->mask;
    children->index[place] = (int32_t)at;
}

/* Make room for one more: drop what has gone, and double what is left; 0, or -1 with an exception set. */
static int
make_room(Children *children)
{
    Py_ssize_t capacity = children->used < 2 ? 2 : 2 * children->used, places = 1, at = 0;
    while (places < 2 * capacity)
        places *= 2;
    Entry *entries = capacity > INT32_MAX / 2 ? NULL : PyMem_New(Entry, (size_t)capacity);
    int32_t *index = entries == NULL || capacity <= FEW ? NULL : PyMem_New(int32_t, (size_t)places);
    if (entries == NULL || (capacity > FEW && index == NULL)) {
        PyMem_Free(entries);
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < children->filled; i++)
        if (children->entries[i].child != NULL)
            entries[at++] = children->entries[i];
    PyMem_Free(children->entries);
    PyMem_Free(children->index);
    children->entries = entries;
    children->index = index;
    children->filled = at;
    children->capacity = capacity;
    children->mask = (uint64_t)places - 1;
    for (Py_ssize_t i = 0; index != NULL && i < places; i++)
        index[i] = NOWHERE;
    for (Py_ssize_t i = 0; index != NULL && i < at; i++)
        note_place(children, i);
    return 0;
}

/* The child whose data begin so, borrowed; NULL if there is none. */
PyObject *
find_child(const Children *children, const char *page, Py_ssize_t size)
{
    if (children->used == 0)
        return NULL;
    fetch(children->entries, 2); /* while the hash is computed */
    const Entry *entry = entry_for(children, hash_of(page, size), page, size);
    return entry == NULL ? NULL : entry->child;
}

/* Put a child in the place of that page; 0, or -1 with an exception set. */
int
put_child(Children *children, const char *page, Py_ssize_t size, PyObject *child)
{
    uint64_t hash = hash_of(page, size);
    Entry *entry = entry_for(children, hash, page, size);
    if (entry != NULL) {
        set_member(&entry->child, child);
        return 0;
    }
    if (children->filled == children->capacity && make_room(children) < 0)
        return -1;
    children->entries[children->filled] = (Entry){hash, Py_NewRef(child)};
    if (children->index != NULL)
        note_place(children, children->filled);
    children->filled++;
    children->used++;
    return 0;
}

Children *
new_children(void)
{
    return (Children *)ChildrenType.tp_alloc(&ChildrenType, 0);
}

/* ---------------------------------------------------------------- a mapping */

static Py_ssize_t
children_length(PyObject *self)
{
    return ((Children *)self)->used;
}

static PyObject *
children_subscript(PyObject *self, PyObject *page)
{
    if (!is_bytes(page, "a page"))
        return NULL;
    PyObject *child = find_child((Children *)self, PyBytes_AS_STRING(page), PyBytes_GET_SIZE(page));
    if (child == NULL)
        PyErr_SetObject(PyExc_KeyError, page);
    return Py_XNewRef(child);
}

static int
children_set(PyObject *self, PyObject *page, PyObject *child)
{
    Children *children = (Children *)self;
    if (!is_bytes(page, "a page") || (child != NULL && as_node(child) == NULL))
        return -1;
    if (children->capacity < 0) {
        PyErr_SetString(PyExc_TypeError, "the children of a leaf cannot be changed: hang a node below it");
        return -1;
    }
    const char *start = PyBytes_AS_STRING(page);
    Py_ssize_t size = PyBytes_GET_SIZE(page);
    if (child != NULL)
        return put_child(children, start, size, child);
    Entry *entry = children->used == 0 ? NULL : entry_for(children, hash_of(start, size), start, size);
    if (entry == NULL) {
        PyErr_SetObject(PyExc_KeyError, page);
        return -1;
    }
    children->used--;
    Py_CLEAR(entry->child);
    return 0;
}

static PyObject *
children_get(PyObject *self, PyObject *page)
{
    if (!is_bytes(page, "a page"))
        return NULL;
    PyObject *child = find_child((Children *)self, PyBytes_AS_STRING(page), PyBytes_GET_SIZE(page));
    return Py_NewRef(child == NULL ? Py_None : child);
}

/* Up to `limit` children, from the first on, or from the last. */
static PyObject *
some_children(const Children *children, Py_ssize_t limit, int from_last)
{
    PyObject *found = PyList_New(0);
    for (Py_ssize_t i = 0; found != NULL && i < children->filled && PyList_GET_SIZE(found) < limit; i++) {
        PyObject *child = children->entries[from_last ? children->filled - 1 - i : i].child;
        if (child != NULL && PyList_Append(found, child) < 0)
            Py_CLEAR(found);
    }
    return found;
}

static PyObject *
children_values(PyObject *self, PyObject *nothing)
{
    return some_children((Children *)self, PY_SSIZE_T_MAX, 0);
}

static PyObject *
children_first(PyObject *self, PyObject *limit)
{
    Py_ssize_t count = size_of(limit, "limit");
    return count < 0 ? NULL : some_children((Children *)self, count, 0);
}

static PyObject *
children_last(PyObject *self, PyObject *limit)
{
    Py_ssize_t count = size_of(limit, "limit");
    return count < 0 ? NULL : some_children((Children *)self, count, 1);
}

/* ---------------------------------------------------------------- the type */

static int
children_traverse(PyObject *self, visitproc visit, void *arg)
{
    const Children *children = (Children *)self;
    for (Py_ssize_t i = 0; i < children->filled; i++)
        Py_VISIT(children->entries[i].child);
    return 0;
}

static int
children_clear(PyObject *self)
{
    Children *children = (Children *)self;
    Entry *entries = children->entries;
    Py_ssize_t filled = children->filled;
    children->entries = NULL;
    children->used = children->filled = children->capacity = 0;
    PyMem_Free(children->index);
    children->index = NULL;
    for (Py_ssize_t i = 0; i < filled; i++)
        Py_XDECREF(entries[i].child);
    PyMem_Free(entries);
    return 0;
}

static void
children_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    Py_TRASHCAN_BEGIN(self, children_dealloc)
    children_clear(self);
    Py_TYPE(self)->tp_free(self);
    Py_TRASHCAN_END
}

static PyMethodDef methods[] = {
    {"get", children_get, METH_O, NULL},
    {"values", children_values, METH_NOARGS, NULL},
    {"first", children_first, METH_O, NULL},
    {"last", children_last, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMappingMethods mapping = {children_length, children_subscript, children_set};

PyTypeObject ChildrenType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "raydix.cache_core._kernels.Children",
    .tp_doc = PyDoc_STR("Children()\n--\n\nNodes by the first page of their runs: see plain_kernels."),
    .tp_basicsize = sizeof(Children),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = children_dealloc,
    .tp_traverse = children_traverse,
    .tp_clear = children_clear,
    .tp_methods = methods,
    .tp_as_mapping = &mapping,
};
