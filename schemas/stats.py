"""The statistics of a cache."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from raydix.schemas.leases import LeaseOwner
from raydix.schemas.message import PydanticMessage


class EvictionTaskStats(PydanticMessage):
    """The health of the background eviction task."""

    enabled: bool = Field(description="False if high_watermark is 1.0: then each request evicts its own shortfall")
    started: bool = Field(description="False until the first session opens")
    alive: bool = Field(description="whether it runs; also False if it is off or not started yet")
    rounds: int = Field(description="times it was woken and ran to the low mark")
    slices: int = Field(description="times it held the event loop")
    tokens_evicted: int
    window_slots_evicted: int = Field(default=0, description="for the watermarks of the window slots")
    states_evicted: int = Field(default=0, description="for the watermarks of the states")
    retired_tokens: int = Field(default=0, description="of retired namespaces, freed")
    failures: int = Field(description="rounds that raised; each was logged, and the task continued")
    last_error: str | None
    longest_slice_ms: float = Field(
        description="the most of the processor's time that it took while it held the event loop"
    )


class PoolStats(PydanticMessage):
    """The slots of one pool: window slots, in tokens, or recurrent states."""

    num_slots: int
    free_slots: int
    private_slots: int
    tree_slots: int
    quarantined_slots: int
    evictable_slots: int
    protected_slots: int
    evicted: int = Field(default=0, description="slots evicted for any cause, with their pages or alone")


class LowerTierStats(PydanticMessage):
    """The fields of every tier below the pool: its slots, and the moves between it and the tiers above.

    Counts are since the start of this life of the cache, also those of bytes. The slots keep the rule of the pool's:
    `free + private + tree + quarantined == num_slots`.
    """

    state: str = Field(description='"ready"; "closed"; or why nothing is written and loaded')
    slots: PoolStats
    swa: PoolStats | None = Field(default=None, description="its window slots, if there are any")
    states: PoolStats | None = Field(default=None, description="its recurrent states, if there are any")
    tokens_written: int = Field(default=0, description="tokens that came from the tiers above")
    tokens_loaded: int = Field(
        default=0, description="of tokens_reused and resumed_tokens_reused, those that were loaded from here"
    )
    tokens_loaded_unused: int = Field(
        default=0, description="tokens that were loaded by a prefetch, or for a lease that ended meanwhile"
    )
    tokens_dropped: int = Field(
        default=0,
        description="tokens evicted from the tier above before they were written; 0 if pages are written at their "
        "second use",
    )
    tokens_failed: int = Field(
        default=0,
        description="tokens that were to be written or loaded and were not: a call failed, was late, or was cancelled",
    )
    writes_refused: int = Field(default=0, description="moves for which the tier had no room")
    states_not_published: int = Field(default=0, description="loaded states for which the pool had no second slot")
    writes: dict[str, int] = Field(
        default_factory=dict,
        description="batches of writes by their end: whole or committed, cancelled, late, failed, closed",
    )
    moves_in_flight: int = Field(default=0, description="loads and writes that have not ended")
    loaded_bytes: int = Field(default=0, description="bytes that were loaded")
    load_s: float = Field(default=0.0, description="seconds of the copies of loads")
    written_bytes: int = Field(default=0, description="bytes that were written, with the padding of records")
    queued_bytes: int = Field(
        default=0, description="bytes that are still to be copied: of loads, in host memory also of writes"
    )


class TierStats(LowerTierStats):
    """The tier in host memory: its slots, and the copies between it and the pool.

    While its memory is being reserved, its state is "reserving".
    """

    pinned: bool = Field(default=False, description="whether its memory is registered with CUDA")
    policy: str = Field(description="which unlocked leaf is evicted first")
    loads: dict[str, int] = Field(
        default_factory=dict, description="loads by their end: whole, cancelled, late, failed, closed"
    )
    loading_requests: int = Field(default=0, description="requests that wait for a load, or for the end of writes")
    write_s: float = Field(default=0.0, description="seconds of the copies of writes")
    longest_chunk_ms: float = Field(default=0.0, description="the longest time of one call of a copy")


class DiskPoolStats(PoolStats):
    """The records of one kind on a disk, in slots: of full KV or of windows in tokens, or states.

    `free + private + tree + quarantined + unread + dormant + leaving == num_slots`.
    """

    unread_slots: int = Field(
        default=0, description="not in use yet, as the index of the disk is being read after a start"
    )
    dormant_slots: int = Field(
        default=0, description="that keep KV of models that are not bound, or that is not in the tree yet"
    )
    leaving_slots: int = Field(default=0, description="of evicted KV, until the deletion of their rows is committed")


class DiskTierStats(LowerTierStats):
    """A tier on a local disk: its slots, the prefixes that are written to it, and the loads from it.

    Its state is "ready"; "opening" and "reading" after a start; "stalled": it does not answer, and nothing is loaded
    for 30 s; "locked by ...": another process has the folder; "failed: ..."; "closed".
    """

    admit: str = Field(description='"second_use": a page is written at its second use; "all": before it is dropped')
    slots: DiskPoolStats
    swa: DiskPoolStats | None = None
    states: DiskPoolStats | None = None
    num_spaces: int = Field(default=0, description="namespaces with the models that computed their KV")
    unbound_namespaces: int = Field(
        default=0,
        description="of the last 64 namespaces in which KV was published, those without a bound model: nothing is kept "
        "of them",
    )
    due_prefixes: int = Field(default=0, description="prefixes that wait to be written")
    pages_used: int = Field(
        default=0, description="uses of pages by requests, in whatever tier the pages lay; 0 with admit=all"
    )
    pages_refused: int = Field(default=0, description="of pages_used, the first uses: admit refused to write the page")
    prefixes_dropped: dict[str, int] = Field(
        default_factory=dict,
        description="due prefixes that were not written, by cause. queue_full: too many wait; left_memory: they were "
        "evicted before their turn; no_room: the disk had no free records",
    )
    last_error: str | None = Field(default=None, description="of a write or a read")
    written_bytes_day: int = Field(
        default=0, description="of written_bytes, those of the last 24 hours, to a quarter of an hour"
    )
    loads_in_flight: int = Field(default=0, description="of moves_in_flight, the loads")
    loads_late: int = Field(default=0, description="loads that took longer than their time limit")
    stalls: int = Field(
        default=0, description="how often the disk was stalled: a read did not return in time, or all reads failed"
    )
    damaged_records: int = Field(
        default=0, description="records with a checksum that did not match: they were dropped, and nothing of them used"
    )
    failed_reads: int = Field(
        default=0, description="reads of records that failed; a record that cannot be read twice is dropped"
    )
    read_error_s: float | None = Field(default=None, description="seconds since the last of failed_reads")
    bad_rows: int = Field(default=0, description="rows of the index that were damaged: they were dropped")
    uncommitted_s: float = Field(
        default=0.0,
        description="seconds since the disk began to commit a retirement that it has not confirmed yet; 0: there is "
        "none. A restart before that may bring the pages back for sessions that bind equal fingerprints",
    )


class TenantStats(PydanticMessage):
    """The slots that one tenant holds, and its limits."""

    name: str | None = Field(description="None: all namespaces without a tenant")
    held_slots: int = Field(description="in the tree, by its leases, and withheld of those that vanished")
    evictable_slots: int = Field(description="of held_slots, those in the tree that no lease has locked")
    floor_slots: int
    cap_slots: int | None
    tokens_evicted: int = Field(description="for any caller; retired tokens are not counted")


class TooLarge(PydanticMessage):
    """Requests that were refused because no pool of this size, or no share of this tenant, can ever hold them."""

    requests: int = 0
    tokens: int = Field(default=0, description="of their prompts")
    largest_slots: int = Field(
        default=0, description="slots, in whole pages, that the largest of them needs; 0 if there is none"
    )


class GhostStats(PydanticMessage):
    """The hit rates that other sizes of the pool would have had with the requests seen so far.

    The rate of the present size was counted. The others are estimates from reuse distances, for a cache that evicts
    whole pages, least recently used first, between the same watermarks. If windows or states have pools of their own,
    the rates are of full KV only. All rates are of a pool without tiers below: tokens that were loaded are no hits.
    """

    tokens_requested: int = Field(description="prompt tokens of granted requests")
    sample_rate: float = Field(description="share of the pages that was followed")
    num_slots: tuple[int, ...] = Field(description="sizes of the pool, rising; the present one is among them")
    hit_rates: tuple[float, ...] = Field(description="share of prompt tokens found, for each size")

    def hit_rate_at(self, num_slots: float) -> float:
        """Return the hit rate of a pool of `num_slots`, interpolated; outside the sizes, the nearest size's rate."""
        return float(np.interp(num_slots, self.num_slots, self.hit_rates))


class Histogram(PydanticMessage):
    """How often values of each size were seen since the cache began."""

    bounds: tuple[float, ...] = Field(description="the largest value of each bucket, rising")
    counts: tuple[int, ...] = Field(description="values in each bucket; then those above the last bound")
    sum: float = Field(description="of all values")
    count: int = Field(description="of all values")

    @property
    def mean(self) -> float:
        """The mean value, 0 before the first."""
        return self.sum / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """Return the value that this share of all values, 0 to 1, does not exceed, estimated within its bucket.

        At most the last bound; 0 before the first value.
        """
        wanted, below, lower = share * self.count, 0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if count and below + count >= wanted:
                return lower + (bound - lower) * (wanted - below) / count
            below, lower = below + count, bound
        return lower if self.count else 0.0


class CacheStats(PydanticMessage):
    """A snapshot. `free + private + tree + quarantined == num_slots`, at all times; counts are in slots or tokens."""

    epoch: str
    core: Literal["compiled", "interpreted"] = Field(description="how the inner loops of the core run")
    uptime_s: float = Field(description="seconds since this life of the cache began")
    restarts: int = Field(description="times that Ray restarted the cache, empty; 0 for a local cache")
    last_restart_cause: str = Field(description="why Ray did, the last time, in one line; empty: it never did")
    restart_causes: dict[str, int] = Field(description="how often Ray did for each cause, without its details")
    findings: tuple[str, ...] = Field(description="faults of the cache's node, one line with its remedy each")
    niceness: int = Field(default=0, description="that Ray has added to the cache's process")
    num_slots: int
    free_slots: int
    private_slots: int = Field(description="held by leases and not published")
    tree_slots: int
    quarantined_slots: int = Field(description="withheld because a vanished owner may still be writing them")
    evictable_slots: int = Field(description="of tree_slots, those that no lease has locked")
    protected_slots: int = Field(description="of tree_slots, those a lease has locked")
    open_leases: int = Field(description="leases that are open")
    oldest_lease_s: float = Field(
        default=0.0, description="seconds since the oldest open lease was granted; 0: none is"
    )
    owners: tuple[LeaseOwner, ...] = Field(
        description="those that hold most slots by their leases, the largest first; at most 32"
    )
    open_sessions: int = Field(description="clients with an open session")
    silent_sessions: int = Field(
        default=0,
        description="clients that sent nothing for more than half of session_ttl_s, until they come back or no longer "
        "withhold slots",
    )
    bindings: int = Field(default=0, description="`lora_id`s, the base model included, with a model bound to them")
    model_fingerprint: str = Field(
        default="", description="`str()` of the base model's ModelFingerprint; empty: none is bound"
    )
    weights: str | None = Field(default=None, description="the label of the base model's weights; None: none yet")
    waiters: int = Field(description="acquires and extends that wait for free slots")
    oldest_waiter_s: float = Field(
        default=0.0, description="seconds that the longest of the waiting requests has waited so far; 0: none waits"
    )
    stale_readers: int = Field(
        default=0,
        description="readers of events, such as routers, that lack events of more than ten seconds ago; a reader that "
        "has not asked for ten minutes has stopped, and is not counted",
    )
    expired_sessions: int = Field(description="clients that sent nothing for too long")
    dead_sessions: int = Field(description="clients that were not closed before their process or owner ended")
    acquires: int = Field(description="requests granted by acquire or lock, a lease each; not the resumed ones")
    hits: int = Field(description="of acquires, those that found a prefix")
    tokens_requested: int = Field(description="prompt tokens of acquires")
    tokens_reused: int = Field(description="of tokens_requested, the tokens with cached KV")
    tokens_refused: int = Field(
        default=0, description="prompt tokens of acquires refused because slots were missing, each time"
    )
    resumed_acquires: int = Field(default=0, description="leases granted to requests that had been preempted")
    resumed_tokens: int = Field(
        default=0, description="tokens of resumed requests: prompts, and tokens generated before"
    )
    resumed_tokens_reused: int = Field(default=0, description="of resumed_tokens, the tokens with cached KV")
    boundary_states_refused: int = Field(
        default=0, description="acquires with boundary_state that found no second state slot, and were granted without"
    )
    tokens_inserted: int = Field(description="tokens published")
    tokens_duplicate: int = Field(description="tokens computed twice: their slots were freed on insert")
    tokens_evicted: int = Field(description="tokens evicted by the task, by requests short of slots and by evict()")
    exhausted: int = Field(description="acquires, locks and extends refused because slots were missing")
    refusals: dict[str, int] = Field(
        default_factory=dict,
        description="refused requests by cause; only causes that have occurred. If slots were missing: never_fits, "
        "tenant_cap, no_wait (timeout_s=0, or a cache in which none waits), waited_too_long, deadlocked. Others: "
        "queue_full, draining, invalid_request, unknown_lease, lease_expired, model_mismatch, internal_error. A "
        "request that its client refuses to send is not counted",
    )
    deadlocks: int = Field(
        default=0, description="extends refused because all leases of the pool, or of a share, wait in extend"
    )
    grants_expired: int = Field(
        default=0, description="granted leases that ended because they were not adopted in time"
    )
    too_large: TooLarge = Field(default=TooLarge(), description="of the refused acquires, those that can never fit")
    probes: int = Field(description="calls of match")
    waited: int = Field(description="requests that had to wait for slots")
    wait_time: Histogram = Field(description="seconds that each of these requests waited, however that ended")
    acquire_latency: Histogram = Field(
        description="seconds from the arrival of an `acquire` at the cache to its answer, granted or refused, waits "
        "included"
    )
    lock_latency: Histogram = Field(
        description="seconds from the arrival of a `lock`, an engine's look-up, at the cache to its answer, granted or "
        "refused"
    )
    insert_latency: Histogram = Field(
        description="seconds from the arrival of an `insert` at the cache to its answer, published or refused"
    )
    batch_size: Histogram = Field(description="messages of each batch")
    batches: int = Field(description="batches of messages, as clients send them")
    requests: int = Field(description="messages of all batches, one for each call of a verb")
    loop_lag_ms: float = Field(description="the longest that the event loop was late, in the last 5 to 10 s or now")
    eviction_task: EvictionTaskStats
    swa: PoolStats | None = Field(default=None, description="the sliding-window pool, if there is one")
    state: PoolStats | None = Field(default=None, description="the recurrent states, if there are any")
    host: TierStats | None = Field(default=None, description="the tier in host memory, if there is one")
    disk: DiskTierStats | None = Field(default=None, description="the tier on a local disk, if there is one")
    tenants: tuple[TenantStats, ...] = Field(default=(), description="if there are any, as configured; then the rest")
    ghost: GhostStats | None = Field(default=None, description="other sizes of the pool, if `CacheConfig.ghost` is set")

    @property
    def hit_rate(self) -> float:
        """Reused tokens as a share of the prompt tokens of granted requests. 0 before the first one.

        Refused requests are not in it, nor are the further attempts of a preempted request.
        """
        return self.tokens_reused / self.tokens_requested if self.tokens_requested else 0.0

    @property
    def tiers_below(self) -> str:
        """The tiers below the pool, in words; empty: there are none."""
        tiers = {"the host tier": self.host, "the disk": self.disk}
        return " and ".join(name for name, tier in tiers.items() if tier is not None)
