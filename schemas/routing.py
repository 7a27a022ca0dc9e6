"""How a router chooses one of several caches, its knowledge of them, and the costs that it compares."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

_LowerMedium = Literal["CPU", "STORAGE"]
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_TIER_COST: dict[_LowerMedium, float] = {"CPU": 0.1, "STORAGE": 0.4}


class RouteConfig(BaseModel):
    """The cost of a route is `pending + weight * uncached` tokens of a cache; the least cost wins.

    A token of a tier below the pool, which the cache loads before the request computes, counts as a share of an
    uncached one.

    For an invalid value, pydantic's `ValidationError` says which and why.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    weight: float = Field(
        default=3.0,
        ge=0,
        le=1e6,
        allow_inf_nan=False,
        description="of the request's own uncached tokens, against those that wait at the cache",
    )
    promise_ttl_s: float = Field(
        default=20.0,
        gt=0,
        le=86_400,
        allow_inf_nan=False,
        description="the pages of a routed request count as cached for so long, or until they are",
    )
    num_random: int = Field(
        default=2,
        ge=0,
        le=1024,
        description="random caches to consider, with the two of the longest prefix, if there are more than 16",
    )
    tier_cost: dict[_LowerMedium, _Share] = Field(
        default=_TIER_COST,
        description="medium -> cost of a token that is loaded from there, as a share of computing it: 0 is as good as "
        "a token of the pool, 1 as bad as one of no tier. A medium that is left out has its default",
    )

    @field_validator("tier_cost")
    @classmethod
    def _all_media(cls, given: dict[_LowerMedium, float]) -> dict[_LowerMedium, float]:
        return _TIER_COST | given


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True)


class FleetCacheStats(_Facts):
    """A router's knowledge of a cache that it sends requests to."""

    cache: str = Field(description="the name")
    ranks: int = Field(default=1, description="caches NAME-tp0, NAME-tp1 and so on of an engine; 1: it is one cache")
    epoch: str = Field(description="of the cache's present life; of ranks, of the first, and so are the loads")
    pages: int = Field(description="that are stored, pending or promised, at the ends of strides; of ranks, the fewest")
    host_pages: int = Field(default=0, description="that are stored in the host tier; 0: there is none")
    pending_tokens: int = Field(
        description="that wait or are computed, as the cache reports them, and of this router's routes"
    )
    open_routes: int = Field(description="of this router, without a first token")
    routes: int = Field(description="of this router, since the cache came")
    refused: int = Field(description="of these routes, those where acquire failed for want of slots or of an answer")
    missed_tokens: int = Field(description="that the index had as stored and the cache no longer had, over all leases")
    waiting_tokens: int = Field(description="of requests that wait for free slots, as the cache reported")
    leased_tokens: int = Field(description="that open leases cover")
    unpublished_tokens: int = Field(description="of prompts in open leases that are not computed yet")
    private_slots: int = Field(description="that open leases may write")
    loading_tokens: int = Field(
        default=0, description="of unpublished_tokens, those that are being loaded from a host tier: they wait less"
    )
    batches: int = Field(description="of events, that were applied")
    snapshots: int = Field(description="that were taken")
    silent_s: float = Field(description="since the last batch or snapshot; an idle cache sends none")


class FleetStats(_Facts):
    """A router's knowledge of its fleet."""

    page_size: int | None = Field(description="of the caches; None: there is none yet")
    stride_tokens: int | None = Field(description="of the caches' events")
    caches: tuple[FleetCacheStats, ...] = Field(description="that get requests, by name")
    left_out: dict[str, str] = Field(description="caches that get no requests, each with the cause")
    routes: int = Field(description="of this router, to all caches, also those that are gone")
    open_routes: int = Field(description="without a first token")
    indexed_pages: int = Field(description="of all caches; a page of several caches is counted for each")
    index_bytes: int = Field(description="of memory, for these pages")


class RouteCandidate(_Facts):
    """A cache that a request may go to. All lengths are in tokens."""

    cache: str = Field(description="the name")
    prefix_len: int = Field(
        description="stored, as the router knows; whole strides, or whole pages of caches with a window or states"
    )
    promised_len: int = Field(description="stored, or to be stored for earlier requests")
    host_len: int = Field(
        default=0, description="stored in the pool or in the host tier, at least prefix_len; 0: there is no host tier"
    )
    loading_tokens: int = Field(default=0, description="that the cache would load from the host tier")
    uncached_tokens: int = Field(description="the rest of the prompt, to be computed")
    pending_tokens: int = Field(description="that wait at the cache, or are computed")
    cost: float = Field(
        description='pending_tokens + RouteConfig.weight * (uncached_tokens + tier_cost["CPU"] * loading_tokens)'
    )


class RouteExplanation(_Facts):
    """The caches that a router would compare for a prompt now."""

    num_tokens: int
    stride_tokens: int = Field(description="of the caches' events")
    weight: float = Field(description="RouteConfig.weight")
    tier_cost: dict[_LowerMedium, float] = Field(default=_TIER_COST, description="RouteConfig.tier_cost")
    candidates: tuple[RouteCandidate, ...] = Field(description="the least cost first; of equal costs a random one wins")


class ReplicaRouterStats(_Facts):
    """The requests that a router has sent to the replicas of a deployment, in the process of the router."""

    deployment: str = Field(description="the name, after that of its application")
    routes: int = Field(description="requests that went to a replica by their prefix and the load of the caches")
    prompt_tokens: int = Field(description="of these requests")
    prefix_tokens: int = Field(description="of these, that were stored at the chosen cache, as the router knew")
    moved: int = Field(description="of these requests, those that another replica took, at a cache that cost more")
    least_loaded: dict[str, int] = Field(description="requests that went to the least loaded replica, by cause")
    replicas: dict[str, int] = Field(description="the number of replicas of each cache")
    unpaired: int = Field(description="replicas without a cache that gets requests")
    fleet: FleetStats | None = Field(description="the router's knowledge of the caches; None: no cache was found yet")
