/* The pages that an allocator takes back. */

#include "_common.h"

enum { LONG = 64 }; /* slots: shorter runs are marked as soon one by one */

static int
lie_side_by_side(const char *starts, Py_ssize_t stride)
{
    return stride == sizeof(int64_t) && (uintptr_t)starts % sizeof(int64_t) == 0;
}

static int64_t
start_at(const char *starts, Py_ssize_t stride, Py_ssize_t i)
{
    int64_t start;
    memcpy(&start, starts + i * stride, 8);
    return start;
}

/* Mark a page as free, by its number; 0 if it was not handed out. */
static int
mark(int64_t number, int32_t *marks, Py_ssize_t num_marks)
{
    if (number < 1 || number >= num_marks || marks[number] < 0)
        return 0;
    marks[number] = -1;
    return 1;
}

/* Whether no mark is other than that of a page that was handed out. */
WIDE static int
are_handed_out(const int32_t *marks, Py_ssize_t count)
{
    int32_t seen = 0;
    for (Py_ssize_t i = 0; i < count; i++)
        seen |= marks[i];
    return seen == 0;
}

/* Mark a run of pages of one slot as free at once; 0, and nothing is done, if one of them was not handed out. */
static int
mark_run(int64_t first, Py_ssize_t length, int32_t *marks, Py_ssize_t num_marks)
{
    if (first < 1 || first > num_marks - length || !are_handed_out(marks + first, length))
        return 0;
    memset(marks + first, -1, (size_t)length * sizeof(*marks));
    return 1;
}

/* `mark_free` of pages of one slot that are named side by side. */
static Py_ssize_t
mark_runs(const int64_t *slots, Py_ssize_t count, int32_t *marks, Py_ssize_t num_marks)
{
    Py_ssize_t i = 0;
    while (i < count) {
        int may_be_long = count - i >= LONG && (uint64_t)slots[i + LONG - 1] == (uint64_t)slots[i] + LONG - 1;
        Py_ssize_t end = i + (may_be_long ? run_length(slots + i, count - i) : 1);
        if (may_be_long && mark_run(slots[i], end - i, marks, num_marks))
            i = end;
        for (; i < end; i++)
            if (!mark(slots[i], marks, num_marks))
                return i;
    }
    return count;
}

/* `mark` of a page by its first slot; 0 also for any other. */
static int
mark_page(int64_t start, Py_ssize_t page, int32_t *marks, Py_ssize_t num_marks)
{
    int64_t number = start / page;
    return number * page == start && mark(number, marks, num_marks);
}

/* Mark pages as free; of what went wrong, the first page that is to blame, else `count`. */
static Py_ssize_t
mark_free(const char *starts, Py_ssize_t stride, Py_ssize_t count, Py_ssize_t page, int32_t *marks, Py_ssize_t num_marks)
{
    Py_ssize_t i = 0;
    if (page == 1 && lie_side_by_side(starts, stride))
        return mark_runs((const int64_t *)starts, count, marks, num_marks);
    if (page == 1) /* a division takes longer than all else here */
        while (i < count && mark(start_at(starts, stride, i), marks, num_marks))
            i++;
    else
        while (i < count && mark_page(start_at(starts, stride, i), page, marks, num_marks))
            i++;
    return i;
}

WIDE static void
push_row(const int64_t *starts, Py_ssize_t count, int64_t *out)
{
    for (Py_ssize_t i = 0; i < count; i++)
        out[i] = starts[count - 1 - i];
}

/* Put pages on a stack, the first on top. */
static void
push(const char *starts, Py_ssize_t stride, Py_ssize_t count, int64_t *out)
{
    if (lie_side_by_side(starts, stride))
        push_row((const int64_t *)starts, count, out);
    else
        for (Py_ssize_t i = 0; i < count; i++)
            out[i] = start_at(starts, stride, count - 1 - i);
}

static int
is_row_of(const Py_buffer *view, Py_ssize_t itemsize)
{
    return view->ndim == 1 && view->itemsize == itemsize && letter_of(view) >= 'a';
}

static const char *
take_back_all(Py_buffer *pages, Py_buffer *marks, Py_buffer *stack, Py_ssize_t num_free, Py_ssize_t page)
{
    const char *starts = pages->buf;
    int32_t *known = marks->buf;
    Py_ssize_t count = pages->shape[0], stride = pages->strides[0], num_marks = marks->shape[0];
    Py_ssize_t good = mark_free(starts, stride, count, page, known, num_marks);
    if (good == count && count <= stack->shape[0] - num_free) {
        push(starts, stride, count, (int64_t *)stack->buf + num_free);
        return NULL;
    }
    int64_t blamed = good < count ? start_at(starts, stride, good) : 0;
    const char *fault = blamed < page || blamed / page >= num_marks || blamed % page != 0 ? "outside" : "free";
    for (Py_ssize_t i = 0; i < good; i++) {
        int64_t start = start_at(starts, stride, i);
        known[start / page] = 0;
        if (good < count && start == blamed)
            fault = "twice";
    }
    return fault;
}

PyObject *
take_back(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (!expect_args("take_back", nargs, 5))
        return NULL;
    Py_ssize_t num_free = size_of(args[3], "num_free"), page = size_of(args[4], "page_size");
    if (PyErr_Occurred())
        return NULL;
    Py_buffer starts, marks, stack;
    if (PyObject_GetBuffer(args[0], &starts, PyBUF_RECORDS_RO) < 0)
        return NULL;
    if (PyObject_GetBuffer(args[1], &marks, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&starts);
        return NULL;
    }
    if (PyObject_GetBuffer(args[2], &stack, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&starts);
        PyBuffer_Release(&marks);
        return NULL;
    }
    int fit = is_row_of(&starts, 8) && is_row_of(&stack, 8) && is_row_of(&marks, 4);
    const char *fault = NULL;
    if (!fit || page < 1 || num_free > stack.shape[0])
        PyErr_SetString(PyExc_ValueError, "pages and the stack must be rows of int64, marks of int32");
    else
        fault = take_back_all(&starts, &marks, &stack, num_free, page);
    PyBuffer_Release(&starts);
    PyBuffer_Release(&marks);
    PyBuffer_Release(&stack);
    if (PyErr_Occurred())
        return NULL;
    if (fault == NULL)
        Py_RETURN_NONE;
    return PyUnicode_FromString(fault);
}

