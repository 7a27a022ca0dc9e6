"""Findings about a cache and its node, each one line with its remedy. `raydix doctor` prints all of them.

A cache finds the faults of its node when it starts: they are `CacheStats.findings`. A command on the node adds
differences between itself and the cache.
"""

from __future__ import annotations

from typing import NamedTuple

from raydix.actors.observe.node_facts import HiddenPackage, NodeFacts
from raydix.schemas import DiskTierStats, TierStats
from raydix.schemas.errors import ConfigMismatch
from raydix.schemas.protocol import check_handshake, handshake, read_handshake
from raydix.schemas.shown import byte_size, counted, short_time

OUT_OF_MEMORY = "killed by Ray's memory monitor"  # a cause of restarts
_LEAST_LEFT = 0.1  # the part of the node's memory that a full pool must leave
_LEAST_SHM = 2**30  # bytes; containers have 64 MiB by default
_LEAST_SHM_FREE = 0.05
_TIER_STATES = ("ready", "reserving", "closed")  # other states of a host tier are faults
_FAILING_S = 600.0  # for which a read that failed is a finding
BIND = 'call bind_model in each worker, or set CacheConfig(fingerprint="...")'  # what has a disk keep KV
_UNCOMMITTED_S = 10.0  # the most time that a disk takes to commit a retirement
_REMEDY = (
    "give the pool or the host tier fewer slots, run fewer engines and other processes on this node, or raise the "
    "limit of Ray's monitor (RAY_memory_usage_threshold)"
)


class Restarts(NamedTuple):
    """How often Ray restarted a cache, and why.

    Attributes:
        times: restarts.
        last_cause: one line; empty: there was no restart.
        causes: pairs of a cause without its details and its number of restarts, the most frequent first.
    """

    times: int = 0
    last_cause: str = ""
    causes: tuple[tuple[str, int], ...] = ()


NEVER_RESTARTED = Restarts()


def facts_when_full(facts: NodeFacts, pool_bytes: int, host_bytes: int) -> tuple[NodeFacts, str]:
    """Return the facts about a node once a cache has filled its memory there, and that time in words.

    Args:
        facts: from before the cache reserved memory.
        pool_bytes, host_bytes: of the node's memory, for the pool and for the host tier; 0: there is none.
    """
    taken = {"the pool": pool_bytes, "the host tier": host_bytes}
    names = [name for name, num_bytes in taken.items() if num_bytes] or ["the pool"]
    when = f"when {' and '.join(names)} {'is' if len(names) == 1 else 'are'} full"
    return facts._replace(memory_left=facts.memory_left - sum(taken.values())), when


def findings(
    facts: NodeFacts, restarts: Restarts = NEVER_RESTARTED, when: str = "when the pool is full"
) -> tuple[str, ...]:
    """Return the faults of a node, one line each, the gravest first; `niceness_finding` is apart.

    Args:
        facts: about the node; of its memory, the bytes that are left at the time that `when` names.
        restarts: of the cache on it.
        when: in words.
    """
    found = (
        memory_finding(facts.memory_left, facts.memory_total, when),
        restarts_finding(restarts),
        package_finding(facts.hidden),
        shm_finding(facts.shm_total, facts.shm_free),
    )
    return tuple(text for text in found if text)


def memory_finding(left: int, total: int, when: str = "when the pool is full") -> str:
    """Return a warning if too little memory is left; else an empty text.

    Args:
        when: the time at which it is left, in words.
    """
    if left >= _LEAST_LEFT * total:
        return ""
    return (
        f"{byte_size(max(0, left))} of the {byte_size(total)} of memory are left {when}: processes outside Ray can "
        f"fill them, and Ray's memory monitor then kills the cache, the largest process; {_REMEDY}"
    )


def package_finding(hidden: HiddenPackage | None) -> str:
    """Return a warning if another raydix than the installed one is imported; else an empty text."""
    if hidden is None:
        return ""
    return (
        f"raydix is imported from {hidden.imported_from}, which hides the installed {hidden.version} at "
        f"{hidden.installed_at}: take that folder off PYTHONPATH, start programs elsewhere, or install the clone "
        "(pip install -e)"
    )


def shm_finding(total: int, free: int) -> str:
    """Return a warning if `/dev/shm` is small or full; else an empty text."""
    remedy = "give the container --shm-size=8g; in Kubernetes mount an emptyDir with `medium: Memory` at /dev/shm"
    if total < _LEAST_SHM:
        return (
            f"/dev/shm has {byte_size(total)}: Ray's object store goes to disk, and engines with several ranks may "
            f"not start (the cache's pool does not need it); {remedy}"
        )
    if free < _LEAST_SHM_FREE * total:
        return (
            f"/dev/shm has {byte_size(free)} of {byte_size(total)} free: Ray's objects and engines' messages find no "
            "room; remove files there that ended programs have left, or give it more"
        )
    return ""


def niceness_finding(niceness: int) -> str:
    """Return a warning if Ray's processes give way to other programs of the node; else an empty text.

    It is for `raydix start` and `doctor` alone: Ray's default is enough for it.
    """
    if niceness <= 0:
        return ""
    return (
        f"Ray adds {niceness} to the niceness of its processes: where other programs, such as engines, keep the cores "
        "busy, caches start and answer late; set RAY_worker_niceness=0 in the environment of ray start"
    )


def sight_finding(sees_cache: bool) -> str:
    """Return a warning if a process on the cache's node does not see the cache's process; else an empty text."""
    if sees_cache:
        return ""
    return (
        "the cache runs on this node, in another PID namespace (container) or as another user: pools are copied, not "
        "mapped, and the end of a client is seen late; use one container or --pid=host, in Kubernetes "
        "shareProcessNamespace within a pod or hostPID, and one user"
    )


def version_finding(row: object) -> str:
    """Return a warning if a cache and this process have different versions of raydix; else an empty text.

    Args:
        row: the cache's handshake.
    """
    try:
        check_handshake(row, "cache")
    except ConfigMismatch as error:
        return str(error)
    theirs, ours = read_handshake(row), handshake()
    if theirs is None or theirs == ours:
        return ""
    return (
        f"the cache runs raydix {theirs[2]}, and this command {ours[2]}: they work together, as they speak the same "
        "protocol; to have one version, install it on the cache's node and start the cache again"
    )


def tier_finding(tier: TierStats | None) -> str:
    """Return a warning if a cache has no memory for its host tier; else an empty text."""
    if tier is None or tier.state in _TIER_STATES:
        return ""
    return f"the cache serves without its host tier, as {tier.state}; then start the cache again"


def disk_finding(disk: DiskTierStats | None) -> str:
    """Return a warning if a cache has no use of its disk, or has not committed a retirement; else an empty text."""
    if disk is None:
        return ""
    if disk.uncommitted_s >= _UNCOMMITTED_S:
        return (
            f"the disk has not committed a retirement for {short_time(disk.uncommitted_s)}, so a restart may bring "
            "retired KV back: the cache's log has the cause; mend the disk, or clear it before the cache starts again"
        )
    if disk.state.startswith("locked"):
        return f"the cache serves without its disk, which is {disk.state}: end that process, or change disk.path"
    if disk.state.startswith("failed: "):
        cause = disk.state.removeprefix("failed: ")
        return f"the cache serves without its disk: {cause}; then start the cache again"
    if disk.read_error_s is not None and disk.read_error_s < _FAILING_S:
        return (
            f"reads of the disk fail, the last one {short_time(disk.read_error_s)} ago, so that requests compute: "
            f"{disk.last_error}; look for it in the kernel's log, replace the disk, or clear it before the next start"
        )
    if disk.state == "stalled":
        return "the disk does not answer, and nothing is loaded from it for 30 s: look for it in the kernel's log"
    return unbound_finding(disk.unbound_namespaces)


def unbound_finding(num_namespaces: int) -> str:
    """Return a warning if KV was published in namespaces to which no model is bound; else an empty text."""
    if not num_namespaces:
        return ""
    namespaces = counted(num_namespaces, "namespace")
    return f"the disk keeps nothing of {namespaces} in use, as no model is bound: {BIND}"


def restarts_finding(restarts: Restarts) -> str:
    """Return how often a cache was restarted for each cause, with the remedy; empty if it never was."""
    if not restarts.times:
        return ""
    counts = "; ".join(f"{cause}, {counted(count, 'time')}" for cause, count in restarts.causes)
    remedy = f": {_REMEDY}" if OUT_OF_MEMORY in dict(restarts.causes) else ""
    return f"Ray restarted the cache, empty in memory: {counts}{remedy}"
