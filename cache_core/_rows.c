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

typedef PyObject *(*RowOf)(PyObject *item); /* the row of an item, borrowed; NULL with an exception set if it has none */

static PyObject *
itself(PyObject *item)
{
    return is_bytes(item, "each of the rows") ? item : NULL;
}

static PyObject *
of_node(PyObject *item)
{
    Node *node = as_node(item);
    return node != NULL && is_bytes(node->slots, "a node's slots") ? node->slots : NULL;
}

/* How many slots the rows say together, -1 if one is malformed, -2 with an exception set on an error. */
static Py_ssize_t
slots_in(PyObject *items, RowOf row_of)
{
    if (!PyList_CheckExact(items)) {
        PyErr_SetString(PyExc_TypeError, "rows, or nodes that have them, must come in a list");
        return -2;
    }
    Py_ssize_t total = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(items); i++) {
        PyObject *row = row_of(PyList_GET_ITEM(items, i));
        if (row == NULL)
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

/* The rows of items over so many tokens as one slot for each; None if they say more or less. */
static PyObject *
written_out(PyObject *items, Py_ssize_t num_tokens, Py_ssize_t page, RowOf row_of)
{
    Py_ssize_t total = slots_in(items, row_of);
    if (total < -1)
        return NULL;
    page = lanes(total, num_tokens, page);
    if (page == 0)
        Py_RETURN_NONE;
    int64_t *out;
    SlotRow *slots = new_row(num_tokens, &out);
    for (Py_ssize_t i = 0; slots != NULL && i < PyList_GET_SIZE(items); i++)
        out = write_out(row_of(PyList_GET_ITEM(items, i)), page, out);
    return slots == NULL ? NULL : as_tensor(slots);
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

static PyObject *
expanded(const char *function, PyObject *const *args, Py_ssize_t nargs, RowOf row_of)
{
    if (!expect_args(function, nargs, 3))
        return NULL;
    Py_ssize_t num_tokens = size_of(args[1], "num_tokens"), page = num_tokens < 0 ? -1 : size_of(args[2], "page_size");
    return page < 0 ? NULL : written_out(args[0], num_tokens, page, row_of);
}

PyObject *
expand(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    return expanded("expand", args, nargs, itself);
}

PyObject *
gather(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    return expanded("gather", args, nargs, of_node);
}

PyObject *
join(PyObject *module, PyObject *rows)
{
    Py_ssize_t total = slots_in(rows, itself);
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
