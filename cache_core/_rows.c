/* Rows of slots: read from tensors, and written out for whoever matched them. */

#include "_kernels.h"

/* The slots of a row: of 8 bytes each, or of 4 with one byte more at the end, so that its size tells which. -1 if it is
 * no row at all. */
static Py_ssize_t
num_slots(PyObject *row)
{
    Py_ssize_t size = PyBytes_GET_SIZE(row);
    return size % 8 == 0 ? size / 8 : size % 4 == 1 ? size / 4 : -1;
}

static int
is_narrow(PyObject *row)
{
    return PyBytes_GET_SIZE(row) % 2 == 1;
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
    if (page == 1 && is_narrow(row))
        widen(data, count, out);
    else if (page == 1)
        memcpy(out, data, (size_t)count * 8);
    else if (is_narrow(row))
        expand_narrow(data, count, page, out);
    else
        expand_wide(data, count, page, out);
    return out + count * page;
}

/* How many slots the rows say together, -1 if one is malformed, -2 with an exception set on an error. */
static Py_ssize_t
slots_in(PyObject *rows)
{
    if (!PyList_CheckExact(rows)) {
        PyErr_SetString(PyExc_TypeError, "rows must be a list of bytes");
        return -2;
    }
    Py_ssize_t total = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(rows); i++) {
        PyObject *row = PyList_GET_ITEM(rows, i);
        if (!is_bytes(row, "each of the rows"))
            return -2;
        Py_ssize_t count = num_slots(row);
        total = total < 0 || count < 0 ? -1 : total + count;
    }
    return total;
}

/* How many slots rows that say so many are to be expanded to for each: 1, or those of a page; 0 if neither fits. */
static Py_ssize_t
lanes(Py_ssize_t total, Py_ssize_t num_tokens, Py_ssize_t page)
{
    if (total == num_tokens)
        return 1;
    return total >= 0 && page > 0 && num_tokens % page == 0 && total == num_tokens / page ? page : 0;
}

PyObject *
expand(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (!expect_args("expand", nargs, 3))
        return NULL;
    Py_ssize_t num_tokens = size_of(args[1], "num_tokens"), page = num_tokens < 0 ? -1 : size_of(args[2], "page_size");
    Py_ssize_t total = page < 0 ? -2 : slots_in(args[0]);
    if (total < -1)
        return NULL;
    page = lanes(total, num_tokens, page);
    if (page == 0)
        Py_RETURN_NONE;
    PyObject *slots = PyByteArray_FromStringAndSize(NULL, num_tokens * 8);
    int64_t *out = slots == NULL ? NULL : (int64_t *)PyByteArray_AS_STRING(slots);
    for (Py_ssize_t i = 0; slots != NULL && i < PyList_GET_SIZE(args[0]); i++)
        out = write_out(PyList_GET_ITEM(args[0], i), page, out);
    return slots;
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

/* The slots of a node, borrowed; NULL with an exception set if they are no row. */
static PyObject *
row_of(PyObject *object)
{
    Node *node = as_node(object);
    return node != NULL && is_bytes(node->slots, "a node's slots") ? node->slots : NULL;
}

/* How many slots the nodes say together, as `slots_in` tells it. */
static Py_ssize_t
slots_of(PyObject *path)
{
    if (!PyList_CheckExact(path)) {
        PyErr_SetString(PyExc_TypeError, "a path must be a list of nodes");
        return -2;
    }
    Py_ssize_t total = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(path); i++) {
        PyObject *row = row_of(PyList_GET_ITEM(path, i));
        if (row == NULL)
            return -2;
        Py_ssize_t count = num_slots(row);
        total = total < 0 || count < 0 ? -1 : total + count;
    }
    return total;
}

PyObject *
gather(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (!expect_args("gather", nargs, 3))
        return NULL;
    Py_ssize_t num_tokens = size_of(args[1], "num_tokens"), page = num_tokens < 0 ? -1 : size_of(args[2], "page_size");
    Py_ssize_t total = page < 0 ? -2 : slots_of(args[0]);
    if (total < -1)
        return NULL;
    page = lanes(total, num_tokens, page);
    if (page == 0)
        Py_RETURN_NONE;
    int64_t *out;
    SlotRow *slots = new_row(num_tokens, &out);
    for (Py_ssize_t i = 0; slots != NULL && i < PyList_GET_SIZE(args[0]); i++)
        out = write_out(((Node *)PyList_GET_ITEM(args[0], i))->slots, page, out);
    return slots == NULL ? NULL : as_tensor(slots);
}

/* ---------------------------------------------------------------- packing them */

/* Whether every page is a run of consecutive slots; a last, shorter one, too. */
static int
in_runs(const int64_t *slots, Py_ssize_t count, Py_ssize_t page)
{
    for (Py_ssize_t first = 0; first < count; first += page) {
        Py_ssize_t size = count - first < page ? count - first : page;
        uint64_t jumps = 0; /* unsigned: what wraps around is a jump, not an error */
        for (Py_ssize_t lane = 1; lane < size; lane++)
            jumps |= (uint64_t)slots[first + lane] - (uint64_t)slots[first] - (uint64_t)lane;
        if (jumps != 0)
            return 0;
    }
    return 1;
}

/* Every `step`th slot in 4 bytes each; returns the bits that are set in any of them. */
WIDE static uint64_t
narrow(const int64_t *restrict slots, Py_ssize_t count, Py_ssize_t step, uint32_t *restrict out)
{
    uint64_t seen = 0;
    if (step == 1)
        for (Py_ssize_t i = 0; i < count; i++) {
            out[i] = (uint32_t)slots[i];
            seen |= (uint64_t)slots[i];
        }
    else
        for (Py_ssize_t i = 0; i < count; i++) {
            out[i] = (uint32_t)slots[i * step];
            seen |= (uint64_t)slots[i * step];
        }
    return seen;
}

/* A row of every `step`th slot, narrow if all fit, none of them negative. */
static PyObject *
packed(const int64_t *slots, Py_ssize_t count, Py_ssize_t step)
{
    PyObject *row = count == 0 ? NULL : PyBytes_FromStringAndSize(NULL, count * 4 + 1);
    if (row != NULL) {
        char *data = PyBytes_AS_STRING(row);
        data[count * 4] = 0;
        if (narrow(slots, count, step, (uint32_t *)data) >> 31 == 0)
            return row;
        Py_DECREF(row);
    } else if (count > 0)
        return NULL;
    row = PyBytes_FromStringAndSize(NULL, count * 8);
    for (Py_ssize_t i = 0; row != NULL && i < count; i++)
        memcpy(PyBytes_AS_STRING(row) + i * 8, slots + i * step, 8);
    return row;
}

static PyObject *
compacted(const int64_t *slots, Py_ssize_t count, Py_ssize_t page)
{
    if (page == 1 || !in_runs(slots, count, page))
        return packed(slots, count, 1);
    return packed(slots, (count + page - 1) / page, page);
}

PyObject *
compact(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (!expect_args("compact", nargs, 4))
        return NULL;
    Py_ssize_t start = size_of(args[2], "start"), stop = size_of(args[3], "stop"), page = size_of(args[1], "page_size");
    Py_ssize_t size = PyErr_Occurred() ? -1 : tensor_size(args[0]);
    const int64_t *slots = PyErr_Occurred() ? NULL : tensor_data(args[0]);
    if (PyErr_Occurred())
        return NULL;
    if (page < 1 || start > stop || stop > size) {
        PyErr_SetString(PyExc_ValueError, "slots must lie within their tensor, and a page be at least 1");
        return NULL;
    }
    return compacted(slots + start, stop - start, page);
}

