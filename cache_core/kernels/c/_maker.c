/* Instances of a class that keeps all it has in slots, made as its constructor would, without a frame of Python. */

#include "_common.h"

typedef struct {
    PyObject_VAR_HEAD
    vectorcallfunc call;
    PyTypeObject *made;
    Py_ssize_t offsets[1]; /* of the slots, in the order of the arguments */
} Maker;

static PyTypeObject MakerType;

static PyObject *
maker_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    const Maker *maker = (Maker *)self;
    if (names != NULL)
        return PyErr_Format(PyExc_TypeError, "a maker of %s takes no keywords", maker->made->tp_name);
    if (!expect_args(maker->made->tp_name, PyVectorcall_NARGS(nargsf), Py_SIZE(maker)))
        return NULL;
    PyObject *object = maker->made->tp_alloc(maker->made, 0);
    for (Py_ssize_t i = 0; object != NULL && i < Py_SIZE(maker); i++)
        *(PyObject **)((char *)object + maker->offsets[i]) = Py_NewRef(args[i]);
    return object;
}

/* Where a slot of that name lies in instances of a class; -1 with an exception set if it has none. */
static Py_ssize_t
offset_of(PyObject *class, PyObject *name)
{
    PyObject *found = PyObject_GetAttr(class, name);
    const PyMemberDescrObject *slot = found != NULL && Py_IS_TYPE(found, &PyMemberDescr_Type) ? (PyMemberDescrObject *)found
                                                                                             : NULL;
    Py_ssize_t offset = -1;
    if (slot != NULL && slot->d_member->type == T_OBJECT_EX && PyType_IsSubtype((PyTypeObject *)class, PyDescr_TYPE(slot)))
        offset = slot->d_member->offset;
    else if (found != NULL)
        PyErr_Format(PyExc_TypeError, "%R is no slot of %R", name, class);
    Py_XDECREF(found);
    return offset;
}

PyObject *
maker(PyObject *module, PyObject *class)
{
    PyObject *names = PyType_Check(class) ? PyObject_GetAttrString(class, "__match_args__") : NULL;
    if (names == NULL || !PyTuple_CheckExact(names)) {
        Py_XDECREF(names);
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "a class with slots is needed, not %R", class);
    }
    Maker *maker = PyObject_NewVar(Maker, &MakerType, PyTuple_GET_SIZE(names));
    if (maker != NULL) {
        maker->call = maker_call;
        maker->made = (PyTypeObject *)Py_NewRef(class);
    }
    for (Py_ssize_t i = 0; maker != NULL && i < PyTuple_GET_SIZE(names); i++)
        if ((maker->offsets[i] = offset_of(class, PyTuple_GET_ITEM(names, i))) < 0)
            Py_CLEAR(maker);
    Py_DECREF(names);
    return (PyObject *)maker;
}

static void
maker_dealloc(PyObject *self)
{
    Py_DECREF(((Maker *)self)->made);
    PyObject_Free(self);
}

static PyTypeObject MakerType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "raydix.cache_core.kernels._compiled.Maker",
    .tp_basicsize = offsetof(Maker, offsets),
    .tp_itemsize = sizeof(Py_ssize_t),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Maker, call),
    .tp_call = PyVectorcall_Call,
    .tp_dealloc = maker_dealloc,
};

int
knows_makers(void)
{
    return PyType_Ready(&MakerType) == 0;
}
