/* Where Python's small objects lie. A tree of a million nodes is a great many of them, and a walk comes where nobody has
 * been for long: in huge pages it does not wait to be told where that is. */

#if defined(__linux__)
#define _DEFAULT_SOURCE
#include <sys/mman.h>
#endif

#include "_common.h"

#if defined(MADV_HUGEPAGE) && SIZE_MAX > UINT32_MAX

enum { ARENA = 1 << 20, HUGE = 2 * ARENA, MOST = 1 << 16 }; /* bytes Python asks for at once, and of a page; arenas */

static char *region;      /* of addresses for all that there may be; memory is taken page by page */
static char is_free[MOST]; /* those of the pages in use so far */
static Py_ssize_t num_arenas;
static PyObjectArenaAllocator others; /* whose are those outside the region */

static int
take_page(void)
{
    char *page = region + num_arenas * (Py_ssize_t)ARENA;
    if (num_arenas == MOST || mprotect(page, HUGE, PROT_READ | PROT_WRITE) != 0)
        return 0;
    madvise(page, HUGE, MADV_HUGEPAGE);
    memset(is_free + num_arenas, 1, 2);
    num_arenas += 2;
    return 1;
}

static void *
new_arena(void *context, size_t size)
{
    char *place = size == ARENA ? memchr(is_free, 1, (size_t)num_arenas) : NULL;
    if (place == NULL && size == ARENA && take_page())
        place = is_free + num_arenas - 2;
    if (place == NULL)
        return others.alloc(others.ctx, size);
    *place = 0;
    return region + (place - is_free) * (Py_ssize_t)ARENA;
}

static void
free_arena(void *context, void *arena, size_t size)
{
    uintptr_t offset = (uintptr_t)arena - (uintptr_t)region;
    if (offset >= (uintptr_t)MOST * ARENA) {
        others.free(others.ctx, arena, size);
        return;
    }
    size_t place = offset / ARENA, first = place & ~(size_t)1;
    is_free[place] = 1;
    if (is_free[first] && is_free[first + 1])
        madvise(region + first * ARENA, HUGE, MADV_DONTNEED); /* the memory goes, the addresses stay */
}

/* Addresses that begin where huge pages do. */
static char *
reserve(void)
{
    size_t size = (size_t)MOST * ARENA;
    void *start = mmap(NULL, size + HUGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return start == MAP_FAILED ? NULL : (char *)(((uintptr_t)start + HUGE - 1) / HUGE * HUGE);
}

PyObject *
use_huge_pages(PyObject *module, PyObject *nothing)
{
    if (region == NULL && (region = reserve()) != NULL) {
        PyObjectArenaAllocator ours = {NULL, new_arena, free_arena};
        PyObject_GetArenaAllocator(&others);
        PyObject_SetArenaAllocator(&ours);
    }
    return PyBool_FromLong(region != NULL);
}

/* Have a large table lie in huge pages where small objects do, too: before it is written to. */
void
spread(void *table, size_t size)
{
    uintptr_t first = ((uintptr_t)table + HUGE - 1) / HUGE * HUGE, end = ((uintptr_t)table + size) / HUGE * HUGE;
    if (region != NULL && first < end)
        madvise((void *)first, end - first, MADV_HUGEPAGE);
}

#else

PyObject *
use_huge_pages(PyObject *module, PyObject *nothing)
{
    Py_RETURN_FALSE;
}

void
spread(void *table, size_t size)
{
}

#endif
