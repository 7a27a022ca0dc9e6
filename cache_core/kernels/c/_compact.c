/* Slots on their way into the tree: packed into a row, as small as it can be. */

#include "_common.h"

enum { FEW = 2 }; /* slots, that take less room one by one than as a run */

/* How many slots do not follow on the one before them. */
WIDE static uint64_t
num_jumps(const int64_t *slots, Py_ssize_t count)
{
    uint64_t jumps = 0;
    for (Py_ssize_t i = 1; i < count; i++)
        jumps += (uint64_t)slots[i] - (uint64_t)slots[i - 1] != 1;
    return jumps;
}

/* Whether every page is a run of consecutive slots; a last, shorter one, too: all jumps lie between pages. */
static int
in_runs(const int64_t *slots, Py_ssize_t count, Py_ssize_t page)
{
    uint64_t between = 0;
    for (Py_ssize_t first = page; first < count; first += page)
        between += (uint64_t)slots[first] - (uint64_t)slots[first - 1] != 1;
    return num_jumps(slots, count) == between;
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
    PyObject *row = count <= FEW ? NULL : page == 1 ? as_runs(slots, count) : starts_of_runs(slots, count, page);
    if (row != NULL || PyErr_Occurred())
        return row;
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
    if (PyErr_Occurred())
        return NULL;
    const int64_t *slots;
    Py_ssize_t size;
    if (!slots_in_tensor(args[0], &slots, &size)) {
        PyErr_SetString(PyExc_TypeError, "slots must be int64, in a row, on the CPU");
        return NULL;
    }
    if (page < 1 || start > stop || stop > size) {
        PyErr_SetString(PyExc_ValueError, "slots must lie within their tensor, and a page be at least 1");
        return NULL;
    }
    return compacted(slots + start, stop - start, page);
}

