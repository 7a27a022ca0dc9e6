"""`RowRuns`: joins the rows of a space's index to runs, each of which becomes a node of the tree."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from raydix.cache_core.tiers.index_row import IndexRow
from raydix.cache_core.tree.hashing import hash_page, namespace_seed
from raydix.cache_core.tree.tree_node import TreeNode


@dataclass(slots=True, eq=False)
class RowRun:
    """Pages one below the other.

    Attributes:
        above: the run that it hangs below; None: it is the root, which has no pages.
        pages: rows of its pages.
        halves: rows of their window KV: of all pages, or of none.
        state: row of the state at its end; None without one.
        node: of the tree that ends with it; None: it is not in the tree.
    """

    above: RowRun | None
    pages: list[IndexRow] = field(default_factory=list)
    halves: list[IndexRow] = field(default_factory=list)
    state: IndexRow | None = None
    node: TreeNode | None = None

    @property
    def rows(self) -> list[IndexRow]:
        """All its rows."""
        return [*self.pages, *self.halves, *(() if self.state is None else (self.state,))]


class RowRuns:
    """Joins rows, which come in the order of their depth, to runs. It touches no cache, so a thread may do it.

    A page goes on with the run above it if it is the only page there, has window KV if that run has, and the run has no
    state at its end. A page is left out if the page above is not there, or its digest is not that of its tokens, which
    would lead a request to the KV of another prompt.

    Args:
        page_size: tokens of a page.
        namespace: of the space.
        arity: ids of a tuple in its keys; 0: plain ids.

    Attributes:
        left_out: rows that belong to no run.
    """

    def __init__(self, page_size: int, namespace: str | None, arity: int = 0) -> None:
        self.left_out: list[IndexRow] = []
        self._page_ids = page_size * max(1, arity)
        self._arity = arity
        self._seed = namespace_seed(namespace)
        self._depth = 0  # depth of the tips
        self._tips: dict[bytes, RowRun] = {b"": RowRun(None)}  # digest of a page -> run that ends with it
        self._level: list[IndexRow] = []  # rows of the depth below the tips

    def add(self, rows: Iterable[IndexRow]) -> list[RowRun]:
        """Take rows; return the runs that are whole, each behind the run above it."""
        done: list[RowRun] = []
        for row in rows:
            while row.depth > self._depth + 1:
                done += self._end_level()
                if not self._tips:
                    self._depth = row.depth - 1
            self._level.append(row)
        return done

    def end(self) -> list[RowRun]:
        """Take the end of the rows; return the other runs."""
        done = self._end_level()
        done += [tip for tip in self._tips.values() if tip.pages]
        self._tips = {}
        return done

    def _end_level(self) -> list[RowRun]:
        """Append the pages of a depth to the runs that end above them, and return the runs that do not go on."""
        halves, states = self._by_digest("swa"), self._by_digest("state")
        pages_below: dict[bytes, list[IndexRow]] = {}  # digest of the page above -> pages
        for row in self._by_digest("full").values():
            pages_below.setdefault(row.parent or b"", []).append(row)
        done: list[RowRun] = []
        tips: dict[bytes, RowRun] = {}
        for digest, tip in self._tips.items():
            pages = pages_below.get(digest, [])
            goes_on = len(pages) == 1 and bool(tip.pages) and tip.state is None
            if goes_on and bool(tip.halves) != (pages[0].digest in halves):
                goes_on = False
            if not goes_on and tip.pages:
                done.append(tip)
            for row in pages:
                run = tip if goes_on else RowRun(tip)
                run.pages.append(row)
                if (half := halves.pop(row.digest, None)) is not None:
                    run.halves.append(half)
                run.state = states.pop(row.digest, None)
                tips[row.digest] = run
        self.left_out += (*halves.values(), *states.values())
        self._tips, self._level = tips, []
        self._depth += 1
        return done

    def _by_digest(self, kind: str) -> dict[bytes, IndexRow]:
        """Return the rows of a kind in the present depth that are right; of two rows for one page, the first."""
        found: dict[bytes, IndexRow] = {}
        for row in self._level:
            if row.kind == kind and not (self._is_right(row) and found.setdefault(row.digest, row) is row):
                self.left_out.append(row)
        return found

    def _is_right(self, row: IndexRow) -> bool:
        """Return whether the page above is there, and the digest of the page is that of its tokens behind that page.

        Window KV and a state have no tokens of their own: they must find their page.
        """
        if row.kind != "full":
            return True
        if row.tokens is None or (row.parent or b"") not in self._tips:
            return False
        width, rest = divmod(len(row.tokens), self._page_ids)
        if rest or width not in (4, 8):
            return False
        return hash_page(row.tokens, width, self._arity, row.parent or self._seed) == row.digest
