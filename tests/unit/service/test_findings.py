"""Findings about a node and its caches: each names its remedy, and the facts are read from a real node."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.processes.fresh_process import run_fresh

from raydix.actors.cli.doctor import _sight
from raydix.actors.cli.output import first_finding
from raydix.actors.observe.node_facts import HiddenPackage, NodeFacts, hidden_package, node_facts, worker_niceness
from raydix.actors.observe.node_memory import table_bytes
from raydix.actors.service.findings import (
    OUT_OF_MEMORY,
    Restarts,
    disk_finding,
    facts_when_full,
    findings,
    memory_finding,
    niceness_finding,
    package_finding,
    shm_finding,
    sight_finding,
    tier_finding,
    version_finding,
)
from raydix.actors.transport.process_liveness import own_liveness_path
from raydix.schemas import CacheConfig, DiskPoolStats, DiskTierStats, HostConfig, PoolStats, TierStats
from raydix.schemas.protocol import PROTOCOL, handshake
from raydix.schemas.version import package_version

ROOT = Path(__file__).parents[3]
GIB = 2**30
HEALTHY = NodeFacts(
    memory_left=50 * GIB, memory_total=100 * GIB, shm_total=8 * GIB, shm_free=8 * GIB, niceness=0, hidden=None
)
TIER = TierStats(
    state="ready",
    policy="2q",
    slots=PoolStats(
        num_slots=1, free_slots=1, private_slots=0, tree_slots=0, quarantined_slots=0, evictable_slots=0,
        protected_slots=0,
    ),
)  # fmt: skip
DISK = DiskTierStats(state="ready", admit="all", slots=DiskPoolStats(**TIER.slots.model_dump()))
HIDDEN = HiddenPackage("/clone/raydix", "/venv/site-packages/raydix", "0.2.0")


def test_a_healthy_node_has_no_finding() -> None:
    assert findings(HEALTHY) == ()


def test_the_gravest_finding_comes_first() -> None:
    ill = HEALTHY._replace(memory_left=GIB, shm_total=64 * 2**20, niceness=15, hidden=HIDDEN)
    killed = Restarts(13, "", ((OUT_OF_MEMORY, 12), ("cause unknown", 1)))

    found = findings(ill, killed)

    assert [text.split()[0] for text in found] == ["1", "Ray", "raydix", "/dev/shm"]  # niceness is apart
    assert first_finding(found) == f"{found[0]} (and 3 more: raydix doctor)"
    assert first_finding(found[:1]) == found[0]
    assert first_finding(()) == ""


@pytest.mark.parametrize(
    ("find", "fault", "remedy"),
    [
        (
            lambda: memory_finding(2**29, 6 * GIB),
            "512 MiB of the 6 GiB of memory are left when the pool is full",
            "RAY_memory_usage_threshold",
        ),
        (lambda: memory_finding(GIB, 16 * GIB, "now"), "1 GiB of the 16 GiB of memory are left now", "fewer slots"),
        (
            lambda: tier_finding(TIER.model_copy(update={"state": "the host pool needs 8 GiB: lower host.num_slots"})),
            "serves without its host tier, as the host pool needs 8 GiB",
            "lower host.num_slots; then start the cache again",
        ),
        (
            lambda: disk_finding(DISK.model_copy(update={"state": "locked by pid 7"})),
            "serves without its disk, which is locked by pid 7",
            "end that process",
        ),
        (
            lambda: disk_finding(DISK.model_copy(update={"state": "failed: /x is no folder: name one in disk.path"})),
            "serves without its disk: /x is no folder",
            "then start the cache again",
        ),
        (
            lambda: disk_finding(DISK.model_copy(update={"state": "stalled"})),
            "the disk does not answer",
            "kernel's log",
        ),
        (
            lambda: disk_finding(DISK.model_copy(update={"uncommitted_s": 12.0})),
            "has not committed a retirement for 12 s",
            "mend the disk",
        ),
        (lambda: package_finding(HIDDEN), "which hides the installed 0.2.0 at /venv", "PYTHONPATH"),
        (lambda: shm_finding(64 * 2**20, 64 * 2**20), "/dev/shm has 64 MiB", "--shm-size"),
        (lambda: shm_finding(0, 0), "/dev/shm has 0 bytes", "emptyDir"),
        (lambda: shm_finding(8 * GIB, 2**20), "/dev/shm has 1 MiB of 8 GiB free", "remove files"),
        (lambda: niceness_finding(15), "adds 15 to the niceness", "RAY_worker_niceness=0"),
        (lambda: sight_finding(False), "another PID namespace", "--pid=host"),
        (lambda: version_finding(("raydix", PROTOCOL - 1, "0.0.9")), "raydix 0.0.9", "restart the cache"),
        (
            lambda: version_finding(("raydix", PROTOCOL, "0.0.9")),
            "runs raydix 0.0.9, and this",
            "start the cache again",
        ),
        (lambda: version_finding("older"), "protocol 0 (raydix unknown)", "restart the cache"),
    ],
)
def test_a_finding_is_one_line_with_the_fault_and_the_remedy(find: Callable[[], str], fault: str, remedy: str) -> None:
    text = find()

    assert fault in text and remedy in text
    assert "\n" not in text


def test_nothing_is_found_without_a_fault() -> None:
    assert memory_finding(10, 100) == package_finding(None) == shm_finding(8 * GIB, GIB) == ""
    assert [tier_finding(TIER.model_copy(update={"state": state})) for state in ("ready", "reserving")] == ["", ""]
    assert tier_finding(None) == disk_finding(None) == ""
    healthy = ({"state": state} for state in ("ready", "opening", "reading", "closed"))
    assert [disk_finding(DISK.model_copy(update=fields)) for fields in (*healthy, {"uncommitted_s": 2.0})] == [""] * 5
    assert niceness_finding(0) == sight_finding(True) == version_finding(list(handshake())) == ""


@pytest.mark.parametrize(
    ("pool", "host", "expected"),
    [
        (30, 0, ""),
        (30, 5, ""),
        (30, 16, "4 GiB of the 100 GiB of memory are left when the pool and the host tier are full"),
        (0, 46, "4 GiB of the 100 GiB of memory are left when the host tier is full"),
        (46, 0, "4 GiB of the 100 GiB of memory are left when the pool is full"),
        (30, 30, "0 bytes of the 100 GiB of memory are left when the pool and the host tier are full"),
    ],
)
def test_a_host_tier_counts_against_the_memory_of_the_node(pool: int, host: int, expected: str) -> None:
    full, when = facts_when_full(HEALTHY, pool * GIB, host * GIB)

    found = findings(full, when=when)

    assert len(found) == bool(expected)
    assert all(text.startswith(expected) and "the host tier fewer slots" in text for text in found)


@pytest.mark.parametrize(
    ("fields", "slots", "windows", "states"),
    [
        ({}, 0, 0, 0),
        ({"host": HostConfig(num_slots=640)}, 640, 0, 0),
        ({"host": HostConfig(num_slots=640), "sliding_window_size": 16}, 640, 640, 0),
        ({"host": HostConfig(num_slots=640, num_state_slots=7), "kind": "mamba"}, 640, 0, 7),
    ],
)
def test_the_tables_of_a_host_tier_count_as_those_of_a_pool(
    fields: dict[str, object], slots: int, windows: int, states: int
) -> None:
    pool: dict[str, object] = {"num_slots": 64, "format": "opaque", "slot_bytes": 4}
    pool |= {"num_state_slots": 3, "state_bytes": 4} if "mamba" in fields.values() else {}
    pool |= {"swa_slot_bytes": 4} if "sliding_window_size" in fields else {}
    config = CacheConfig.model_validate({"pool": pool, "page_size": 16, **fields})

    below = table_bytes(config) - table_bytes(config.model_copy(update={"host": None}))

    assert below == slots // 16 * (12 + 8 * bool(windows)) + windows // 16 * 12 + states * 41


def test_the_facts_are_those_of_this_node() -> None:
    facts = node_facts(3)

    assert 0 < facts.memory_left <= facts.memory_total
    assert facts.shm_free <= facts.shm_total == shutil.disk_usage("/dev/shm").total
    assert (facts.niceness, facts.hidden) == (3, None)


# ---------------------------------------------------------------- the package in use


def test_a_package_on_the_path_that_hides_the_installed_one_is_found(tmp_path: Path) -> None:
    """The installed one is this clone; a copy of its top stands before it on the path."""
    (tmp_path / "raydix").mkdir()
    shutil.copy(ROOT / ".raydix/__init__.py", tmp_path / "raydix")
    for folder in ("actors", "cache_core", "schemas"):
        (tmp_path / "raydix" / folder).symlink_to(ROOT / folder)
    program = "from raydix.actors.observe.node_facts import hidden_package; print(list(hidden_package() or ()))"

    hidden = run_fresh(program, PYTHONPATH=str(tmp_path)).stdout

    number = package_version().partition("+")[0]
    assert hidden.strip() == str([str(tmp_path / "raydix"), str(ROOT), number])
    assert hidden_package() is None


@pytest.mark.parametrize("hides", [True, False])
def test_an_installed_wheel_is_compared_with_the_imported_package(tmp_path: Path, hides: bool) -> None:
    """A folder of packages with raydix 7.0, and its record: whether it is imported depends on the path alone."""
    site = tmp_path / "site"
    (site / "raydix-7.0.dist-info").mkdir(parents=True)
    (site / "raydix-7.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: raydix\nVersion: 7.0\n")
    for folder in (site / "raydix", tmp_path / "clone" / "raydix"):
        folder.mkdir(parents=True)
        shutil.copy(ROOT / ".raydix/__init__.py", folder)
        for name in ("actors", "cache_core", "schemas"):
            (folder / name).symlink_to(ROOT / name)
    program = (
        "import json\nfrom raydix.actors.observe.node_facts import hidden_package\nprint(json.dumps(hidden_package()))"
    )

    done = run_fresh(program, PYTHONPATH=os.pathsep.join(map(str, (tmp_path / "clone", site)[not hides :])))

    assert done.stdout, done.stderr
    wanted = [str(tmp_path / "clone/raydix"), str(site / "raydix"), "7.0"] if hides else None
    assert json.loads(done.stdout) == wanted


# ---------------------------------------------------------------- other processes


@pytest.mark.parametrize("added", [0, 3])
def test_the_niceness_is_that_which_was_added_to_a_worker(added: int) -> None:
    """A child that is called as Ray calls its workers stands for one; workers of other tests may have more."""
    before = worker_niceness()
    sleep = f"import os, sys, time; os.nice({added}); print('ready', flush=True); time.sleep(60)"
    worker = subprocess.Popen(
        ["ray::IDLE", "-c", sleep], executable=sys.executable, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    try:
        assert worker.stdout is not None and worker.stdout.readline() == b"ready\n"
        assert max(added, min(before, added)) <= worker_niceness()
    finally:
        worker.kill()
        worker.wait()
        assert worker.stdout is not None
        worker.stdout.close()


def test_a_process_in_another_pid_namespace_is_not_seen() -> None:
    unshare = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs root, for a PID namespace: run it as root")
    program = (
        "from types import SimpleNamespace\n"
        "from raydix.actors.cli.doctor import _sight\n"
        f"print(_sight(SimpleNamespace(node_id='n', liveness_path={own_liveness_path()!r}), 'n'))"
    )

    there = subprocess.run([*unshare, sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert "another PID namespace" in there.stdout
    assert _sight(SimpleNamespace(node_id="n", liveness_path=own_liveness_path()), "n") == ""
