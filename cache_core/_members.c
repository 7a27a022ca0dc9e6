/* What a type keeps in members: its objects stand first in its list of them. */

#include "_kernels.h"

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
