"""Ray's records of a cache's actor: how often and why it was restarted, and whether it can run again.

Ray's public state API needs the dashboard, which may not be installed, so its private tables are read.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, cast

import ray

from raydix.actors.service.findings import NEVER_RESTARTED, OUT_OF_MEMORY, Restarts
from raydix.actors.transport.ray_calls import actor_id_of
from raydix.schemas.shown import shown

if TYPE_CHECKING:
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)

_RECORDED_WITHIN_S = 2.0  # Ray may record how a process ended a little after it restarts the actor
_POLL_S = 0.1
_MAX_LEN = 300  # characters of a cause
_UNKNOWN = "cause unknown: Ray has no record of it"
_KILLED = "killed or crashed: by a signal, by the kernel for want of memory (see dmesg), or by a fault of its own"
LOST_GROUP = "cannot run again: its placement group was removed. End it (raydix stop NAME), and start another"
_EXITS = {  # Ray's name of the kind of exit -> cause; Ray's detail follows
    "NODE_OUT_OF_MEMORY": OUT_OF_MEMORY,
    "INTENDED_SYSTEM_EXIT": "ended by Ray",
    "INTENDED_USER_EXIT": "ended itself",
    "USER_ERROR": "failed",
}


def restarts_of(actor: ActorHandle[Any]) -> Restarts:
    """Return how often Ray restarted an actor, and why."""
    return _read_restarts(actor_id_of(actor).hex(), 0.0)


def restarts_of_this_actor() -> Restarts:
    """Return how often Ray restarted the actor in which this runs, and why."""
    actor_id = ray.get_runtime_context().get_actor_id()
    assert actor_id is not None, "only an actor is restarted"
    return _read_restarts(actor_id, _RECORDED_WITHIN_S)


def _read_restarts(actor_id: str, wait_s: float) -> Restarts:
    """Return how often Ray restarted an actor, and why.

    Where Ray's tables cannot be read, that is logged, and the actor counts as never restarted.

    Args:
        wait_s: to wait for the cause of the last restart, if Ray has not recorded it yet.
    """
    try:
        return _restarts(actor_id, wait_s)
    except Exception:  # another version of Ray may keep other tables; the cache works without them
        logger.warning("Ray does not say how often this cache was restarted", exc_info=True)
        return NEVER_RESTARTED


def has_lost_its_group(actor: ActorHandle[Any]) -> bool:
    """Return whether an actor waits for a placement group that was removed. Ray lets it wait without end."""
    from ray.util import placement_group_table
    from ray.util.placement_group import PlacementGroup

    try:
        record = _record(actor_id_of(actor).hex())
        if not record.placement_group_id or record.state == record.ALIVE:
            return False
        group = PlacementGroup(ray.PlacementGroupID(record.placement_group_id))
        return bool(cast(Any, placement_group_table)(group).get("state") == "REMOVED")
    except Exception:  # another version of Ray may keep other tables
        logger.debug("Ray does not say where an actor is placed", exc_info=True)
        return False


def _tables() -> Any:
    from ray._private import state

    return state.state._connect_and_get_accessor()


def _record(actor_id: str) -> Any:
    from ray.core.generated import gcs_pb2

    return cast(Any, gcs_pb2).ActorTableData.FromString(_tables().get_actor_info(ray.ActorID.from_hex(actor_id)))


def _restarts(actor_id: str, wait_s: float) -> Restarts:
    actor = _record(actor_id)
    times: int = actor.num_restarts
    if not times:
        return NEVER_RESTARTED
    lives = list(getattr(actor, "previous_incarnations", ()))[-times:]  # an older Ray does not list them
    deadline = time.monotonic() + wait_s
    while (last := _cause_of(lives[-1]) if lives else _UNKNOWN) == _UNKNOWN and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    causes = [*map(_cause_of, lives[:-1]), last] + [_UNKNOWN] * (times - max(1, len(lives)))
    kinds = Counter(kind_of(cause) for cause in causes)
    return Restarts(times, last, tuple(kinds.most_common()))


def _cause_of(life: Any) -> str:
    """Return why a process of the actor ended, in one line."""
    from ray.core.generated import common_pb2, gcs_pb2

    known = _tables().get_worker_info(ray.WorkerID(life.worker_id))
    worker = cast(Any, gcs_pb2).WorkerTableData.FromString(known) if known is not None else None
    if worker is not None and not worker.is_alive:
        return cause_of_exit(cast(Any, common_pb2).WorkerExitType.Name(worker.exit_type), worker.exit_detail)
    node = next((row for row in cast(Any, ray.nodes)() if row["NodeID"] == life.node_id.hex()), None)
    if node is not None and not node["Alive"]:
        return cause_of_node_death(node)
    return _UNKNOWN


def kind_of(cause: str) -> str:
    """Return a cause without its details."""
    return cause.partition(":")[0]


def cause_of_exit(exit_type: str, detail: str) -> str:
    """Return why a worker process of Ray's ended, in one line, by Ray's name of its kind of exit and Ray's detail."""
    if exit_type == "SYSTEM_ERROR":  # its detail lists what it may have been
        return _KILLED
    return _line(_EXITS.get(exit_type, exit_type.lower()), detail)


def cause_of_node_death(node: dict[str, Any]) -> str:
    """Return why a process on a dead node ended, in one line, by the entry of that node in `ray.nodes()`."""
    return _line("its node died", node.get("DeathReasonMessage", ""))


def _line(what: str, detail: str) -> str:
    text = shown(" ".join(f"{what}: {detail}".split())).removesuffix(":")
    return text if len(text) <= _MAX_LEN else text[: _MAX_LEN - 3] + "..."
