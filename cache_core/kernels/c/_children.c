/* The children of a node, by the first page of their runs, in the order in which they came.
 *
 * Entries stand in a row, each with the hash of its page; what the page is, its child's data say, which a walk reads
 * next anyway. A few stand in the object itself and are looked through; of more, an index leads to the child at once.
 * Against a dict, a lookup in a large tree waits for three cold lines of memory less, and a child takes less room. */

#include "_children.h"

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

/* In a large tree nothing of a node is at hand: what a walk will want of it is fetched at once. */
static int
begins_with(PyObject *child, const char *page, Py_ssize_t size)
{
    const Node *node = (Node *)child;
    fetch(node, LINES(Node));
    PyObject *data = node->data;
    fetch(data, 3);
    fetch(node->children, LINES(Children));
    fetch(node->slots, 2);
    fetch(node->rank, 1);
    fetch((void *)((uintptr_t)node->before + offsetof(Node, after)), 1); /* written to if the node moves */
    fetch((void *)((uintptr_t)node->after + offsetof(Node, before)), 1);
    return data != NULL && PyBytes_CheckExact(data) && PyBytes_GET_SIZE(data) >= size &&
           memcmp(PyBytes_AS_STRING(data), page, (size_t)size) == 0;
}

/* `begins_with`, where the data lay when somebody last came by: they need not wait until the node is there. */
static int
begins_there(PyObject *child, const void **data, const char *page, Py_ssize_t size)
{
    fetch(*data, 3);
    int said = begins_with(child, page, size);
    if (*data != ((Node *)child)->data) /* a line that need not change is not written to */
        *data = ((Node *)child)->data;
    return said;
}

/* The same of a child of many, whose children are fetched so as well. */
static int
is_at(Place *place, const char *page, Py_ssize_t size)
{
    const Node *node = (Node *)place->child;
    fetch(place->children, LINES(Children));
    int said = begins_there(place->child, &place->data, page, size);
    if (place->children != node->children)
        place->children = node->children;
    return said;
}

/* ---------------------------------------------------------------- entries */

/* Where a child of many stands in the index, or the first place for it that is free. */
static Place *
place_for(const Children *children, uint64_t hash, const char *page, Py_ssize_t size)
{
    for (uint64_t at = hash & children->mask;; at = (at + 1) & children->mask) {
        Place *place = &children->index[at];
        if (place->at == NOWHERE)
            return place;
        if (place->tag == (uint32_t)(hash >> 32) && place->child != NULL && is_at(place, page, size))
            return place;
    }
}

/* Where a child stands in the row of entries, -1 if nowhere; and its place in the index, NULL if there is none. */
static Py_ssize_t
index_of(const Children *children, uint64_t hash, const char *page, Py_ssize_t size, Place **place)
{
    *place = children->index == NULL ? NULL : place_for(children, hash, page, size);
    if (*place != NULL)
        return (*place)->at;
    for (Py_ssize_t at = 0; at < children->filled; at++) {
        Entry *entry = &children->entries[at];
        if (entry->hash == hash && entry->child != NULL && begins_there(entry->child, &entry->data, page, size))
            return at;
    }
    return NOWHERE;
}

/* The index over entries that are all there; NULL with an exception set if there is no memory. */
static Place *
new_index(const Entry *entries, Py_ssize_t filled, uint64_t mask)
{
    Place *index = PyMem_New(Place, mask + 1);
    if (index == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    spread(index, (mask + 1) * sizeof(Place));
    for (uint64_t at = 0; at <= mask; at++)
        index[at] = (Place){.at = NOWHERE};
    for (Py_ssize_t i = 0; i < filled; i++) {
        uint64_t at = entries[i].hash & mask;
        while (index[at].at != NOWHERE)
            at = (at + 1) & mask;
        index[at] = (Place){.child = entries[i].child, .tag = (uint32_t)(entries[i].hash >> 32), .at = (int32_t)i};
    }
    return index;
}

/* Give back the memory of many entries, as far as it is not the object's own. */
void
free_entries(const Children *children)
{
    if (children->entries != children->few)
        PyMem_Free(children->entries);
    PyMem_Free(children->index);
}

/* Be without any, whatever becomes of those that were there. */
void
forget_entries(Children *children)
{
    children->entries = children->few;
    children->index = NULL;
    children->used = children->filled = 0;
    children->capacity = FEW;
}

/* Copy the entries whose children have not gone; returns how many. */
static Py_ssize_t
copy_entries(const Children *children, Entry *to)
{
    Py_ssize_t filled = 0;
    for (Py_ssize_t i = 0; i < children->filled; i++)
        if (children->entries[i].child != NULL)
            to[filled++] = children->entries[i];
    return filled;
}

/* Make room for one more: drop what has gone, and double what is left; 0, or -1 with an exception set. */
static int
make_room(Children *children)
{
    if (children->used < FEW && children->index == NULL) {
        children->filled = copy_entries(children, children->entries);
        children->capacity = FEW;
        return 0;
    }
    Py_ssize_t capacity = 2 * (children->used + 1), places = 1;
    while (places < capacity + capacity / 2)
        places *= 2;
    Entry *entries = capacity > INT32_MAX / 4 ? NULL : PyMem_New(Entry, (size_t)capacity);
    if (entries == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    Py_ssize_t filled = copy_entries(children, entries);
    Place *index = new_index(entries, filled, (uint64_t)places - 1);
    if (index == NULL) {
        PyMem_Free(entries);
        return -1;
    }
    free_entries(children);
    children->entries = entries;
    children->index = index;
    children->filled = filled;
    children->capacity = capacity;
    children->mask = (uint64_t)places - 1;
    return 0;
}

Py_ssize_t
num_children(const Children *children)
{
    return children->used;
}

/* The child whose data begin so, borrowed; NULL if there is none. */
PyObject *
find_child(const Children *children, const char *page, Py_ssize_t size)
{
    if (children->used == 0)
        return NULL;
    Place *place;
    Py_ssize_t at = index_of(children, hash_of(page, size), page, size, &place);
    if (at == NOWHERE)
        return NULL;
    return place != NULL ? place->child : children->entries[at].child; /* the entry may be a cold line */
}

/* Have fetched where the child of that page stands, for who is about to look for it. */
void
expect_child(const Children *children, const char *page, Py_ssize_t size)
{
    if (children->index != NULL)
        fetch(&children->index[hash_of(page, size) & children->mask], 1);
}

/* Put a child in the place of that page, which a new one has to itself; 0, or -1 with an exception set. */
int
put_child(Children *children, const char *page, Py_ssize_t size, PyObject *child, int is_new)
{
    uint64_t hash = hash_of(page, size);
    Place *place;
    Py_ssize_t at = index_of(children, hash, page, size, &place);
    if (at != NOWHERE && is_new) {
        PyErr_SetString(PyExc_ValueError, "there is a child that begins so");
        return -1;
    }
    if (at != NOWHERE) {
        if (place != NULL)
            place->child = child;
        set_member(&children->entries[at].child, child);
        return 0;
    }
    if (children->filled == children->capacity && make_room(children) < 0)
        return -1;
    at = children->filled++;
    children->used++;
    children->entries[at] = (Entry){hash, Py_NewRef(child), ((Node *)child)->data};
    if (children->index != NULL) /* which may be a new one */
        *place_for(children, hash, page, size) = (Place){.child = child, .tag = (uint32_t)(hash >> 32), .at = (int32_t)at};
    return 0;
}

/* Where that very child stands in the row of entries, -1 if nowhere; the index passes it over from now on. */
static Py_ssize_t
take_place(const Children *children, uint64_t hash, const PyObject *child)
{
    if (children->index == NULL) {
        for (Py_ssize_t at = 0; at < children->filled; at++)
            if (children->entries[at].child == child && children->entries[at].hash == hash)
                return at;
        return NOWHERE;
    }
    Place *place = &children->index[hash & children->mask];
    while (place->at != NOWHERE && (place->child != child || place->tag != (uint32_t)(hash >> 32)))
        place = &children->index[(uint64_t)(place - children->index + 1) & children->mask];
    place->child = NULL;
    return place->at;
}

/* Take a child out that stands in the place of that page; its reference is the caller's then. 0 if it does not. */
int
drop_child(Children *children, const char *page, Py_ssize_t size, const PyObject *child)
{
    Py_ssize_t at = take_place(children, hash_of(page, size), child);
    if (at == NOWHERE)
        return 0;
    children->entries[at].child = NULL; /* which is written to, and not read: it may be a cold line */
    children->used--;
    return 1;
}

Children *
new_children(void)
{
    Children *children = (Children *)ChildrenType.tp_alloc(&ChildrenType, 0);
    if (children != NULL)
        forget_entries(children);
    return children;
}
