"""`EarlierRun`: the result of the demo that has filled the same disk before, for the run after the restart."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from raydix.actors.demo.workload import Workload

CACHE = "demo"  # the name of the cache, and so of its folder on the disk
_FILE = "demo.json"


@dataclass(frozen=True)
class EarlierRun:
    """The end of a run with a disk.

    Attributes:
        last_hit_rate: of its last turns.
        answers: a digest of all answers.
    """

    last_hit_rate: float
    answers: str

    @classmethod
    def of(cls, load: Workload) -> EarlierRun | None:
        """Return the last run of the same load on the same disk; None: there is none, or the disk was cleared."""
        if load.disk is None:
            return None
        folder = Path(load.disk.path)
        if not any(folder.glob(f"{CACHE}/*/index.db")):
            return None
        try:
            found = json.loads((folder / _FILE).read_text())
            return cls(**found["run"]) if found["load"] == _described(load) else None
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def keep(self, load: Workload) -> None:
        """Write the run to the disk's folder, for `of`."""
        assert load.disk is not None
        text = json.dumps({"load": _described(load), "run": asdict(self)})
        with tempfile.NamedTemporaryFile("w", dir=load.disk.path, prefix=_FILE, delete=False) as file:
            file.write(text)
        os.replace(file.name, Path(load.disk.path, _FILE))


def _described(load: Workload) -> dict[str, object]:
    return asdict(replace(load, disk=None))
