"""`DiskIndex`: which page each record of a disk tier holds, in one SQLite database.

    layout   the format of the records: one row
    spaces   namespaces with the fingerprints of the models that computed their KV
    rows     one for each record: its page, by the digest, and its sum

A row is committed behind its record, and is gone before its record is used for another page. So a record without a row
is unused, and a row names the record of its page, or a record with a wrong sum.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import stat
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import py_object, pythonapi
from math import isfinite
from time import time
from typing import Any, NamedTuple

import numpy as np

from raydix.actors.tiers.disk.checksums import DIGEST_BYTES, SUM_BYTES
from raydix.actors.tiers.disk.disk_errors import DiskError, DiskFailed, DiskFull, IndexDamaged, index_values
from raydix.actors.tiers.disk.file_calls import FileCalls
from raydix.cache_core.tiers.index_row import FIRST, IndexRow, RowPlace
from raydix.cache_core.tiers.page_records import KINDS, Kind
from raydix.cache_core.tiers.record_keeper import Numbers
from raydix.schemas import CacheUnavailable
from raydix.schemas.shown import brief, byte_size

FORMAT = 1
INDEX = "index.db"
ROW_BYTES = 300  # reserved for a row and its place in the order, without token ids


_NEW = "index.new"
_LOG = "-wal"
_SUFFIXES = ("", "-wal", "-shm", "-journal")  # endings of the files that SQLite makes
INDEX_FILES = tuple(name + suffix for name in (INDEX, _NEW) for suffix in _SUFFIXES)
APPLICATION = 0x52594458  # "RYDX", in the header of the file
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILLER_BYTES = 64 * 2**20  # bytes of one blob
_ROWS_OF_PAGE = 8  # least rows of a full page of the database
_SLACK = 1.5  # A database of many changes is two thirds full.
_CHECKPOINT_PAGES = 1000
_ORPHANS = 512  # rows of deleted spaces, or bad ones, that one commit deletes
_DIGEST = re.compile("[0-9a-f]{16}")
_MOST = 2**62  # more than the number of any space, record or page
_BAD = "typeof({0}) <> 'integer' OR {0} NOT BETWEEN {1} AND {2}"
# The columns of `by_depth`, which say where a row stands. The other values of a row are checked when it is read.
_BAD_ROWS = " OR ".join(
    _BAD.format(column, least, most)
    for column, least, most in (
        ("space", 1, _MOST),
        ("depth", 1, _MOST),
        ("kind", 0, len(KINDS) - 1),
        ("record", 1, _MOST),
    )
)
# Codes of errors that a sound index does not cause: SQLITE_ERROR is raised for a table that is not there.
_DAMAGE = (
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_TOOBIG,
)
_LAST_SPACE = "SELECT space FROM rows WHERE space < ? ORDER BY space DESC LIMIT 1"

_SCHEMA = """
CREATE TABLE layout (digest TEXT NOT NULL, page_size INTEGER NOT NULL, description TEXT NOT NULL);
CREATE TABLE spaces (
    number INTEGER PRIMARY KEY AUTOINCREMENT,  -- never used again
    namespace BLOB,  -- NULL: the default namespace
    base TEXT NOT NULL,
    adapter TEXT,
    label TEXT NOT NULL,
    arity INTEGER NOT NULL,
    created REAL NOT NULL
);
CREATE TABLE rows (
    kind INTEGER NOT NULL,
    record INTEGER NOT NULL,
    space INTEGER NOT NULL,
    depth INTEGER NOT NULL,
    digest BLOB NOT NULL,
    sum BLOB NOT NULL,
    parent BLOB,
    tokens BLOB,
    planes INTEGER NOT NULL,
    PRIMARY KEY (kind, record)
) WITHOUT ROWID;
CREATE INDEX by_depth ON rows (space, depth, kind, record);
"""


class IndexLayout(NamedTuple):
    """The format of the records.

    Attributes:
        digest: of the format.
        page_size: tokens of a page.
        description: the segments and their types, as JSON.
    """

    digest: str
    page_size: int
    description: str


class Space(NamedTuple):
    """A namespace, and the models that computed its KV.

    Attributes:
        number: of this space alone, for ever.
        namespace: its `extra_key`.
        base, adapter: fingerprints of the base model and of the adapter; None: there is no adapter.
        label: of the base's weights.
        arity: ids of a tuple in its keys; 0: plain ids.
        created: seconds since the epoch.
    """

    number: int
    namespace: str | None
    base: str
    adapter: str | None
    label: str
    arity: int
    created: float


def index_bytes(num_pages: int, page_size: int, num_others: int = 0) -> int:
    """Return the bytes to reserve for an index: about 400 for a page of 16 tokens.

    Args:
        num_others: records of window KV and of states.
    """
    return (num_pages + num_others) * ROW_BYTES + int(_SLACK * 4 * page_size * num_pages)


def log_bytes(page_size: int) -> int:
    """Return the bytes that the log of the database takes, about."""
    return 2 * _CHECKPOINT_PAGES * _page_bytes(page_size)


def _page_bytes(page_size: int) -> int:
    """Return the size of a page of the database, so that rows with token ids waste little of it."""
    wanted = _ROWS_OF_PAGE * int(ROW_BYTES / _SLACK + 4 * page_size)
    return min(65536, max(4096, 1 << (wanted - 1).bit_length()))


class DiskIndex:
    """The index of one folder. All calls must come from one process, and from one thread at a time.

    A new index has room for all its rows, so that a full disk is met at the start.

    Args:
        path: of the folder.
        layout: of the records; None: the index must be there, may be of any layout, and is only read.
        folder: descriptor of the folder, of which the index must be; None: the folder that the path names.
        room: bytes that a new index reserves, as of `index_bytes`.
        last_space: number of the last space of the index before; a new index goes on from there.
        calls: of the operating system.

    Attributes:
        layout: of the records.
        last_space: the highest number of a space so far.
        num_bad_rows: rows and spaces that are none of this format, so far, and the rows of these spaces.

    Raises:
        CacheUnavailable: the index is of another layout or version, is not that of the folder, or has no room.
        IndexDamaged: the file is no database, or a malformed one. `discard` removes it.
        DiskError: it could not be read or written.
    """

    def __init__(
        self,
        path: str,
        layout: IndexLayout | None,
        *,
        folder: int | None = None,
        room: int = 0,
        last_space: int = 0,
        calls: FileCalls | None = None,
    ) -> None:
        self._calls = calls or FileCalls()
        self.num_bad_rows = 0
        self._past_orphans = 0  # spaces up to here have no orphans
        self._bad_spaces: set[int] = set()
        with _folder_of(path, folder) as fd:
            if not _exists(fd):
                if layout is None:
                    raise CacheUnavailable(f"{path} has no index of a disk tier")
                self._create(path, fd, layout, room, last_space)
            before = _held_files(INDEX + _LOG)
            self._db = self._connect(path, fd, INDEX, "ro" if layout is None else "rw")
            try:
                if layout is not None:
                    self._set_up(self._db)
                self.layout = self._read_layout(layout)
                self._live, self.last_space = self._read_numbers()
                if opened := _held_files(INDEX + _LOG) - before:
                    _check_held(path, fd, INDEX + _LOG, opened)
            except BaseException:
                self._db.close()
                raise
        self._pid = os.getpid()
        _indexes.add(self)

    @staticmethod
    def discard(path: str, folder: int | None = None) -> None:
        """Remove the index of a folder that nothing has open. Its records are unused from then on."""
        with _folder_of(path, folder) as fd:
            for name in INDEX_FILES:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=fd)

    def close(self) -> None:
        """Close the index. All commits are kept. In a forked process it has no effect."""
        if self._pid == os.getpid():
            with _typed("closing the index"):
                self._db.close()

    def _keep_open(self) -> None:
        """Keep a forked process from closing its copy: SQLite would remove the log that the other process writes."""
        pythonapi.Py_IncRef(py_object(self._db))

    # ---------------------------------------------------------------- spaces

    def spaces(self, after: int = 0, limit: int = -1) -> list[Space]:
        """Return the spaces, the oldest first. Those that are none of this format are left out: see `drop_bad`.

        Args:
            after: only those with higher numbers.
            limit: at most so many, with those that are left out; -1: all.
        """
        columns = "number, namespace, base, adapter, label, arity, created"
        with _typed("reading the index"):
            found = self._db.execute(
                f"SELECT {columns} FROM spaces WHERE number > ? ORDER BY number LIMIT ?", (after, limit)
            ).fetchall()
        spaces = {values[0]: _space_of(values) for values in found}
        self._bad_spaces.update(number for number, space in spaces.items() if space is None)
        return [space for space in spaces.values() if space is not None]

    def add_space(self, namespace: str | None, base: str, adapter: str | None, label: str, arity: int = 0) -> Space:
        """Add a space, and return it."""
        space = Space(self.last_space + 1, namespace, base, adapter, label, arity, time())
        self.add_spaces([space])
        return space

    def add_spaces(self, spaces: Sequence[Space]) -> None:
        """Add spaces: all of them or, after an error, none. Their numbers must be higher than all before."""
        numbers = [space.number for space in spaces]
        assert min(numbers) > self.last_space, "the number of a space is used again"
        names = [
            None if space.namespace is None else space.namespace.encode("utf-8", "surrogatepass") for space in spaces
        ]
        with self._transaction("adding spaces to the index"):
            self._db.executemany(
                "INSERT INTO spaces (number, namespace, base, adapter, label, arity, created) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                [(space.number, name, *space[2:]) for space, name in zip(spaces, names, strict=True)],
            )
        self._live.update(numbers)
        self.last_space = max(numbers)

    def delete_spaces(self, numbers: Iterable[int]) -> None:
        """Delete spaces with all their rows. When this returns, no crash can bring them back.

        They take no rows from this call on, also if it fails; then it must be repeated. `clean` frees their rows' room.
        """
        numbers = list(numbers)
        self._live.difference_update(numbers)
        with _typed("deleting spaces of the index"):
            self._db.execute("PRAGMA synchronous=FULL")
        try:
            with self._transaction("deleting spaces of the index"):
                self._db.executemany("DELETE FROM spaces WHERE number = ?", [(number,) for number in numbers])
        finally:
            with suppress(sqlite3.Error):
                self._db.execute("PRAGMA synchronous=NORMAL")
        self._past_orphans = 0

    def drop_bad(self) -> bool:
        """Delete the spaces that `spaces` has left out, and rows that stand at no place; return whether there are more.

        The rows of such spaces count as those of deleted ones: `clean` deletes them. O(rows), 0.5 us each.
        """
        num_bad = 0
        with self._transaction("deleting damaged rows of the index"):
            (has_bad,) = self._db.execute(f"SELECT EXISTS (SELECT 1 FROM rows WHERE {_BAD_ROWS})").fetchone()
            for number in self._bad_spaces:
                (num_rows,) = self._db.execute("SELECT count(*) FROM rows WHERE space = ?", (number,)).fetchone()
                self._db.execute("DELETE FROM spaces WHERE number = ?", (number,))
                num_bad += 1 + num_rows
            if has_bad:
                some = f"SELECT kind, record FROM rows WHERE {_BAD_ROWS} LIMIT {_ORPHANS}"
                done = self._db.execute(f"DELETE FROM rows WHERE (kind, record) IN ({some})").rowcount
                if not done:
                    raise IndexDamaged("deleting damaged rows of the index failed: they are not found again")
                num_bad += done
        self._live -= self._bad_spaces
        self._bad_spaces.clear()
        self.num_bad_rows += num_bad
        return bool(has_bad)

    def delete_empty(self, numbers: Iterable[int]) -> None:
        """Delete spaces that have no rows. They take none from this call on, also if it fails."""
        numbers = list(numbers)
        self._live.difference_update(numbers)
        with self._transaction("deleting spaces of the index"):
            self._db.executemany(
                "DELETE FROM spaces WHERE number = ? AND NOT EXISTS (SELECT 1 FROM rows WHERE space = number)",
                [(number,) for number in numbers],
            )

    def clean(self) -> bool:
        """Delete some rows of deleted spaces; return whether there may be more."""
        with self._transaction("deleting rows of the index"):
            while (space := self._next_space()) is not None:
                if space not in self._live:
                    self._db.execute(
                        "DELETE FROM rows WHERE (kind, record) IN "
                        "(SELECT kind, record FROM rows WHERE space = ? ORDER BY depth LIMIT ?)",
                        (space, _ORPHANS),
                    )
                    return True
                self._past_orphans = space
        return False

    def _read_numbers(self) -> tuple[set[int], int]:
        """Return the numbers of the spaces, and the highest number so far: rows may name deleted spaces."""
        with _typed("reading the index"):
            live = {number for (number,) in self._db.execute("SELECT number FROM spaces")}
            numbers = [
                *live,
                *(number for (number,) in self._db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'spaces'")),
                *(number for (number,) in self._db.execute(_LAST_SPACE, (_MOST,))),
            ]
        return live, max((number for number in numbers if type(number) is int and number < _MOST), default=0)

    def _next_space(self) -> int | None:
        sql = "SELECT space FROM rows WHERE space > ? ORDER BY space LIMIT 1"
        found = self._db.execute(sql, (self._past_orphans,)).fetchone()
        return None if found is None else found[0]

    # ---------------------------------------------------------------- rows

    def commit(self, added: Sequence[IndexRow] = (), removed: Iterable[tuple[Kind, int]] = ()) -> list[IndexRow]:
        """Remove rows, and add rows behind their records: all of them or, after a crash, none.

        Args:
            added: rows of records that have been written. A row of a deleted space is not added.
            removed: kinds and numbers of records; without a row they are ignored.

        Returns:
            The added rows.
        """
        rows = [row for row in added if row.space in self._live]
        with self._transaction("writing the index"):
            self._db.executemany(
                "DELETE FROM rows WHERE kind = ? AND record = ?",
                [(KINDS.index(kind), record) for kind, record in removed],
            )
            # A row of a deleted space may be left for the same record.
            self._db.executemany(
                "INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [(KINDS.index(row.kind), *row[1:]) for row in rows],
            )
        return rows

    def rows(self, space: int, after: RowPlace = FIRST, limit: int = 4096) -> tuple[list[IndexRow], RowPlace | None]:
        """Read rows of a space by depth, from behind a place.

        Returns:
            The rows, and the place from which to go on; None: there are no more.
        """
        with _typed("reading the index"):
            found = self._db.execute(
                "SELECT kind, record, space, depth, digest, sum, parent, tokens, planes FROM rows "
                "WHERE space = ? AND (depth, kind, record) > (?, ?, ?) ORDER BY depth, kind, record LIMIT ?",
                (space, *after[1:], limit),
            ).fetchall()
        good = [IndexRow(KINDS[row[0]], *row[1:]) for row in found if self._is_row(row)]
        self.num_bad_rows += len(found) - len(good)
        return good, RowPlace(space, found[-1][3], *found[-1][:2]) if len(found) == limit else None

    def _is_row(self, values: tuple[Any, ...]) -> bool:
        """Return whether the values of a row have the types and sizes of this format."""
        kind, record, space, depth, digest, record_sum, parent, tokens, planes = values
        return (
            all(type(number) is int and number >= 0 for number in (kind, record, space, depth, planes))
            and type(digest) is type(record_sum) is bytes
            and (parent is None or type(parent) is bytes)
            and (tokens is None or type(tokens) is bytes)
            and kind < len(KINDS)
            and record > 0
            and depth > 0
            and len(digest) == DIGEST_BYTES
            and len(record_sum) == SUM_BYTES
            and (parent is None or len(parent) == DIGEST_BYTES)
            and (tokens is None or (len(tokens) > 0 and len(tokens) % (4 * self.layout.page_size) == 0))
        )

    def records(self, after: RowPlace = FIRST, limit: int = 16384) -> tuple[Numbers, Numbers, Numbers, RowPlace | None]:
        """Read the records of the rows of all spaces, by space and depth, in a tenth of the time of `rows`.

        Returns:
            The spaces of the records; their kinds, by their places in `KINDS`; their numbers; and the place from which
            to go on.
        """
        with _typed("reading the index"):
            found = self._db.execute(
                "SELECT space, depth, kind, record FROM rows "
                "WHERE (space, depth, kind, record) > (?, ?, ?, ?) ORDER BY space, depth, kind, record LIMIT ?",
                (*after, limit),
            ).fetchall()
        with index_values("reading the index"):
            values = np.array(found, np.int64).reshape(-1, 4)
        place = RowPlace(*found[-1]) if len(found) == limit else None
        return values[:, 0].copy(), values[:, 2].copy(), values[:, 3].copy(), place

    def num_rows(self, space: int) -> int:
        """Return the number of a space's rows. O(rows)."""
        return sum(self.num_records(space).values())

    def num_records(self, space: int) -> dict[Kind, int]:
        """Return the number of a space's records of each kind that it has. O(rows)."""
        with _typed("reading the index"):
            sql = "SELECT kind, count(*) FROM rows WHERE space = ? GROUP BY kind"
            found = self._db.execute(sql, (space,)).fetchall()
        return {KINDS[kind]: number for kind, number in found if kind in range(len(KINDS))}

    # ---------------------------------------------------------------- the database

    @contextmanager
    def _transaction(self, doing: str) -> Iterator[None]:
        """Do all of the block or nothing."""
        with _typed(doing):
            if self._db.in_transaction:  # its end has failed
                self._db.execute("ROLLBACK")
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    with suppress(sqlite3.Error):  # The transaction ends with the connection, at the latest.
                        self._db.execute("ROLLBACK")
                raise

    def _connect(self, path: str, folder: int, name: str, mode: str) -> sqlite3.Connection:
        """Open a database of a folder. Nothing is read or written before it is known to be that of the folder.

        SQLite opens files by paths alone, and follows links in them.
        """
        with _typed("opening the index"):
            before = _held_files(name)
            db = self._calls.connect(os.path.join(path, name), mode)
            try:
                # Text that is not UTF-8 is no error of all the rows that are read with it.
                db.text_factory = lambda data: data.decode("utf-8", "surrogateescape")
                _check_held(path, folder, name, _held_files(name) - before)
                for pragma in ("trusted_schema=OFF", "cell_size_check=ON"):
                    db.execute(f"PRAGMA {pragma}")
            except BaseException:
                db.close()
                raise
        return db

    def _set_up(self, db: sqlite3.Connection) -> None:
        with _typed("opening the index"):
            # Only this process uses the database: the index of its log needs no shared memory.
            db.execute("PRAGMA locking_mode=EXCLUSIVE").fetchall()
            (mode,) = db.execute("PRAGMA journal_mode=WAL").fetchone()
            if mode != "wal":
                raise DiskFailed(f"opening the index failed: it has the journal mode {mode!r} and no log")
            db.execute("PRAGMA synchronous=NORMAL")
            db.execute("PRAGMA temp_store=MEMORY")
            db.execute(f"PRAGMA wal_autocheckpoint={_CHECKPOINT_PAGES}").fetchall()

    def _read_layout(self, expected: IndexLayout | None) -> IndexLayout:
        """Return the layout of the index, which must be the expected one, if there is one."""
        with _typed("reading the index"):
            application = self._db.execute("PRAGMA application_id").fetchone()[0]
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if application != APPLICATION:
                raise IndexDamaged("reading the index failed: the file is a database of another program")
            if version != FORMAT:
                raise CacheUnavailable(
                    f"the disk cannot be used: its index has format {version}, and this version of Raydix reads "
                    f"format {FORMAT}. `raydix disk clear` removes it"
                )
            found = [IndexLayout(*row) for row in self._db.execute("SELECT digest, page_size, description FROM layout")]
        is_one = len(found) == 1 and _is_text(found[0].digest) and type(found[0].page_size) is int
        if not is_one or not _is_text(found[0].description):
            raise IndexDamaged(f"reading the index failed: it must have one layout, not {brief(found)}")
        if expected is not None and found[0][:2] != expected[:2]:
            # The digest is also of the size of pages.
            if found[0].digest == expected.digest or not _DIGEST.fullmatch(found[0].digest):
                raise IndexDamaged(f"reading the index failed: its layout is damaged: {brief(found[0])}")
            raise CacheUnavailable(
                f"the disk cannot be used: its index is of another layout than the cache: "
                f"{_difference(found[0], expected)}. `raydix disk clear` removes it"
            )
        return found[0]

    def _create(self, path: str, folder: int, layout: IndexLayout, room: int, last_space: int) -> None:
        """Make an index with room for its rows. It appears when it is whole."""
        self.discard(path, folder)
        try:
            with _typed("making the index"):
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                os.close(os.open(_NEW, flags, 0o600, dir_fd=folder))
                db = self._connect(path, folder, _NEW, "rw")
                try:
                    self._fill(db, layout, room, last_space)
                finally:
                    db.close()
                _sync(folder, _NEW)
                os.rename(_NEW, INDEX, src_dir_fd=folder, dst_dir_fd=folder)
                os.fsync(folder)
        except DiskFull as error:
            self.discard(path, folder)
            raise CacheUnavailable(f"the disk cannot be used: no room for the index of {byte_size(room)}") from error

    def _fill(self, db: sqlite3.Connection, layout: IndexLayout, room: int, last_space: int) -> None:
        """Make the tables of a new database, and pages that are free."""
        db.execute(f"PRAGMA page_size={_page_bytes(layout.page_size)}")
        db.execute("PRAGMA journal_mode=OFF").fetchall()
        db.execute("PRAGMA synchronous=OFF")
        db.execute(f"PRAGMA application_id={APPLICATION}")
        db.execute(f"PRAGMA user_version={FORMAT}")
        db.execute("BEGIN")
        db.execute("CREATE TABLE filler (bytes BLOB)")
        for start in range(0, room, _FILLER_BYTES):
            db.execute("INSERT INTO filler VALUES (zeroblob(?))", (min(_FILLER_BYTES, room - start),))
        db.execute("DROP TABLE filler")
        for statement in _SCHEMA.split(";")[:-1]:
            db.execute(statement)
        db.execute("INSERT INTO layout VALUES (?, ?, ?)", layout)
        if last_space:
            db.execute("INSERT INTO sqlite_sequence (name, seq) VALUES ('spaces', ?)", (last_space,))
        db.execute("COMMIT")


def _difference(found: IndexLayout, expected: IndexLayout) -> str:
    """Return the parts of two layouts that differ, in words."""
    parts, ours = ({"page_size": layout.page_size} | _parts_of(layout) for layout in (found, expected))
    missing = object()
    named = [
        f"{name} is {brief(parts.get(name))}, not {brief(ours.get(name))}"
        for name in dict.fromkeys((*parts, *ours))
        if parts.get(name, missing) != ours.get(name, missing)
    ]
    return ", ".join(named) or f"its digest is {brief(found.digest)}, not {brief(expected.digest)}"


def _parts_of(layout: IndexLayout) -> dict[str, Any]:
    try:
        parts = json.loads(layout.description)
    except ValueError:
        return {}
    return parts if isinstance(parts, dict) else {}


_indexes: weakref.WeakSet[DiskIndex] = weakref.WeakSet()  # of this process


def _keep_open_in_child() -> None:
    for index in _indexes:
        index._keep_open()


os.register_at_fork(after_in_child=_keep_open_in_child)


@contextmanager
def _folder_of(path: str, folder: int | None) -> Iterator[int]:
    """Yield a descriptor of a folder: the one that the caller has, or one that is open for the block."""
    if folder is not None:
        yield folder
        return
    fd = os.open(path, _FOLDER)
    try:
        yield fd
    finally:
        os.close(fd)


def _exists(folder: int) -> bool:
    """Return whether a folder has an index, which must be a file of this user, as its log must."""
    for name in (INDEX + suffix for suffix in _SUFFIXES):
        with suppress(FileNotFoundError):
            facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
                raise CacheUnavailable(f"the disk cannot be used: {name} must be a file of this user: remove it")
    return INDEX in os.listdir(folder)


def _is_text(value: object) -> bool:
    """Return whether a value was stored as text in UTF-8."""
    return type(value) is str and not any("\ud800" <= char <= "\udfff" for char in value)


def _space_of(values: tuple[Any, ...]) -> Space | None:
    """Return the space of a row; None: its values have not the types and sizes of this format."""
    number, name, base, adapter, label, arity, created = values
    is_good = (
        0 < number < _MOST
        and (name is None or type(name) is bytes)
        and _is_text(base)
        and (adapter is None or _is_text(adapter))
        and _is_text(label)
        and type(arity) is int
        and 0 <= arity < _MOST
        and type(created) is float
        and isfinite(created)
    )
    try:
        namespace = None if name is None or not is_good else name.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return None
    return Space(number, namespace, base, adapter, label, arity, created) if is_good else None


def _held_files(name: str) -> Counter[tuple[int, int]]:
    """Count the descriptors that this process has of files of a name, by the device and inode of the file."""
    held: Counter[tuple[int, int]] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        link = f"/proc/self/fd/{fd}"
        with suppress(OSError):  # It has been closed meanwhile.
            if os.path.basename(os.readlink(link)) == name:
                facts = os.stat(link)
                held[facts.st_dev, facts.st_ino] += 1
    return held


def _check_held(path: str, folder: int, name: str, opened: Counter[tuple[int, int]]) -> None:
    """Raise CacheUnavailable if the file of the folder is not among those that have been opened."""
    try:
        facts = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        raise _replaced(path, name) from None
    if (facts.st_dev, facts.st_ino) not in opened:
        raise _replaced(path, name)


def _replaced(path: str, name: str) -> CacheUnavailable:
    return CacheUnavailable(
        f"the disk cannot be used: {os.path.join(path, name)} is not the file of the folder that was locked: a part "
        "of its path has been replaced, such as by a link; restore the folder"
    )


def _sync(folder: int, name: str) -> None:
    """Wait until a file of a folder is on the disk."""
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _typed(doing: str) -> Iterator[None]:
    """Raise errors of SQLite and of the operating system as errors of the disk tier."""
    try:
        yield
    except sqlite3.ProgrammingError:  # a fault of the caller
        raise
    except sqlite3.Error as error:
        raise _disk_error(error, doing) from error
    except OSError as error:
        raise DiskFailed(f"{doing} failed: {error}") from error


def _disk_error(error: sqlite3.Error, doing: str) -> DiskError:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF  # the code, without its detail
    kind = DiskFull if code == sqlite3.SQLITE_FULL else IndexDamaged if code in _DAMAGE else DiskFailed
    return kind(f"{doing} failed: {error}")
