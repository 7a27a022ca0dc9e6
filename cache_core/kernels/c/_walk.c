/* Where a key goes in a tree. */

#include "_common.h"

enum { MOST_LINES = 32, LONG = 4096 }; /* of a rest: more of them come by themselves; bytes that take a while to compare */

/* Leading bytes that are the same. What is long is read once: where it differs, the steps become smaller. While one step is
 * compared, the next of what has lain there is fetched: by itself that would begin anew with each page of memory. */
static Py_ssize_t
common_bytes(const char *kept, const char *given, Py_ssize_t limit)
{
    Py_ssize_t done = 0, step = LONG;
    while (done < limit && step > 0) {
        Py_ssize_t left = limit - done, size = step < left ? step : left;
        if (step == LONG && left > LONG)
            fetch(kept + done + LONG, (size_t)(left < 2 * LONG ? left - LONG : LONG) / 64);
        if (memcmp(kept + done, given + done, (size_t)size) == 0)
            done += size;
        else
            step = size > 1 ? (size + 7) / 8 : 0;
    }
    return done;
}

/* The child of `node` that begins as the page of a key at `pos` does, borrowed; NULL if there is none, or on an error. */
static PyObject *
child_of(const Node *node, const Packed *key, Py_ssize_t pos, Py_ssize_t page_bytes)
{
    const Children *children = children_of(node);
    Py_ssize_t left = key->size - pos;
    return children == NULL ? NULL : find_child(children, key->ids + pos, left < page_bytes ? left : page_bytes);
}

/* Have fetched the code of a cut while a long run is compared: it is run too seldom to be at hand. */
static void
expect_cuts(void)
{
    fetch((const void *)(uintptr_t)cut_node, 34); /* lines, as compiled */
    fetch((const void *)(uintptr_t)part_of_runs, 8);
    fetch((const void *)(uintptr_t)part_of_row, 4);
}

/* Have fetched what a cut there will want of a run: the rest, which is copied if it is short, and where the memory ends. */
static void
expect_cut(PyObject *run, Py_ssize_t at)
{
    const char *rest = PyBytes_AS_STRING(run) + at, *end = PyBytes_AS_STRING(run) + PyBytes_GET_SIZE(run);
    fetch(rest, end - rest < MOST_LINES * 64 ? (size_t)(end - rest) / 64 + 1 : MOST_LINES);
    fetch(end, 2);
}

/* Compare one run, from `*pos` on: 1 if it lies wholly before `stop` and matches, 0 if not, -1 on an error. */
static int
follow(const Node *node, const char *data, Py_ssize_t page_bytes, Py_ssize_t stop, Py_ssize_t *pos)
{
    PyObject *run = node->data;
    if (!is_bytes(run, "a node's data"))
        return -1;
    Py_ssize_t size = PyBytes_GET_SIZE(run), limit = stop - *pos;
    if (size >= LONG)
        expect_cuts();
    Py_ssize_t common = common_bytes(PyBytes_AS_STRING(run), data + *pos, size < limit ? size : limit);
    if (common < size)
        expect_cut(run, common / page_bytes * page_bytes);
    *pos += common == size ? size : common / page_bytes * page_bytes;
    return common == size;
}

/* Append the nodes that a key goes through below `node`, from byte `pos` on; returns up to where, -1 on an error. */
static Py_ssize_t
walk_below(Node *node, const Packed *key, Py_ssize_t page_bytes, Py_ssize_t pos, Py_ssize_t stop, PyObject *path)
{
    while (pos < stop) {
        PyObject *child = child_of(node, key, pos, page_bytes);
        if (child == NULL)
            return PyErr_Occurred() ? -1 : pos;
        int appended = PyList_Append(path, child); /* which keeps it alive */
        node = appended < 0 ? NULL : as_node(child);
        int whole = node == NULL ? -1 : follow(node, key->ids, page_bytes, stop, &pos);
        if (whole <= 0)
            return whole < 0 ? -1 : pos;
    }
    return pos;
}

/* How much of the last node lies beyond `end`, in tokens. */
static Py_ssize_t
rest_of(PyObject *path, Py_ssize_t end)
{
    Py_ssize_t count = PyList_GET_SIZE(path);
    return count == 0 ? 0 : (Py_ssize_t)((size_t)((Node *)PyList_GET_ITEM(path, count - 1))->end - (size_t)end);
}

/* The node that a dict has under a key's namespace and arity, borrowed; NULL if there is none, or on an error. */
static Node *
find_top(PyObject *tops, PyObject *object)
{
    const Key *key = (Key *)object;
    if (!PyDict_Check(tops) || !is_of(object, &KeyType) || key->extra_key == NULL || key->arity == NULL) {
        PyErr_SetString(PyExc_TypeError, "tops stand in a dict, by the namespace and the arity of a key");
        return NULL;
    }
    PyObject *place = PyTuple_Pack(2, key->extra_key, key->arity);
    PyObject *top = place == NULL ? NULL : PyDict_GetItemWithError(tops, place);
    Py_XDECREF(place);
    return top == NULL ? NULL : as_node(top);
}

PyObject *
top_of(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Packed key;
    Py_ssize_t page = expect_args("top_of", nargs, 3) ? size_of(args[2], "page_size") : -1;
    Node *top = page < 0 ? NULL : find_top(args[0], args[1]);
    const Children *children = top == NULL ? NULL : children_of(top);
    if (PyErr_Occurred() || !packed_ids(args[1], &key))
        return NULL;
    if (children != NULL && key.unit > 0 && page <= key.size / key.unit)
        expect_child(children, key.ids, page * key.unit);
    return Py_NewRef(top == NULL ? Py_None : (PyObject *)top);
}

/* What `walk` does with its arguments: the nodes come in a list, which is the caller's then; returns up to which token, -1
 * with an exception set on an error. */
static Py_ssize_t
walk_key(PyObject *const *args, PyObject **path)
{
    Node *node = as_node(args[0]);
    Py_ssize_t end = node == NULL ? -1 : end_of(node);
    Py_ssize_t page = end < 0 ? -1 : size_of(args[2], "page_size");
    Py_ssize_t num_tokens = page < 0 ? -1 : size_of(args[3], "num_tokens");
    *path = num_tokens < 0 ? NULL : PyList_New(0); /* first: a collection may run, and anybody's code with it */
    Packed key;
    if (*path == NULL || !packed_ids(args[1], &key))
        return -1;
    if (key.unit < 1 || page < 1 || page > PY_SSIZE_T_MAX / key.unit || num_tokens > key.size / key.unit) {
        PyErr_SetString(PyExc_ValueError, "a unit and a page are at least 1, and num_tokens lie within the key");
        return -1;
    }
    Py_ssize_t stop = (num_tokens - num_tokens % page) * key.unit, pos = end < num_tokens ? end * key.unit : stop;
    pos = walk_below(node, &key, page * key.unit, pos, stop, *path);
    return pos < 0 ? -1 : (pos < stop ? pos : stop) / key.unit;
}

/* The nodes, up to which token, and the rest, as a tuple; `path` is given away. NULL with the exception that is set if
 * `end` is negative. */
static PyObject *
found(PyObject *path, Py_ssize_t end, Py_ssize_t rest)
{
    PyObject *reached = end < 0 ? NULL : PyLong_FromSsize_t(end);
    PyObject *beyond = reached == NULL ? NULL : PyLong_FromSsize_t(rest);
    PyObject *all = beyond == NULL ? NULL : PyTuple_New(3);
    if (all == NULL) {
        Py_XDECREF(path);
        Py_XDECREF(reached);
        Py_XDECREF(beyond);
        return NULL;
    }
    PyTuple_SET_ITEM(all, 0, path);
    PyTuple_SET_ITEM(all, 1, reached);
    PyTuple_SET_ITEM(all, 2, beyond);
    return all;
}

PyObject *
walk(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *path = NULL;
    Py_ssize_t end = expect_args("walk", nargs, 4) ? walk_key(args, &path) : -1;
    return found(path, end, end < 0 ? -1 : rest_of(path, end));
}

/* Cut the last node of a path where that ends, if it goes on; 0 with an exception set on an error. */
static int
end_there(PyObject *path, Py_ssize_t end, PyObject *const *args)
{
    if (end < 0 || rest_of(path, end) == 0)
        return end >= 0;
    Py_ssize_t last = PyList_GET_SIZE(path) - 1;
    Node *node = (Node *)PyList_GET_ITEM(path, last);
    Py_INCREF(node); /* whoever gives out ids may take it out of the tree, and of the path */
    Node *above = cut_node((PyTypeObject *)args[0], args[1], PyLong_AsSsize_t(args[4]), node, end);
    Py_DECREF(node);
    return above != NULL && PyList_SetItem(path, last, (PyObject *)above) == 0;
}

PyObject *
reach(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *path = NULL;
    Py_ssize_t end = expect_args("reach", nargs, 6) && is_node_type(args[0]) ? walk_key(args + 2, &path) : -1;
    return found(path, end_there(path, end, args) ? end : -1, 0);
}
