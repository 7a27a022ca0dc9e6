/* Tensors: whether one is a row of slots, where its data is, and new ones over memory of our own. Both by the table of C
 * functions that a type of tensors has for that: https://dmlc.github.io/dlpack/latest/python_spec.html */

#include "_common.h"
#include <stdatomic.h>

/* ---------------------------------------------------------------- what DLPack lays down */

typedef struct {
    uint32_t major, minor;
} Version;

typedef struct {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides; /* in elements */
    uint64_t byte_offset;
} View;

typedef struct managed {
    Version version;
    void *context;
    void (*deleter)(struct managed *self);
    uint64_t flags;
    View view;
} Managed;

typedef struct {
    Version version;
    const void *older;
    void *allocate, *export;
    int (*import)(Managed *, void **tensor); /* which takes over what it is given */
    int (*look)(void *tensor, View *);       /* what it tells holds until control is returned */
} Exchange;

enum { MAJOR = 1, MINOR = 1, CPU = 1, SIGNED = 0, ALIGNMENT = 64 };

static PyObject *tensor_type;
static const Exchange *exchange;

/* Only a table of functions as they are known here will do; with any other, plain Python takes their place. */
static int
is_known(const Exchange *found)
{
    if (found != NULL && found->version.major == MAJOR && found->import != NULL && found->look != NULL)
        return 1;
    PyErr_SetString(PyExc_ImportError, "the compiled loops need a torch that has __dlpack_c_exchange_api__");
    return 0;
}

int
knows_tensors(void)
{
    PyObject *torch = PyImport_ImportModule("torch");
    if (torch == NULL || (tensor_type = PyObject_GetAttrString(torch, "Tensor")) == NULL)
        return 0;
    PyObject *capsule = PyObject_GetAttrString(tensor_type, "__dlpack_c_exchange_api__");
    exchange = capsule == NULL ? NULL : PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_XDECREF(capsule);
    Py_DECREF(torch);
    return is_known(exchange);
}

/* ---------------------------------------------------------------- asking them */

/* The slots of a tensor that is a row of them, int64 side by side on the CPU, and how many: 1, or 0 if it is none. */
int
slots_in_tensor(PyObject *tensor, const int64_t **slots, Py_ssize_t *count)
{
    View view;
    if (!PyObject_TypeCheck(tensor, (PyTypeObject *)tensor_type))
        return 0;
    if (exchange->look(tensor, &view) != 0) {
        PyErr_Clear(); /* what cannot be told of so is no row in memory */
        return 0;
    }
    if (view.device_type != CPU || view.ndim != 1 || view.code != SIGNED || view.bits != 64 || view.lanes != 1 ||
        (view.strides != NULL && view.strides[0] != 1 && view.shape[0] > 1))
        return 0;
    *slots = (const int64_t *)((const char *)view.data + view.byte_offset);
    *count = view.shape[0];
    return 1;
}

PyObject *
is_row(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (!expect_args("is_row", nargs, 2))
        return NULL;
    const int64_t *slots;
    Py_ssize_t count, needed = size_of(args[1], "needed");
    if (needed < 0)
        return NULL;
    return PyBool_FromLong((PyObject *)Py_TYPE(args[0]) == tensor_type && slots_in_tensor(args[0], &slots, &count) &&
                           count >= needed);
}

/* ---------------------------------------------------------------- new ones */

struct slot_row {
    Managed managed;
    int64_t shape;
    int bits; /* of the size of its memory */
}; /* and then its slots, where vectors like them */

/* The memory of the row that went last, for the next one: the allocator would hand out colder lines. Of each size one. */
enum { FEWEST_BITS = 9, MOST_BITS = 16 };
static _Atomic(SlotRow *) spare[MOST_BITS + 1];

static void
free_row(Managed *managed) /* on whatever thread, with or without the interpreter's lock */
{
    SlotRow *row = (SlotRow *)managed;
    free(row->bits > MOST_BITS ? row : atomic_exchange(&spare[row->bits], row));
}

void
drop_row(SlotRow *row)
{
    free_row(&row->managed);
}

static SlotRow *
room_for(size_t size)
{
    int bits = FEWEST_BITS;
    while (bits <= MOST_BITS && (size_t)1 << bits < size)
        bits++;
    SlotRow *row = bits > MOST_BITS ? NULL : atomic_exchange(&spare[bits], NULL);
    if (row == NULL)
        row = malloc(bits > MOST_BITS ? size : (size_t)1 << bits);
    if (row != NULL)
        row->bits = bits;
    return row;
}

/* Room for so many slots, and where to write them; NULL with an exception set if there is none. */
SlotRow *
new_row(Py_ssize_t num_tokens, int64_t **out)
{
    const Py_ssize_t most = (PY_SSIZE_T_MAX - (Py_ssize_t)sizeof(SlotRow) - ALIGNMENT) / 8;
    SlotRow *row = num_tokens > most ? NULL : room_for(sizeof(SlotRow) + ALIGNMENT + (size_t)num_tokens * 8);
    if (row == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    *out = (int64_t *)(((uintptr_t)(row + 1) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    row->shape = num_tokens;
    row->managed = (Managed){ /* of a version in which what stands side by side need not say so */
        .version = {MAJOR, MINOR},
        .deleter = free_row,
        .view = {.data = *out, .device_type = CPU, .ndim = 1, .code = SIGNED, .bits = 64, .lanes = 1,
                 .shape = &row->shape},
    };
    return row;
}

/* A tensor that owns the row from now on; NULL with an exception set if torch refuses, and the row may be lost. */
PyObject *
as_tensor(SlotRow *row)
{
    void *tensor = NULL;
    return exchange->import(&row->managed, &tensor) == 0 ? tensor : NULL;
}
