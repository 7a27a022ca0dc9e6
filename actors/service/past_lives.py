"""`restarts_of_this_actor`: how often Ray restarted this actor, and why it did the last time."""

from __future__ import annotations

import logging
import time
from typing import Any, cast

import ray

from raydix.actors.service.cache_service import Restarts
from raydix.schemas.shown import shown

logger = logging.getLogger(__name__)

_RECORDED_WITHIN_S = 2.0  # Ray may record how a process ended a little after it restarts the actor
_POLL_S = 0.1
_MAX_LEN = 300  # characters of a cause
_UNKNOWN = "unknown: Ray has no record of it"
_KILLED = "killed or crashed: by a signal, by the kernel for want of memory (see dmesg), or by a fault of its own"
_EXITS = {  # by Ray's name of the kind of exit; its detail follows
    "NODE_OUT_OF_MEMORY": "out of memory",
    "INTENDED_SYSTEM_EXIT": "ended by Ray",
    "INTENDED_USER_EXIT": "ended itself",
    "USER_ERROR": "failed",
}


def restarts_of_this_actor() -> Restarts:
    """Return how often Ray restarted the actor in which this runs, and the cause of the last restart.

    Ray's public state API needs the dashboard, which may not be installed, so its private tables are read. Where they
    cannot be read, that is logged, and the actor counts as never restarted.
    """
    try:
        return _restarts()
    except Exception:  # another version of Ray may keep other tables; the cache works without them
        logger.warning("Ray does not say how often this cache was restarted", exc_info=True)
        return Restarts()


def _restarts() -> Restarts:
    from ray._private import state
    from ray.core.generated import common_pb2, gcs_pb2

    actor_id = ray.get_runtime_context().get_actor_id()
    assert actor_id is not None, "only an actor is restarted"
    pb: Any = gcs_pb2
    kinds: Any = common_pb2
    tables: Any = state.state._connect_and_get_accessor()
    actor = pb.ActorTableData.FromString(tables.get_actor_info(ray.ActorID.from_hex(actor_id)))
    if not actor.num_restarts:
        return Restarts()
    if not (lives := getattr(actor, "previous_incarnations", ())):  # an older Ray does not list them
        return Restarts(actor.num_restarts, _UNKNOWN)
    deadline = time.monotonic() + _RECORDED_WITHIN_S
    while True:
        known = tables.get_worker_info(ray.WorkerID(lives[-1].worker_id))
        worker = pb.WorkerTableData.FromString(known) if known is not None else None
        node = next((each for each in cast(Any, ray.nodes)() if each["NodeID"] == lives[-1].node_id.hex()), None)
        if worker is not None and not worker.is_alive:
            exit_type = kinds.WorkerExitType.Name(worker.exit_type)
            return Restarts(actor.num_restarts, cause_of_exit(exit_type, worker.exit_detail))
        if node is not None and not node["Alive"]:
            return Restarts(actor.num_restarts, cause_of_node_death(node))
        if time.monotonic() > deadline:
            return Restarts(actor.num_restarts, _UNKNOWN)
        time.sleep(_POLL_S)


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
