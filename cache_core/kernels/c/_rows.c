/* Rows of slots: what they say, in part, and written out for whoever matched them. */

#include "_common.h"

/* A row tells by its size how it is packed: in 8 bytes a slot; in 4, and then one byte more; or, where many a slot follows
 * on the one before, as runs, and then two bytes more. */
static const Py_ssize_t MOST = PY_SSIZE_T_MAX / 16; /* slots, so that their bytes can still be counted */

static int
is_narrow(PyObject *row)
{
    return PyBytes_GET_SIZE(row) % 4 == 1;
}

/* How many slots a row says; -1 if it is malformed. */
Py_ssize_t
num_slots(PyObject *row)
{
    Py_ssize_t size = PyBytes_GET_SIZE(row);
    if (size % 8 == 0)
        return size / 8;
    if (is_runs(row))
        return num_in_runs(row, MOST);
    return is_narrow(row) ? size / 4 : -1;
}

/* The first slots of a row, so many of those it says, or the rest of them: packed as the row is. */
PyObject *
part_of_row(PyObject *row, Py_ssize_t count, int is_rest)
{
    const char *data = PyBytes_AS_STRING(row);
    Py_ssize_t at = count * (is_narrow(row) ? 4 : 8);
    if (is_runs(row))
        return part_of_runs(row, count, is_rest);
    if (is_rest)
        return PyBytes_FromStringAndSize(data + at, PyBytes_GET_SIZE(row) - at);
    PyObject *part = PyBytes_FromStringAndSize(NULL, at + is_narrow(row));
    if (part != NULL) {
        memcpy(PyBytes_AS_STRING(part), data, (size_t)at);
        if (is_narrow(row))
            PyBytes_AS_STRING(part)[at] = 0;
    }
    return part;
}

/* ---------------------------------------------------------------- writing them out */

WIDE static void
expand_wide(const char *row, Py_ssize_t num_pages, Py_ssize_t page, int64_t *restrict out)
{
    for (Py_ssize_t i = 0; i < num_pages; i++) {
        int64_t start;
        memcpy(&start, row + i * 8, 8);
        for (Py_ssize_t lane = 0; lane < page; lane++)
            *out++ = start + lane;
    }
}

WIDE static void
expand_narrow(const char *row, Py_ssize_t num_pages, Py_ssize_t page, int64_t *restrict out)
{
    for (Py_ssize_t i = 0; i < num_pages; i++) {
        int32_t start;
        memcpy(&start, row + i * 4, 4);
        for (Py_ssize_t lane = 0; lane < page; lane++)
            *out++ = (int64_t)start + lane;
    }
}

WIDE static void
widen(const char *row, Py_ssize_t count, int64_t *restrict out)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        int32_t slot;
        memcpy(&slot, row + i * 4, 4);
        out[i] = slot;
    }
}

/* Write a row out as it is, or each page expanded; returns where it ends. */
static int64_t *
write_out(PyObject *row, Py_ssize_t page, int64_t *out)
{
    const char *data = PyBytes_AS_STRING(row);
    Py_ssize_t count = num_slots(row);
    if (is_runs(row))
        write_runs(row, count, page, out);
    else if (page == 1 && is_narrow(row))
        widen(data, count, out);
    else if (page == 1)
        memcpy(out, data, (size_t)count * 8);
    else if (is_narrow(row))
        expand_narrow(data, count, page, out);
    else
        expand_wide(data, count, page, out);
    return out + count * page;
}

/* ---------------------------------------------------------------- lists of them */

static int
is_list(PyObject *items)
{
    if (PyList_CheckExact(items))
        return 1;
    PyErr_SetString(PyExc_TypeError, "rows, or nodes that have them, must come in a list");
    return 0;
}

/* How many slots the rows say together, -1 if one is malformed, -2 with an exception set on an error. */
static Py_ssize_t
slots_in(PyObject *rows)
{
    if (!is_list(rows))
        return -2;
    Py_ssize_t total = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(rows); i++) {
        PyObject *row = PyList_GET_ITEM(rows, i);
        if (!is_bytes(row, "each of the rows"))
            return -2;
        Py_ssize_t count = num_slots(row);
        total = total < 0 || count < 0 || total > MOST - count ? -1 : total + count;
    }
    return total;
}

/* How many slots rows that say so many are to be expanded to for each: 1, or those of a page; 0 if neither fits. */
static Py_ssize_t
lanes(Py_ssize_t total, Py_ssize_t num_tokens, Py_ssize_t page)
{
    if (num_tokens > MOST)
        return 0;
    if (total == num_tokens)
        return 1;
    return total >= 0 && page > 0 && num_tokens % page == 0 && total == num_tokens / page ? page : 0;
}

/* Write out a row over so many tokens as one slot for each; returns where it ends, NULL with an exception set if it says
 * more or less. */
int64_t *
write_row(PyObject *row, Py_ssize_t num_tokens, Py_ssize_t page, int64_t *out)
{
    page = lanes(num_slots(row), num_tokens, page);
    if (page > 0)
        return write_out(row, page, out);
    PyErr_Format(PyExc_ValueError, "a row does not say the slots of %zd tokens", num_tokens);
    return NULL;
}

PyObject *
expand(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (!expect_args("expand", nargs, 3))
        return NULL;
    PyObject *rows = args[0];
    Py_ssize_t num_tokens = size_of(args[1], "num_tokens"), page = num_tokens < 0 ? -1 : size_of(args[2], "page_size");
    Py_ssize_t total = page < 0 ? -2 : slots_in(rows);
    if (total < -1)
        return NULL;
    page = lanes(total, num_tokens, page);
    if (page == 0)
        Py_RETURN_NONE;
    int64_t *out;
    SlotRow *slots = new_row(num_tokens, &out);
    for (Py_ssize_t i = 0; slots != NULL && i < PyList_GET_SIZE(rows); i++)
        out = write_out(PyList_GET_ITEM(rows, i), page, out);
    return slots == NULL ? NULL : as_tensor(slots);
}

/* How many tokens the nodes of a list hold, -1 with an exception set if one is none, or holds no slots. */
static Py_ssize_t
tokens_of(PyObject *nodes)
{
    if (!is_list(nodes))
        return -1;
    Py_ssize_t total = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(nodes); i++) {
        const Node *node = as_node(PyList_GET_ITEM(nodes, i));
        Py_ssize_t length = node == NULL || !is_bytes(node->slots, "a node's slots") ? -1 : length_of(node);
        if (length < 0)
            return -1;
        if (length > MOST - total) {
            PyErr_SetString(PyExc_OverflowError, "nodes hold too many tokens");
            return -1;
        }
        total += length;
    }
    return total;
}

PyObject *
gather(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Py_ssize_t page = expect_args("gather", nargs, 2) ? size_of(args[1], "page_size") : -1;
    Py_ssize_t num_tokens = page < 0 ? -1 : tokens_of(args[0]);
    int64_t *out;
    SlotRow *slots = num_tokens < 0 ? NULL : new_row(num_tokens, &out);
    for (Py_ssize_t i = 0; slots != NULL && i < PyList_GET_SIZE(args[0]); i++) {
        const Node *node = (Node *)PyList_GET_ITEM(args[0], i);
        out = write_row(node->slots, length_of(node), page, out);
        if (out == NULL) {
            drop_row(slots);
            return NULL;
        }
    }
    return slots == NULL ? NULL : as_tensor(slots);
}

PyObject *
join(PyObject *module, PyObject *rows)
{
    Py_ssize_t total = slots_in(rows);
    if (total < 0) {
        if (total == -1)
            PyErr_SetString(PyExc_ValueError, "a row is malformed");
        return NULL;
    }
    PyObject *slots = PyByteArray_FromStringAndSize(NULL, total * 8);
    int64_t *out = slots == NULL ? NULL : (int64_t *)PyByteArray_AS_STRING(slots);
    for (Py_ssize_t i = 0; slots != NULL && i < PyList_GET_SIZE(rows); i++)
        out = write_out(PyList_GET_ITEM(rows, i), 1, out);
    return slots;
}
