/* The pages that an allocator takes back. */

#include "_common.h"

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

/* Mark pages as free; of what went wrong, the first page that is to blame, else `count`. */
static Py_ssize_t
mark_free(const char *starts, Py_ssize_t stride, Py_ssize_t count, Py_ssize_t page, int32_t *marks, Py_ssize_t num_marks)
{
    Py_ssize_t i = 0;
    if (page == 1) /* a division takes longer than all else here */
        while (i < count && mark(start_at(starts, stride, i), marks, num_marks))
            i++;
    else
        while (i < count && mark(start_at(starts, stride, i) / page, marks, num_marks))
            i++;
    return i;
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
        int64_t *top = (int64_t *)stack->buf + num_free + count;
        for (Py_ssize_t i = 0; i < count; i++)
            *--top = start_at(starts, stride, i);
        return NULL;
    }
    int64_t blamed = good < count ? start_at(starts, stride, good) : 0;
    const char *fault = blamed < page || blamed / page >= num_marks ? "outside" : "free";
    for (Py_ssize_t i = 0; i < good; i++) {
        int64_t number = start_at(starts, stride, i) / page;
        known[number] = 0;
        if (good < count && number == blamed / page)
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

