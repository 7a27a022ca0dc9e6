/* Rows of slots as runs, each from a first slot on: what an allocator hands out mostly is a few of them. */

#include "_common.h"

typedef struct {
    int64_t first, end; /* the first slot, and how many slots of the row there are up to its end */
} Run;

/* Such a row is known by two bytes more. Runs have so many slots each on average: shorter ones take longer to write out
 * than slots one by one. What begins with shorter ones is left soon. */
enum { TAIL = 2, WORTH = 16, SLACK = 512, MOST_RUNS = 256, BLOCK = 64 };

/* ---------------------------------------------------------------- finding them */

/* Whether each slot of a block follows on the one before: each is compared with where it would lie, as vectors do quickly. */
WIDE static int
in_order(const int64_t *slots, uint64_t first)
{
    uint64_t jumps = 0; /* unsigned: what wraps around is a jump, not an error */
    for (uint64_t i = 0; i < BLOCK; i++)
        jumps |= ((uint64_t)slots[i] - first) ^ i;
    return jumps == 0;
}

/* How many of at least one slot follow on each other from the first on. */
Py_ssize_t
run_length(const int64_t *slots, Py_ssize_t count)
{
    Py_ssize_t length = 1;
    while (count - length >= BLOCK && in_order(slots + length, (uint64_t)slots[0] + (uint64_t)length))
        length += BLOCK;
    while (length < count && (uint64_t)slots[length] == (uint64_t)slots[0] + (uint64_t)length)
        length++;
    return length;
}

/* The runs of at least one slot, in room for `MOST_RUNS`; returns how many, 0 if they are not worth it. */
static Py_ssize_t
find_runs(const int64_t *slots, Py_ssize_t count, Run *runs)
{
    Py_ssize_t num_runs = 0, done = 0;
    while (done < count) {
        if (num_runs == MOST_RUNS || num_runs * WORTH > done + SLACK)
            return 0;
        int64_t first = slots[done];
        done += run_length(slots + done, count - done);
        runs[num_runs++] = (Run){first, done};
    }
    return num_runs > 1 && num_runs * WORTH > count ? 0 : num_runs;
}

/* The row of at least one slot as runs; NULL if that is not worth it, or with an exception set on an error. */
PyObject *
as_runs(const int64_t *slots, Py_ssize_t count)
{
    Run runs[MOST_RUNS];
    Py_ssize_t size = find_runs(slots, count, runs) * (Py_ssize_t)sizeof(Run);
    PyObject *row = size == 0 ? NULL : PyBytes_FromStringAndSize(NULL, size + TAIL);
    if (row != NULL) {
        memcpy(PyBytes_AS_STRING(row), runs, (size_t)size);
        memset(PyBytes_AS_STRING(row) + size, 0, TAIL);
    }
    return row;
}

/* Whether each run but the last is whole pages, and all slots fit into 4 bytes. */
static int
are_narrow_pages(const Run *runs, Py_ssize_t num_runs, Py_ssize_t page)
{
    for (Py_ssize_t i = 0; i < num_runs; i++) {
        int64_t length = runs[i].end - (i > 0 ? runs[i - 1].end : 0);
        if ((i + 1 < num_runs && length % page != 0) || runs[i].first < 0 || runs[i].first > INT32_MAX - length)
            return 0;
    }
    return num_runs > 0;
}

/* The row of the first slots of pages, in 4 bytes each, without a look at those that are not; NULL if they are none such,
 * or not as easily told, or with an exception set on an error. */
PyObject *
starts_of_runs(const int64_t *slots, Py_ssize_t count, Py_ssize_t page)
{
    Run runs[MOST_RUNS];
    Py_ssize_t num_runs = find_runs(slots, count, runs), num_pages = (count - 1) / page + 1, start = 0;
    PyObject *row = are_narrow_pages(runs, num_runs, page) ? PyBytes_FromStringAndSize(NULL, num_pages * 4 + 1) : NULL;
    if (row == NULL)
        return NULL;
    char *out = PyBytes_AS_STRING(row);
    for (Py_ssize_t i = 0; i < num_runs; start = (Py_ssize_t)runs[i++].end)
        for (Py_ssize_t at = start; at < runs[i].end; at += page, out += 4) {
            int32_t slot = (int32_t)(runs[i].first + (at - start));
            memcpy(out, &slot, 4);
        }
    *out = 0;
    return row;
}

/* ---------------------------------------------------------------- reading them */

int
is_runs(PyObject *row)
{
    return PyBytes_GET_SIZE(row) % (Py_ssize_t)sizeof(Run) == TAIL && PyBytes_GET_SIZE(row) > TAIL;
}

static Py_ssize_t
num_runs_of(PyObject *row)
{
    return PyBytes_GET_SIZE(row) / (Py_ssize_t)sizeof(Run);
}

static Run
run_at(PyObject *row, Py_ssize_t at)
{
    Run run;
    memcpy(&run, PyBytes_AS_STRING(row) + at * (Py_ssize_t)sizeof(Run), sizeof(Run));
    return run;
}

/* How many slots they say, at most so many; -1 if they are malformed. */
Py_ssize_t
num_in_runs(PyObject *row, Py_ssize_t most)
{
    int64_t end = run_at(row, num_runs_of(row) - 1).end;
    return end < 0 || end > most ? -1 : (Py_ssize_t)end;
}

WIDE static void
write_run(uint64_t first, Py_ssize_t count, Py_ssize_t page, int64_t *restrict out)
{
    if (page == 1)
        for (Py_ssize_t i = 0; i < count; i++)
            out[i] = (int64_t)(first + (uint64_t)i);
    else
        for (Py_ssize_t i = 0; i < count; i++)
            for (Py_ssize_t lane = 0; lane < page; lane++)
                *out++ = (int64_t)(first + (uint64_t)i + (uint64_t)lane);
}

/* Write out as many slots as they say, or the page of each: no more, however malformed they are. */
void
write_runs(PyObject *row, Py_ssize_t count, Py_ssize_t page, int64_t *out)
{
    Py_ssize_t start = 0, num_runs = num_runs_of(row);
    for (Py_ssize_t at = 0; at < num_runs; at++) {
        Run run = run_at(row, at);
        Py_ssize_t end = run.end < start ? start : run.end > count ? count : (Py_ssize_t)run.end;
        write_run((uint64_t)run.first, end - start, page, out + start * page);
        start = end;
    }
}

/* The first slots of them, so many, or the rest. */
PyObject *
part_of_runs(PyObject *row, Py_ssize_t count, int is_rest)
{
    Py_ssize_t start = 0, at = 0, num_runs = num_runs_of(row);
    Run run = run_at(row, at);
    while (at + 1 < num_runs && run.end <= count) {
        start = (Py_ssize_t)run.end;
        run = run_at(row, ++at);
    } /* the one that is cut, or that begins where the cut is */
    Py_ssize_t num_parts = is_rest ? num_runs - at : start < count ? at + 1 : at;
    PyObject *part = PyBytes_FromStringAndSize(NULL, num_parts * (Py_ssize_t)sizeof(Run) + TAIL);
    for (Py_ssize_t i = 0; part != NULL && i < num_parts; i++) {
        Run one = run_at(row, is_rest ? at + i : i);
        if (is_rest)
            one.end = (int64_t)((uint64_t)one.end - (uint64_t)count);
        else if (one.end > count)
            one.end = count;
        if (is_rest && i == 0)
            one.first = (int64_t)((uint64_t)one.first + (uint64_t)count - (uint64_t)start);
        memcpy(PyBytes_AS_STRING(part) + i * (Py_ssize_t)sizeof(Run), &one, sizeof(Run));
    }
    if (part != NULL)
        memset(PyBytes_AS_STRING(part) + num_parts * (Py_ssize_t)sizeof(Run), 0, TAIL);
    return part;
}
