/* Tensors: whether one is a row of slots, where its data is, and new ones over memory of our own. */

#include "_kernels.h"

static PyObject *name_dim, *name_numel, *name_dtype, *name_is_cpu, *name_is_contiguous, *name_data_ptr;
static PyObject *tensor_type, *int64, *from_dlpack;

int
knows_tensors(void)
{
    static const struct {
        PyObject **name;
        const char *text;
    } names[] = {
        {&name_dim, "dim"}, {&name_numel, "numel"}, {&name_dtype, "dtype"},
        {&name_is_cpu, "is_cpu"}, {&name_is_contiguous, "is_contiguous"}, {&name_data_ptr, "data_ptr"},
    };
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++)
        if ((*names[i].name = PyUnicode_InternFromString(names[i].text)) == NULL)
            return 0;
    PyObject *torch = PyImport_ImportModule("torch"), *inner = PyImport_ImportModule("torch._C");
    if (torch != NULL && inner != NULL) {
        tensor_type = PyObject_GetAttrString(torch, "Tensor");
        int64 = PyObject_GetAttrString(torch, "int64");
        from_dlpack = PyObject_GetAttrString(inner, "_from_dlpack");
    }
    Py_XDECREF(torch);
    Py_XDECREF(inner);
    if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_AttributeError)) /* so that plain Python takes their place */
        PyErr_SetString(PyExc_ImportError, "the compiled loops do not know this version of torch");
    return tensor_type != NULL && int64 != NULL && from_dlpack != NULL;
}

/* ---------------------------------------------------------------- asking them */

/* What a method without arguments says, as an integer; -1 with an exception set if it fails. */
static Py_ssize_t
asked(PyObject *object, PyObject *method)
{
    PyObject *said = PyObject_CallMethodNoArgs(object, method);
    Py_ssize_t value = said == NULL ? -1 : PyLong_AsSsize_t(said);
    Py_XDECREF(said);
    return value;
}

/* Whether a method without arguments, or an attribute, is true; -1 with an exception set if it fails. */
static int
is_true(PyObject *said)
{
    int value = said == NULL ? -1 : PyObject_IsTrue(said);
    Py_XDECREF(said);
    return value;
}

Py_ssize_t
tensor_size(PyObject *tensor)
{
    return asked(tensor, name_numel);
}

const int64_t *
tensor_data(PyObject *tensor)
{
    return (const int64_t *)asked(tensor, name_data_ptr);
}

static int
is_int64(PyObject *tensor)
{
    PyObject *dtype = PyObject_GetAttr(tensor, name_dtype);
    Py_XDECREF(dtype); /* there is one of each, for good */
    return dtype == NULL ? -1 : dtype == int64;
}

PyObject *
is_row(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (!expect_args("is_row", nargs, 2))
        return NULL;
    Py_ssize_t needed = size_of(args[1], "needed");
    if (needed < 0)
        return NULL;
    if ((PyObject *)Py_TYPE(args[0]) != tensor_type)
        Py_RETURN_FALSE;
    PyObject *row = args[0];
    int fits = asked(row, name_dim) == 1 && asked(row, name_numel) >= needed;
    if (fits && !PyErr_Occurred())
        fits = is_int64(row) > 0 && is_true(PyObject_GetAttr(row, name_is_cpu)) > 0 &&
               is_true(PyObject_CallMethodNoArgs(row, name_is_contiguous)) > 0;
    return PyErr_Occurred() ? NULL : PyBool_FromLong(fits);
}

/* ---------------------------------------------------------------- new ones */

/* As DLPack lays them down: https://dmlc.github.io/dlpack/latest/c_api.html */
typedef struct {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

typedef struct managed {
    DLTensor tensor;
    void *context;
    void (*deleter)(struct managed *self);
} DLManagedTensor;

enum { DL_CPU = 1, DL_INT = 0, ALIGNMENT = 64 };

struct slot_row {
    DLManagedTensor managed;
    int64_t shape, stride;
}; /* and then its slots, where vectors like them */

static void
free_row(DLManagedTensor *managed)
{
    free(managed);
}

static void
free_unused(PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, "dltensor")) /* whoever takes it gives it another name */
        free_row(PyCapsule_GetPointer(capsule, "dltensor"));
}

/* Room for so many slots, and where to write them; NULL with an exception set if there is none. */
SlotRow *
new_row(Py_ssize_t num_tokens, int64_t **out)
{
    const Py_ssize_t most = (PY_SSIZE_T_MAX - (Py_ssize_t)sizeof(SlotRow) - ALIGNMENT) / 8;
    SlotRow *row = num_tokens > most ? NULL : malloc(sizeof(SlotRow) + ALIGNMENT + (size_t)num_tokens * 8);
    if (row == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    *out = (int64_t *)(((uintptr_t)(row + 1) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    row->shape = num_tokens;
    row->stride = 1;
    row->managed = (DLManagedTensor){
        .tensor = {.data = *out, .device_type = DL_CPU, .ndim = 1, .code = DL_INT, .bits = 64, .lanes = 1,
                   .shape = &row->shape, .strides = &row->stride},
        .deleter = free_row,
    };
    return row;
}

/* A tensor that owns the row from now on. */
PyObject *
as_tensor(SlotRow *row)
{
    PyObject *capsule = PyCapsule_New(row, "dltensor", free_unused);
    if (capsule == NULL) {
        free(row);
        return NULL;
    }
    PyObject *tensor = PyObject_CallOneArg(from_dlpack, capsule);
    Py_DECREF(capsule);
    return tensor;
}
