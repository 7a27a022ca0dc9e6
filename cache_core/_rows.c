/* Rows of slots: read from tensors, and written out for whoever matched them. */

#include "_kernels.h"

static PyObject *name_numel, *name_data_ptr;

/* Once, when the module is loaded: what tensors are asked for. */
int
knows_tensors(void)
{
    name_numel = PyUnicode_InternFromString("numel");
    name_data_ptr = PyUnicode_InternFromString("data_ptr");
    return name_numel != NULL && name_data_ptr != NULL;
}

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

PyObject *
expand(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (!expect_args("expand", nargs, 3))
        return NULL;
    Py_ssize_t total = bytes_in(args[0]), num_tokens = size_of(args[1], "num_tokens");
    Py_ssize_t page = size_of(args[2], "page_size");
    if (PyErr_Occurred())
        return NULL;
    if (total % 8 != 0 || (total / 8 != num_tokens && total / 8 * page != num_tokens))
        Py_RETURN_NONE;
    page = total / 8 == num_tokens ? 1 : page;
    PyObject *slots = PyByteArray_FromStringAndSize(NULL, num_tokens * 8);
    char *out = slots == NULL ? NULL : PyByteArray_AS_STRING(slots);
    for (Py_ssize_t i = 0; slots != NULL && i < PyList_GET_SIZE(args[0]); i++) {
        PyObject *row = PyList_GET_ITEM(args[0], i);
        Py_ssize_t size = PyBytes_GET_SIZE(row);
        if (page == 1)
            memcpy(out, PyBytes_AS_STRING(row), (size_t)size);
        else
            expand_row(PyBytes_AS_STRING(row), size / 8, page, (int64_t *)out);
        out += size * page;
    }
    return slots;
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

/* What a method without arguments says, as an integer; -1 with an exception set if it fails. */
static Py_ssize_t
asked(PyObject *object, PyObject *method)
{
    PyObject *said = PyObject_CallMethodNoArgs(object, method);
    Py_ssize_t value = said == NULL ? -1 : PyLong_AsSsize_t(said);
    Py_XDECREF(said);
    return value;
}

PyObject *
compact(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (!expect_args("compact", nargs, 4))
        return NULL;
    Py_ssize_t start = size_of(args[1], "start"), stop = size_of(args[2], "stop"), page = size_of(args[3], "page_size");
    Py_ssize_t size = PyErr_Occurred() ? -1 : asked(args[0], name_numel);
    Py_ssize_t address = PyErr_Occurred() ? -1 : asked(args[0], name_data_ptr);
    if (PyErr_Occurred())
        return NULL;
    if (page < 1 || start > stop || stop > size) {
        PyErr_SetString(PyExc_ValueError, "slots must lie within their tensor, and a page be at least 1");
        return NULL;
    }
    return compacted((const int64_t *)address + start, stop - start, page);
}

