/* The inner loops of the core. `plain_kernels.py` says in Python what each of them does; a test holds both to it. */

#include "_common.h"

static PyMethodDef functions[] = {
    {"pack", pack, METH_O, NULL},
    {"top_of", (PyCFunction)(void (*)(void))top_of, METH_FASTCALL, NULL},
    {"walk", (PyCFunction)(void (*)(void))walk, METH_FASTCALL, NULL},
    {"reach", (PyCFunction)(void (*)(void))reach, METH_FASTCALL, NULL},
    {"grow", (PyCFunction)(void (*)(void))grow, METH_FASTCALL, NULL},
    {"cut", (PyCFunction)(void (*)(void))cut, METH_FASTCALL, NULL},
    {"uproot", (PyCFunction)(void (*)(void))uproot, METH_FASTCALL, NULL},
    {"last_use", last_use, METH_O, NULL},
    {"leads_to", (PyCFunction)(void (*)(void))leads_to, METH_FASTCALL, NULL},
    {"is_row", (PyCFunction)(void (*)(void))is_row, METH_FASTCALL, NULL},
    {"gather", (PyCFunction)(void (*)(void))gather, METH_FASTCALL, NULL},
    {"expand", (PyCFunction)(void (*)(void))expand, METH_FASTCALL, NULL},
    {"join", join, METH_O, NULL},
    {"maker", maker, METH_O, NULL},
    {"compact", (PyCFunction)(void (*)(void))compact, METH_FASTCALL, NULL},
    {"take_back", (PyCFunction)(void (*)(void))take_back, METH_FASTCALL, NULL},
    {"use_huge_pages", use_huge_pages, METH_NOARGS,
     "use_huge_pages()\n--\n\n"
     "Have whatever small objects Python makes from now on lie in huge pages, in this whole process and for good.\n\n"
     "Linux gives them where `transparent_hugepage` is \"madvise\" or \"always\"; a large tree is then walked in less\n"
     "time. Returns whether they are asked for: not by plain Python, nor elsewhere."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_compiled",
    .m_doc = "The inner loops of the core, compiled: see plain_kernels.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC
PyInit__compiled(void)
{
    if (!knows_children() || !knows_holdings() || !knows_keys() || !knows_makers() ||
        !knows_rankings() || !knows_tensors())
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    PyTypeObject *const types[] = {&NodeType, &ChildrenType, &KeyType, &RankingType, &HoldingsType, &VictimsType};
    for (size_t i = 0; module != NULL && i < sizeof(types) / sizeof(*types); i++)
        if (PyModule_AddType(module, types[i]) < 0)
            Py_CLEAR(module);
    return module;
}
