/* What every part uses: arguments, and what a type keeps in members. */

#include "_common.h"

/* ---------------------------------------------------------------- arguments */

int
expect_args(const char *function, Py_ssize_t found, Py_ssize_t expected)
{
    if (found == expected)
        return 1;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", function, expected, found);
    return 0;
}

/* A non-negative integer; -1 with an exception set for anything else. */
Py_ssize_t
size_of(PyObject *object, const char *what)
{
    Py_ssize_t value = PyLong_AsSsize_t(object);
    if (value < 0 && !PyErr_Occurred())
        PyErr_Format(PyExc_ValueError, "%s must not be negative", what);
    return value < 0 ? -1 : value;
}

/* Whether it is there and exactly bytes; an exception is set if not. */
int
is_bytes(PyObject *object, const char *what)
{
    if (object != NULL && PyBytes_CheckExact(object))
        return 1;
    PyErr_Format(PyExc_TypeError, "%s must be bytes", what);
    return 0;
}

/* ---------------------------------------------------------------- members: objects stand first in the list of them */

void
clear_members(PyObject *self, const PyMemberDef *members)
{
    for (; members->type == T_OBJECT_EX; members++)
        Py_CLEAR(*(PyObject **)((char *)self + members->offset));
}

void
set_member(PyObject **field, PyObject *value)
{
    PyObject *old = *field;
    Py_INCREF(value);
    *field = value;
    Py_XDECREF(old);
}
