/* The inner loops of the core. `plain_kernels.py` says in Python what each of them does; a test holds both to it. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* Rows are long: a loop over them is compiled for wide vectors, too, and chosen when the module is loaded. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define WIDE __attribute__((target_clones("avx2", "default")))
#else
#define WIDE
#endif

static PyObject *name_children, *name_data, *name_end, *name_numel, *name_data_ptr;

static int
expect_args(const char *function, Py_ssize_t found, Py_ssize_t expected)
{
    if (found == expected)
        return 1;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", function, expected, found);
    return 0;
}

/* A non-negative integer; -1 with an exception set for anything else. */
static Py_ssize_t
size_of(PyObject *object, const char *what)
{
    Py_ssize_t value = PyLong_AsSsize_t(object);
    if (value < 0 && !PyErr_Occurred())
        PyErr_Format(PyExc_ValueError, "%s must not be negative", what);
    return value < 0 ? -1 : value;
}

/* ---------------------------------------------------------------- pack */

/* 1 if all of them are exact integers in [0, 2**32), 0 if not, -1 on an error. */
static int
pack_list(PyObject *list, uint32_t *out, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PyList_GET_ITEM(list, i);
        if (!PyLong_CheckExact(item))
            return 0;
        int overflow;
        long long value = PyLong_AsLongLongAndOverflow(item, &overflow);
        if (overflow || value < 0 || value > UINT32_MAX)
            return 0;
        out[i] = (uint32_t)value;
    }
    return 1;
}

/* One pass: on long rows a copy and a look at the copy would cost nearly twice as much. */
static uint32_t
pack_contiguous(const uint32_t *restrict in, uint32_t *restrict out, Py_ssize_t count)
{
    uint32_t seen = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        out[i] = in[i];
        seen |= in[i];
    }
    return seen;
}

static int
pack_row4(const char *in, Py_ssize_t stride, int is_signed, uint32_t *out, Py_ssize_t count)
{
    uint32_t seen = 0;
    if (stride == 4 && (uintptr_t)in % 4 == 0)
        seen = pack_contiguous((const uint32_t *)in, out, count);
    else
        for (Py_ssize_t i = 0; i < count; i++) {
            memcpy(&out[i], in + i * stride, 4);
            seen |= out[i];
        }
    return !is_signed || seen >> 31 == 0;
}

static int
pack_row8(const char *in, Py_ssize_t stride, uint32_t *out, Py_ssize_t count)
{
    uint64_t seen = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        uint64_t value;
        memcpy(&value, in + i * stride, 8);
        out[i] = (uint32_t)value;
        seen |= value;
    }
    return seen >> 32 == 0;
}

/* The letter of a native integer format, 0 for any other. */
static char
letter_of(const Py_buffer *view)
{
    const char *format = view->format == NULL ? "B" : view->format;
    if (*format == '@' || *format == '=' || *format == (PY_LITTLE_ENDIAN ? '<' : '>'))
        format++;
    return *format != '\0' && strchr("iIlLqQ", *format) != NULL && format[1] == '\0' ? *format : 0;
}

static PyObject *
packed_or_none(PyObject *packed, int fits)
{
    if (fits > 0)
        return packed;
    Py_DECREF(packed);
    Py_RETURN_NONE;
}

static PyObject *
pack_buffer(PyObject *ids)
{
    Py_buffer view;
    if (PyObject_GetBuffer(ids, &view, PyBUF_RECORDS_RO) < 0) {
        PyErr_Clear(); /* no buffer, or none that is fit: the caller says what is wrong with it */
        Py_RETURN_NONE;
    }
    char letter = letter_of(&view);
    PyObject *packed = NULL;
    if (view.ndim != 1 || letter == 0 || (view.itemsize != 4 && view.itemsize != 8)) {
        PyBuffer_Release(&view);
        Py_RETURN_NONE;
    }
    Py_ssize_t count = view.shape[0], stride = view.strides[0];
    packed = PyBytes_FromStringAndSize(NULL, count * 4);
    if (packed != NULL) {
        uint32_t *out = (uint32_t *)PyBytes_AS_STRING(packed);
        int fits = view.itemsize == 4 ? pack_row4(view.buf, stride, letter >= 'a', out, count)
                                      : pack_row8(view.buf, stride, out, count);
        packed = packed_or_none(packed, fits);
    }
    PyBuffer_Release(&view);
    return packed;
}

static PyObject *
pack(PyObject *module, PyObject *ids)
{
    if (!PY_LITTLE_ENDIAN)
        Py_RETURN_NONE;
    if (!PyList_CheckExact(ids))
        return pack_buffer(ids);
    Py_ssize_t count = PyList_GET_SIZE(ids);
    PyObject *packed = PyBytes_FromStringAndSize(NULL, count * 4);
    return packed == NULL ? NULL : packed_or_none(packed, pack_list(ids, (uint32_t *)PyBytes_AS_STRING(packed), count));
}

/* ---------------------------------------------------------------- walk */

#define CHUNK 512

static Py_ssize_t
common_bytes(const char *one, const char *other, Py_ssize_t limit)
{
    Py_ssize_t done = 0;
    while (limit - done >= CHUNK && memcmp(one + done, other + done, CHUNK) == 0)
        done += CHUNK;
    while (limit - done >= 8 && memcmp(one + done, other + done, 8) == 0)
        done += 8;
    while (done < limit && one[done] == other[done])
        done++;
    return done;
}

/* The child below `children` that begins as `page` does; NULL if there is none, or on an error. */
static PyObject *
child_of(PyObject *children, const char *page, Py_ssize_t page_bytes)
{
    if (!PyDict_CheckExact(children)) {
        PyErr_SetString(PyExc_TypeError, "a node's children must be a dict");
        return NULL;
    }
    PyObject *first = PyBytes_FromStringAndSize(page, page_bytes);
    if (first == NULL)
        return NULL;
    PyObject *child = PyDict_GetItemWithError(children, first);
    Py_XINCREF(child);
    Py_DECREF(first);
    return child;
}

/* Compare one run, from `*pos` on: 1 if it lies wholly before `stop` and matches, 0 if not, -1 on an error. */
static int
follow(PyObject *node, const char *data, Py_ssize_t page_bytes, Py_ssize_t stop, Py_ssize_t *pos)
{
    PyObject *run = PyObject_GetAttr(node, name_data);
    if (run == NULL)
        return -1;
    if (!PyBytes_CheckExact(run)) {
        Py_DECREF(run);
        PyErr_SetString(PyExc_TypeError, "a node's data must be bytes");
        return -1;
    }
    Py_ssize_t size = PyBytes_GET_SIZE(run), limit = stop - *pos;
    const char *theirs = PyBytes_AS_STRING(run), *ours = data + *pos;
    int whole = size <= limit && memcmp(theirs, ours, (size_t)size) == 0;
    *pos += whole ? size : common_bytes(theirs, ours, size < limit ? size : limit) / page_bytes * page_bytes;
    Py_DECREF(run);
    return whole;
}

/* Append the nodes that `data` goes through below `node`, from byte `pos` on; returns up to where, -1 on an error. */
static Py_ssize_t
walk_below(PyObject *node, const char *data, Py_ssize_t page_bytes, Py_ssize_t pos, Py_ssize_t stop, PyObject *path)
{
    PyObject *children = PyObject_GetAttr(node, name_children);
    while (children != NULL && pos < stop) {
        PyObject *child = child_of(children, data + pos, page_bytes);
        Py_CLEAR(children);
        if (child == NULL)
            return PyErr_Occurred() ? -1 : pos;
        int appended = PyList_Append(path, child), whole = appended < 0 ? -1 : follow(child, data, page_bytes, stop, &pos);
        if (whole > 0 && pos < stop)
            children = PyObject_GetAttr(child, name_children);
        Py_DECREF(child);
        if (whole <= 0 || pos >= stop)
            return whole < 0 ? -1 : pos;
    }
    if (children == NULL)
        return -1;
    Py_DECREF(children);
    return pos;
}

static PyObject *
walk(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (!expect_args("walk", nargs, 5))
        return NULL;
    if (!PyBytes_CheckExact(args[1])) {
        PyErr_SetString(PyExc_TypeError, "the data of a key must be bytes");
        return NULL;
    }
    Py_ssize_t unit = size_of(args[2], "unit"), page = size_of(args[3], "page_size");
    Py_ssize_t num_tokens = size_of(args[4], "num_tokens");
    if (PyErr_Occurred())
        return NULL;
    if (unit < 1 || page < 1 || num_tokens > PyBytes_GET_SIZE(args[1]) / unit) {
        PyErr_SetString(PyExc_ValueError, "a unit and a page are at least 1, and num_tokens lie within the data");
        return NULL;
    }
    PyObject *ended = PyObject_GetAttr(args[0], name_end);
    Py_ssize_t end = ended == NULL ? -1 : size_of(ended, "end");
    Py_XDECREF(ended);
    PyObject *path = end < 0 ? NULL : PyList_New(0);
    if (path == NULL)
        return NULL;
    Py_ssize_t stop = (num_tokens - num_tokens % page) * unit, pos = end * unit;
    pos = walk_below(args[0], PyBytes_AS_STRING(args[1]), page * unit, pos, stop, path);
    PyObject *reached = pos < 0 ? NULL : PyLong_FromSsize_t((pos < stop ? pos : stop) / unit);
    PyObject *found = reached == NULL ? NULL : PyTuple_New(2);
    if (found == NULL) {
        Py_DECREF(path);
        Py_XDECREF(reached);
        return NULL;
    }
    PyTuple_SET_ITEM(found, 0, path);
    PyTuple_SET_ITEM(found, 1, reached);
    return found;
}

/* ---------------------------------------------------------------- rows of slots */

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

static PyObject *
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

static PyObject *
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

/* ---------------------------------------------------------------- free pages */

static int64_t
start_at(const Py_buffer *starts, Py_ssize_t i)
{
    int64_t start;
    memcpy(&start, (const char *)starts->buf + i * starts->strides[0], 8);
    return start;
}

/* Mark pages as free; of what went wrong, the first page that is to blame, else `count`. */
static Py_ssize_t
mark_free(const Py_buffer *starts, Py_ssize_t page, int32_t *marks, Py_ssize_t num_marks)
{
    Py_ssize_t count = starts->shape[0];
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t start = start_at(starts, i);
        int64_t number = page == 1 ? start : start / page; /* a division takes longer than all else here */
        if (start < page || number >= num_marks || marks[number] < 0)
            return i;
        marks[number] = -1;
    }
    return count;
}

static int
is_row_of(const Py_buffer *view, Py_ssize_t itemsize)
{
    return view->ndim == 1 && view->itemsize == itemsize && letter_of(view) >= 'a';
}

static const char *
take_back_all(Py_buffer *starts, Py_buffer *marks, Py_buffer *stack, Py_ssize_t num_free, Py_ssize_t page)
{
    int32_t *known = marks->buf;
    Py_ssize_t count = starts->shape[0], good = mark_free(starts, page, known, marks->shape[0]);
    if (good == count && count <= stack->shape[0] - num_free) {
        int64_t *top = (int64_t *)stack->buf + num_free + count;
        for (Py_ssize_t i = 0; i < count; i++)
            *--top = start_at(starts, i);
        return NULL;
    }
    int64_t blamed = good < count ? start_at(starts, good) : 0;
    const char *fault = blamed < page || blamed / page >= marks->shape[0] ? "outside" : "free";
    for (Py_ssize_t i = 0; i < good; i++) {
        int64_t number = start_at(starts, i) / page;
        known[number] = 0;
        if (good < count && number == blamed / page)
            fault = "twice";
    }
    return fault;
}

static PyObject *
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

/* ---------------------------------------------------------------- module */

static PyMethodDef functions[] = {
    {"pack", pack, METH_O, NULL},
    {"walk", (PyCFunction)(void (*)(void))walk, METH_FASTCALL, NULL},
    {"expand", (PyCFunction)(void (*)(void))expand, METH_FASTCALL, NULL},
    {"compact", (PyCFunction)(void (*)(void))compact, METH_FASTCALL, NULL},
    {"take_back", (PyCFunction)(void (*)(void))take_back, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_kernels",
    .m_doc = "The inner loops of the core, compiled: see plain_kernels.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC
PyInit__kernels(void)
{
    static const struct {
        PyObject **name;
        const char *text;
    } names[] = {
        {&name_children, "children"}, {&name_data, "data"},
        {&name_end, "end"}, {&name_numel, "numel"}, {&name_data_ptr, "data_ptr"},
    };
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++)
        if ((*names[i].name = PyUnicode_InternFromString(names[i].text)) == NULL)
            return NULL;
    return PyModule_Create(&definition);
}
