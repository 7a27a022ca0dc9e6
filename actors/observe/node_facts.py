"""Facts about this node, on which a cache's health depends: memory, `/dev/shm`, niceness, the package in use."""

from __future__ import annotations

import json
import os
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlparse
from urllib.request import url2pathname

import raydix
from raydix.actors.observe.node_memory import available_memory, total_memory

_SHM = "/dev/shm"


class HiddenPackage(NamedTuple):
    """An installed raydix that this process has not imported, as another one comes first on its path."""

    imported_from: str
    installed_at: str
    version: str


class NodeFacts(NamedTuple):
    """Facts about a node, as one of its processes sees them.

    Attributes:
        memory_left: bytes that a process could still allocate, within the limit of its control group.
        memory_total: bytes of the node, or of its control group.
        shm_total: bytes of `/dev/shm`; 0: there is none.
        shm_free: bytes of it that are free.
        niceness: added by Ray to its worker processes.
        hidden: the installed package, if it is not the imported one.
    """

    memory_left: int
    memory_total: int
    shm_total: int
    shm_free: int
    niceness: int
    hidden: HiddenPackage | None


def node_facts(niceness: int) -> NodeFacts:
    """Return the facts about this node.

    Args:
        niceness: added by Ray to its worker processes: `own_niceness()` in one of them, `worker_niceness()` elsewhere.
    """
    shm_total, shm_free = _shm()
    return NodeFacts(available_memory(), total_memory(), shm_total, shm_free, niceness, hidden_package())


def own_niceness() -> int:
    """Return the niceness that Ray has added to this process, one of its workers."""
    return _added_niceness(os.getpid())


def worker_niceness() -> int:
    """Return the highest niceness that Ray has added to a worker that this process sees; 0 if it sees none."""
    highest = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes().startswith(b"ray::"):
                highest = max(highest, _added_niceness(int(folder.name)))
        except OSError:  # it has ended
            continue
    return highest


def _added_niceness(pid: int) -> int:
    """Return the niceness of a process above its parent's, which is the node's Ray daemon in the case of a worker."""
    parent, own = _parent_and_niceness(pid)
    return own - _parent_and_niceness(parent)[1] if parent else 0


def _parent_and_niceness(pid: int) -> tuple[int, int]:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # those after the command's name
    return int(fields[1]), int(fields[16])


def hidden_package() -> HiddenPackage | None:
    """Return the installed raydix if another one was imported; None also if none is installed."""
    imported = Path(raydix.__file__).resolve().parent
    installed = [(found.version, folder) for found in distributions(name="raydix") if (folder := _folder_of(found))]
    if not installed or any(imported.is_relative_to(folder) for _, folder in installed):
        return None
    version, folder = installed[0]
    return HiddenPackage(str(imported), str(folder), version)


def _folder_of(found: Distribution) -> Path | None:
    """Return the folder of an installed package; of an editable one, its clone; None if it has no files."""
    origin = json.loads(found.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        return Path(url2pathname(urlparse(origin["url"]).path)).resolve()
    folder = Path(str(found.locate_file("raydix"))).resolve()
    return folder if (folder / "__init__.py").is_file() else None


def _shm() -> tuple[int, int]:
    """Return the bytes of `/dev/shm`, and the free ones; zeros if there is none."""
    try:
        facts = os.statvfs(_SHM)
    except OSError:
        return 0, 0
    return facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
