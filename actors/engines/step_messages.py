"""Messages between the scheduler's and the worker's side of an engine: one `StepPlan` and one `StepReport` a step.

They name requests by numbers of the scheduler's side: an engine may use the id of an ended request again, and a message
about the one must not be taken for a message about the other. `request_id` is for the engine's own sets of ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from raydix.schemas import LeaseGrant


@dataclass(slots=True)
class LoadPlan:
    """Load cached pages into blocks: the pages of tokens [start, start + block_size * len(block_ids)).

    Attributes:
        request: number of the request.
        request_id: the engine's.
        stamps: 16 bytes for each page, that identify the tokens up to its end; None: not checked.
    """

    request: int
    request_id: str
    start: int
    block_ids: list[int]
    stamps: list[bytes] | None = None


@dataclass(slots=True)
class SavePlan:
    """Save blocks that this step completes: the blocks of tokens [start, start + block_size * len(block_ids)).

    Attributes:
        request: number of the request.
        tokens: ids [first, end of the last block), or none; the cache or the worker knows the ids before them.
        stamps: as for a load.
    """

    request: int
    start: int
    block_ids: list[int]
    first: int
    tokens: Sequence[int]
    stamps: list[bytes] | None = None


@dataclass(slots=True)
class StepPlan:
    """The tasks of each rank's worker in a step.

    Attributes:
        grants: by request that the worker hears of for the first time: the grant of each rank.
        ended: requests that have ended.
        held: the ids of ended requests for which the engine holds blocks until their saves are reported, by number.
        preempted: requests that have lost their blocks.
        weights: the number of the latest order about weights, and the label to bind; None: bind nothing.
    """

    grants: dict[int, list[LeaseGrant]] = field(default_factory=dict)
    loads: list[LoadPlan] = field(default_factory=list)
    saves: list[SavePlan] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    held: dict[int, str] = field(default_factory=dict)
    preempted: set[int] = field(default_factory=set)
    weights: tuple[int, str | None] = (0, None)


@dataclass(slots=True)
class StepReport:
    """The results of the workers since their last reports.

    Attributes:
        saved: by rank and request: tokens that the request's lease has published.
        refused: requests with a save that got no slots or was cancelled; it may be planned again.
        failed: requests with a load that has failed, or a lease that has ended: no more is saved of them.
        bound: by rank: the number of the order about weights that the worker has carried out.
    """

    saved: dict[int, dict[int, int]] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    bound: dict[int, int] = field(default_factory=dict)

    def merge(self, other: StepReport) -> StepReport:
        """Return one report of the ranks of both."""
        saved = {rank: dict(of_rank) for rank, of_rank in self.saved.items()}
        for rank, of_rank in other.saved.items():
            saved.setdefault(rank, {}).update(of_rank)
        refused, failed = self.refused | other.refused, self.failed | other.failed
        return StepReport(saved, refused, failed, self.bound | other.bound)
