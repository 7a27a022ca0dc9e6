/* Objects that a type keeps: its members that are objects stand first in its list of members. */

#include "_kernels.h"

static PyObject **
field_of(PyObject *self, const PyMemberDef *member)
{
    return (PyObject **)((char *)self + member->offset);
}

int
visit_members(PyObject *self, const PyMemberDef *members, visitproc visit, void *arg)
{
    for (; members->type == T_OBJECT_EX; members++)
        Py_VISIT(*field_of(self, members));
    return 0;
}

void
clear_members(PyObject *self, const PyMemberDef *members)
{
    for (; members->type == T_OBJECT_EX; members++)
        Py_CLEAR(*field_of(self, members));
}
