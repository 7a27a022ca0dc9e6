/* Token ids, packed into the data of a key. */

#include "_common.h"

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
WIDE static uint32_t
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

WIDE static uint64_t
pack_contiguous8(const uint64_t *restrict in, uint32_t *restrict out, Py_ssize_t count)
{
    uint64_t seen = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        out[i] = (uint32_t)in[i];
        seen |= in[i];
    }
    return seen;
}

static int
pack_row8(const char *in, Py_ssize_t stride, uint32_t *out, Py_ssize_t count)
{
    uint64_t seen = 0;
    if (stride == 8 && (uintptr_t)in % 8 == 0)
        seen = pack_contiguous8((const uint64_t *)in, out, count);
    else
        for (Py_ssize_t i = 0; i < count; i++) {
            uint64_t value;
            memcpy(&value, in + i * stride, 8);
            out[i] = (uint32_t)value;
            seen |= value;
        }
    return seen >> 32 == 0;
}

WIDE static uint32_t
bits_of(const uint32_t *ids, Py_ssize_t count)
{
    uint32_t seen = 0;
    for (Py_ssize_t i = 0; i < count; i++)
        seen |= ids[i];
    return seen;
}

/* Whether none of them would be negative as a signed integer. */
int
has_no_sign(const uint32_t *ids, Py_ssize_t count)
{
    return bits_of(ids, count) >> 31 == 0;
}

/* The letter of a native integer format, 0 for any other. */
char
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

PyObject *
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

