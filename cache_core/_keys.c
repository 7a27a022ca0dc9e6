/* Keys: packed token ids within a namespace, and whether one begins as another does. */

#include "_kernels.h"

#define FIELD(name) {#name, T_OBJECT_EX, offsetof(Key, name), 0, NULL}

static PyObject *name_pack_slowly;

static PyMemberDef members[] = {
    FIELD(data), FIELD(extra_key), FIELD(width), FIELD(arity), FIELD(unit), FIELD(num_tokens),
    {NULL, 0, 0, 0, NULL},
};

/* Bytes, numbers and a name lead nowhere: a key is nothing for the collector of cycles. */
static void
key_dealloc(PyObject *self)
{
    clear_members(self, members);
    Py_TYPE(self)->tp_free(self);
}

/* Fill a key; what is given stays the caller's. */
static int
fill(Key *key, PyObject *data, Py_ssize_t width, Py_ssize_t arity, PyObject *extra_key)
{
    if (width < 1 || arity < 0 || arity > PY_SSIZE_T_MAX / width) {
        PyErr_SetString(PyExc_ValueError, "an id has at least 1 byte, a tuple no less than 0 ids");
        return -1;
    }
    Py_ssize_t unit = arity ? width * arity : width;
    PyObject *numbers[] = {PyLong_FromSsize_t(width), PyLong_FromSsize_t(arity), PyLong_FromSsize_t(unit),
                           PyLong_FromSsize_t(PyBytes_GET_SIZE(data) / unit)};
    int made = numbers[0] != NULL && numbers[1] != NULL && numbers[2] != NULL && numbers[3] != NULL;
    if (made) {
        set_member(&key->data, data);
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
        done = fill((Key *)self, data, width, arity, extra_key);
    Py_DECREF(packed);
    return done;
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
    PyObject *data = pack(NULL, ids);
    if (data == NULL)
        return -1;
    int done = data == Py_None ? fill_slowly(self, ids, extra_key) : fill((Key *)self, data, 4, 0, extra_key);
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
        !is_bytes(data, "packed ids"))
        return NULL;
    PyObject *key = ((PyTypeObject *)type)->tp_alloc((PyTypeObject *)type, 0);
    if (key != NULL && fill((Key *)key, data, width, arity, extra_key) < 0)
        Py_CLEAR(key);
    return key;
}

static PyMethodDef methods[] = {
    {"from_packed", (PyCFunction)(void (*)(void))from_packed, METH_CLASS | METH_VARARGS | METH_KEYWORDS, NULL},
    {NULL, NULL, 0, NULL},
};

PyTypeObject KeyType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "raydix.cache_core._kernels.Key",
    .tp_doc = PyDoc_STR("Key(token_ids, extra_key=None)\n--\n\nWhat a key is made of: see plain_kernels."),
    .tp_basicsize = sizeof(Key),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = PyType_GenericNew,
    .tp_init = key_init,
    .tp_dealloc = key_dealloc,
    .tp_members = members,
    .tp_methods = methods,
};

int
knows_keys(void)
{
    return (name_pack_slowly = PyUnicode_InternFromString("_pack_slowly")) != NULL;
}

/* ---------------------------------------------------------------- what two of them share */

/* The key that it is, whole; NULL with an exception set if it is none. */
static Key *
as_key(PyObject *object)
{
    Key *key = (Key *)object;
    if (!PyObject_TypeCheck(object, &KeyType))
        PyErr_Format(PyExc_TypeError, "a key is needed, not %s", Py_TYPE(object)->tp_name);
    else if (key->data == NULL || key->extra_key == NULL || key->arity == NULL || key->unit == NULL)
        PyErr_SetString(PyExc_AttributeError, "a key has data, a namespace, an arity and a unit");
    else if (is_bytes(key->data, "the data of a key"))
        return key;
    return NULL;
}

/* Whether the first tokens of both are there and the same bytes, as far as their namespaces do not matter. */
static int
share_bytes(const Key *one, const Key *other, Py_ssize_t num_tokens)
{
    Py_ssize_t unit = size_of(one->unit, "unit"), arity = unit < 0 ? -1 : size_of(one->arity, "arity");
    if (arity < 0 || unit != size_of(other->unit, "unit") || arity != size_of(other->arity, "arity"))
        return 0;
    Py_ssize_t size = PyBytes_GET_SIZE(one->data), other_size = PyBytes_GET_SIZE(other->data);
    if (unit < 1 || num_tokens > (size < other_size ? size : other_size) / unit)
        return 0;
    return memcmp(PyBytes_AS_STRING(one->data), PyBytes_AS_STRING(other->data), (size_t)(num_tokens * unit)) == 0;
}

PyObject *
begins_alike(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (!expect_args("begins_alike", nargs, 3))
        return NULL;
    Key *one = as_key(args[0]), *other = one == NULL ? NULL : as_key(args[1]);
    Py_ssize_t num_tokens = other == NULL ? -1 : size_of(args[2], "num_tokens");
    int alike = num_tokens < 0 ? 0 : share_bytes(one, other, num_tokens);
    if (PyErr_Occurred())
        return NULL;
    return alike ? PyObject_RichCompare(one->extra_key, other->extra_key, Py_EQ) : PyBool_FromLong(0);
}
