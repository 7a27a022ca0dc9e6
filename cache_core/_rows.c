/* Rows of slots: read from tensors, and written out for whoever matched them. */

#include "_kernels.h"

WIDE static void
expand_row(const char *row, Py_ssize_t num_pages, Py_ssize_t page, int64_t *out)
{
    for (Py_ssize_t i = 0; i < num_pages; i++) {
        int64_t start;
        memcpy(&start, row + i * 8, 8);
        for (Py_ssize_t lane = 0; lane < page; lane++)
            *out++ = start + lane;
    }
}

/* The bytes of all rows together, -1 on an error. */
static Py_ssize_t
bytes_in(PyObject *rows)
{
    if (!PyList_CheckExact(rows)) {
        PyErr_SetString(PyExc_TypeError, "rows must be a list of bytes");
        return -1;
    }
    Py_ssize_t total = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(rows); i++) {
        PyObject *row = PyList_GET_ITEM(rows, i);
        if (!PyBytes_CheckExact(row)) {
            PyErr_SetString(PyExc_TypeError, "rows must be a list of bytes");
            return -1;
        }
        total += PyBytes_GET_SIZE(row);
    }
    return total;
}

/* Whether rows of so many bytes name each slot, or the first of each page. */
static int
fits(Py_ssize_t total, Py_ssize_t num_tokens, Py_ssize_t page)
{
    return total % 8 == 0 && (total / 8 == num_tokens || (page > 0 && num_tokens % page == 0 && total / 8 == num_tokens / page));
}

/* Write rows one after the other, each as it is or each page expanded. */
static void
write_out(const char *row, Py_ssize_t size, Py_ssize_t page, int64_t **out)
{
    if (page == 1)
        memcpy(*out, row, (size_t)size);
    else
        expand_row(row, size / 8, page, *out);
    *out += size / 8 * page;
}

PyObject *
expand(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (!expect_args("expand", nargs, 3))
        return NULL;
    Py_ssize_t total = bytes_in(args[0]), num_tokens = size_of(args[1], "num_tokens");
    Py_ssize_t page = size_of(args[2], "page_size");
    if (PyErr_Occurred())
        return NULL;
    if (!fits(total, num_tokens, page))
        Py_RETURN_NONE;
    page = total / 8 == num_tokens ? 1 : page;
    PyObject *slots = PyByteArray_FromStringAndSize(NULL, num_tokens * 8);
    int64_t *out = slots == NULL ? NULL : (int64_t *)PyByteArray_AS_STRING(slots);
    for (Py_ssize_t i = 0; slots != NULL && i < PyList_GET_SIZE(args[0]); i++) {
        PyObject *row = PyList_GET_ITEM(args[0], i);
        write_out(PyBytes_AS_STRING(row), PyBytes_GET_SIZE(row), page, &out);
    }
    return slots;
}

/* The slots of a node, borrowed; NULL with an exception set if they are no row. */
static PyObject *
row_of(PyObject *object)
{
    Node *node = as_node(object);
    return node != NULL && is_bytes(node->slots, "a node's slots") ? node->slots : NULL;
}

/* The bytes of the rows of all nodes together, -1 on an error. */
static Py_ssize_t
bytes_on(PyObject *path)
{
    Py_ssize_t total = 0;
    if (!PyList_CheckExact(path)) {
        PyErr_SetString(PyExc_TypeError, "a path must be a list of nodes");
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(path); i++) {
        PyObject *row = row_of(PyList_GET_ITEM(path, i));
        if (row == NULL)
            return -1;
        total += PyBytes_GET_SIZE(row);
    }
    return total;
}

PyObject *
gather(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (!expect_args("gather", nargs, 3))
        return NULL;
    Py_ssize_t num_tokens = size_of(args[1], "num_tokens");
    Py_ssize_t page = num_tokens < 0 ? -1 : size_of(args[2], "page_size"), total = page < 0 ? -1 : bytes_on(args[0]);
    if (total < 0)
        return NULL;
    if (!fits(total, num_tokens, page))
        Py_RETURN_NONE;
    page = total / 8 == num_tokens ? 1 : page;
    int64_t *out;
    SlotRow *slots = new_row(num_tokens, &out);
    for (Py_ssize_t i = 0; slots != NULL && i < PyList_GET_SIZE(args[0]); i++) {
        PyObject *row = ((Node *)PyList_GET_ITEM(args[0], i))->slots;
        write_out(PyBytes_AS_STRING(row), PyBytes_GET_SIZE(row), page, &out);
    }
    return slots == NULL ? NULL : as_tensor(slots);
}

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

static PyObject *
compacted(const int64_t *slots, Py_ssize_t count, Py_ssize_t page)
{
    if (page == 1 || !in_runs(slots, count, page))
        return PyBytes_FromStringAndSize((const char *)slots, count * 8);
    PyObject *row = PyBytes_FromStringAndSize(NULL, (count + page - 1) / page * 8);
    int64_t *out = row == NULL ? NULL : (int64_t *)PyBytes_AS_STRING(row);
    for (Py_ssize_t i = 0; row != NULL && i < count; i += page)
        *out++ = slots[i];
    return row;
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

