/* Keys: packed token ids within a namespace, and whether they lead to a node. */

#include "_common.h"

#define FIELD(name) {#name, T_OBJECT_EX, offsetof(Key, name), 0, NULL}

static PyObject *name_pack_slowly, *array_type;

static PyMemberDef members[] = {
    FIELD(extra_key), FIELD(width), FIELD(arity), FIELD(unit), FIELD(num_tokens),
    {NULL, 0, 0, 0, NULL},
};

/* Have data of its own, or none; what was lent is given back. */
static void
set_data(Key *key, PyObject *data)
{
    PyObject *old = key->data;
    key->data = Py_XNewRef(data);
    Py_XDECREF(old);
    PyBuffer_Release(&key->lent);
}

/* Bytes, numbers and a name lead nowhere: a key is nothing for the collector of cycles. */
static void
key_dealloc(PyObject *self)
{
    clear_members(self, members);
    set_data((Key *)self, NULL);
    Py_TYPE(self)->tp_free(self);
}

/* Have a copy of what was lent; 0, or -1 with an exception set. */
static int
own_ids(Key *key)
{
    PyObject *data = key->lent.obj == NULL ? NULL : PyBytes_FromStringAndSize(key->lent.buf, key->lent.len);
    if (data != NULL)
        set_data(key, data);
    Py_XDECREF(data);
    return key->lent.obj == NULL ? 0 : -1;
}

static PyObject *
key_data(PyObject *self, void *closure)
{
    Key *key = (Key *)self;
    if (own_ids(key) < 0)
        return NULL;
    if (key->data == NULL)
        PyErr_SetString(PyExc_AttributeError, "data");
    return Py_XNewRef(key->data);
}

static int
key_set_data(PyObject *self, PyObject *data, void *closure)
{
    set_data((Key *)self, data);
    return 0;
}

/* Fill a key, but for its ids, which are so many bytes; what is given stays the caller's. */
static int
fill(Key *key, Py_ssize_t size, Py_ssize_t width, Py_ssize_t arity, PyObject *extra_key)
{
    if (width < 1 || arity < 0 || arity > PY_SSIZE_T_MAX / width) {
        PyErr_SetString(PyExc_ValueError, "an id has at least 1 byte, a tuple no less than 0 ids");
        return -1;
    }
    Py_ssize_t unit = arity ? width * arity : width;
    PyObject *numbers[] = {PyLong_FromSsize_t(width), PyLong_FromSsize_t(arity), PyLong_FromSsize_t(unit),
                           PyLong_FromSsize_t(size / unit)};
    int made = numbers[0] != NULL && numbers[1] != NULL && numbers[2] != NULL && numbers[3] != NULL;
    if (made) {
        set_member(&key->extra_key, extra_key);
        set_member(&key->width, numbers[0]);
        set_member(&key->arity, numbers[1]);
        set_member(&key->unit, numbers[2]);
        set_member(&key->num_tokens, numbers[3]);
    }
    for (int i = 0; i < 4; i++)
        Py_XDECREF(numbers[i]);
    return made ? 0 : -1;
}

/* `fill`, with ids packed in data. */
static int
fill_packed(Key *key, PyObject *data, Py_ssize_t width, Py_ssize_t arity, PyObject *extra_key)
{
    int done = fill(key, PyBytes_GET_SIZE(data), width, arity, extra_key);
    if (done == 0)
        set_data(key, data);
    return done;
}

/* Have an array's own memory as ids, if they lie there as they would be packed: 1, or 0 if they do not. */
static int
borrow(Key *key, PyObject *ids)
{
    Py_buffer *lent = &key->lent;
    if (!PY_LITTLE_ENDIAN || (PyObject *)Py_TYPE(ids) != array_type)
        return 0;
    if (PyObject_GetBuffer(ids, lent, PyBUF_ND | PyBUF_FORMAT) < 0) {
        PyErr_Clear(); /* they do not lie side by side */
        return 0;
    }
    char letter = letter_of(lent);
    if (lent->ndim == 1 && letter != 0 && lent->itemsize == 4 && (uintptr_t)lent->buf % 4 == 0 &&
        (letter < 'a' || has_no_sign(lent->buf, lent->shape[0])))
        return 1;
    PyBuffer_Release(lent);
    return 0;
}

/* Fill a key with what its type makes of ids that take a closer look: data, width and arity. */
static int
fill_slowly(PyObject *self, PyObject *ids, PyObject *extra_key)
{
    PyObject *data, *packed = PyObject_CallMethodOneArg(self, name_pack_slowly, ids);
    Py_ssize_t width, arity;
    if (packed == NULL)
        return -1;
    int done = -1;
    if (!PyTuple_Check(packed))
        PyErr_SetString(PyExc_TypeError, "packed ids are data, a width and an arity");
    else if (PyArg_ParseTuple(packed, "Snn:packed ids", &data, &width, &arity) && is_bytes(data, "packed ids"))
        done = fill_packed((Key *)self, data, width, arity, extra_key);
    Py_DECREF(packed);
    return done;
}

/* Whether a namespace can be named so: an exception is set if not. */
static int
is_name(PyObject *extra_key)
{
    if (extra_key == Py_None || PyUnicode_Check(extra_key))
        return 1;
    PyObject *errors = PyImport_ImportModule("raydix.cache_core.errors");
    PyObject *type = errors == NULL ? NULL : PyObject_GetAttrString(errors, "InvalidKeyError");
    if (type != NULL)
        PyErr_Format(type, "extra_key must be a str or None, not %s", Py_TYPE(extra_key)->tp_name);
    Py_XDECREF(type);
    Py_XDECREF(errors);
    return 0;
}

/* The namespace of a key that is made of these ids, a new reference: of another key its own, unless one is given. */
static PyObject *
namespace_of(PyObject *ids, PyObject *given)
{
    PyObject *own = given == Py_None && is_of(ids, &KeyType) ? ((Key *)ids)->extra_key : NULL;
    return Py_NewRef(own == NULL ? given : own);
}

static int
key_init(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"token_ids", "extra_key", NULL};
    PyObject *ids, *extra_key = Py_None;
    if (kwargs == NULL && PyTuple_GET_SIZE(args) == 1)
        ids = PyTuple_GET_ITEM(args, 0);
    else if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|O:RadixKey", names, &ids, &extra_key))
        return -1;
    if (!is_name(extra_key))
        return -1;
    Key *key = (Key *)self;
    if (own_ids(key) < 0) /* of a key that is filled again */
        return -1;
    if (borrow(key, ids)) {
        Py_CLEAR(key->data);
        return fill(key, key->lent.len, 4, 0, extra_key);
    }
    PyObject *data = pack(NULL, ids);
    if (data == NULL)
        return -1;
    extra_key = namespace_of(ids, extra_key);
    int done = data == Py_None ? fill_slowly(self, ids, extra_key) : fill_packed(key, data, 4, 0, extra_key);
    Py_DECREF(extra_key);
    Py_DECREF(data);
    return done;
}

static PyObject *
from_packed(PyObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"data", "width", "extra_key", "arity", NULL};
    PyObject *data, *extra_key = Py_None;
    Py_ssize_t width, arity = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "On|On:from_packed", names, &data, &width, &extra_key, &arity) ||
        !is_bytes(data, "packed ids") || !is_name(extra_key))
        return NULL;
    PyObject *key = ((PyTypeObject *)type)->tp_alloc((PyTypeObject *)type, 0);
    if (key != NULL && fill_packed((Key *)key, data, width, arity, extra_key) < 0)
        Py_CLEAR(key);
    return key;
}

static PyMethodDef methods[] = {
    {"from_packed", (PyCFunction)(void (*)(void))from_packed, METH_CLASS | METH_VARARGS | METH_KEYWORDS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef properties[] = {
    {"data", key_data, key_set_data, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyTypeObject KeyType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "raydix.cache_core.kernels._compiled.Key",
    .tp_doc = PyDoc_STR("Key(token_ids, extra_key=None)\n--\n\nWhat a key is made of: see plain_kernels."),
    .tp_basicsize = sizeof(Key),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = PyType_GenericNew,
    .tp_init = key_init,
    .tp_dealloc = key_dealloc,
    .tp_members = members,
    .tp_methods = methods,
    .tp_getset = properties,
};

int
knows_keys(void)
{
    PyObject *numpy = PyImport_ImportModule("numpy");
    array_type = numpy == NULL ? NULL : PyObject_GetAttrString(numpy, "ndarray");
    Py_XDECREF(numpy);
    return array_type != NULL && (name_pack_slowly = PyUnicode_InternFromString("_pack_slowly")) != NULL;
}

/* ---------------------------------------------------------------- what they say */

/* The ids of a key, as long as it and its data stay; 0 with an exception set if it has none. */
int
packed_ids(PyObject *object, Packed *packed)
{
    Key *key = (Key *)object;
    if (!is_of(object, &KeyType)) {
        PyErr_Format(PyExc_TypeError, "a key is needed, not %s", Py_TYPE(object)->tp_name);
        return 0;
    }
    if (key->unit == NULL || (key->data == NULL && key->lent.obj == NULL)) {
        PyErr_SetString(PyExc_AttributeError, "a key has data and a unit");
        return 0;
    }
    Py_ssize_t unit = size_of(key->unit, "unit");
    if (unit < 0 || (key->data != NULL && !is_bytes(key->data, "the data of a key")))
        return 0;
    *packed = key->data != NULL
                  ? (Packed){PyBytes_AS_STRING(key->data), PyBytes_GET_SIZE(key->data), unit, key->data}
                  : (Packed){key->lent.buf, key->lent.len, unit, NULL};
    return 1;
}

/* Whether the runs down to a node are the first of these ids: 1 or 0, -1 with an exception set on an error. */
static int
begin_as(const Packed *packed, Node *node)
{
    Py_ssize_t end = end_of(node);
    while (end > 0 && node->parent != Py_None) {
        Node *above = as_node(node->parent);
        Py_ssize_t start = above == NULL || !is_bytes(node->data, "a node's data") ? -1 : end_of(above);
        if (start < 0)
            return -1;
        Py_ssize_t size = PyBytes_GET_SIZE(node->data);
        if (start > end || end > packed->size / packed->unit || size != (end - start) * packed->unit ||
            memcmp(packed->ids + start * packed->unit, PyBytes_AS_STRING(node->data), (size_t)size) != 0)
            return 0;
        if (start == end && above->parent != Py_None)
            return 0;
        node = above;
        end = start;
    }
    return end < 0 ? -1 : end == 0;
}

PyObject *
leads_to(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Packed packed;
    if (!expect_args("leads_to", nargs, 2) || !packed_ids(args[0], &packed))
        return NULL;
    Node *node = as_node(args[1]);
    int said = node == NULL ? -1 : packed.unit < 1 ? 0 : begin_as(&packed, node);
    return said < 0 ? NULL : PyBool_FromLong(said);
}
