"""Messages between clients and a cache, its configuration, errors and statistics.

Names are loaded when they are first used.
"""

from typing import TYPE_CHECKING

from raydix.schemas.lazy_names import lazy_names

if TYPE_CHECKING:
    from raydix.schemas.config import (
        CacheConfig,
        DiskConfig,
        EvictionConfig,
        GhostConfig,
        HostConfig,
        LeaseConfig,
        MetricsConfig,
        PoolConfig,
    )
    from raydix.schemas.errors import (
        CacheBusy,
        CacheError,
        CacheUnavailable,
        ConfigMismatch,
        InvalidRequest,
        LeaseExpired,
        PoolExhausted,
        StaleEpoch,
        UnknownLease,
    )
    from raydix.schemas.events import (
        AllBlocksCleared,
        BlockHashes,
        BlockRemoved,
        BlockStored,
        CacheLoad,
        EventSnapshotRequest,
        KVEvent,
        KVEventBatch,
        KVEventSnapshot,
        NextEvents,
        PackedEvents,
        SlimEvent,
        SlimEventBatch,
        SlimEventSnapshot,
    )
    from raydix.schemas.explain import ExplainRequest, ExplainResponse
    from raydix.schemas.fingerprint import (
        BindModelRequest,
        BindModelResponse,
        ModelFingerprint,
        SetWeightsRequest,
        WeightsRequest,
        WeightsResponse,
    )
    from raydix.schemas.layer_shape import LayerShape
    from raydix.schemas.leases import LeaseGrant, LeaseOwner
    from raydix.schemas.message import Message
    from raydix.schemas.namespace import frame_namespace, namespaces_of, unframe_namespace
    from raydix.schemas.pool_handle import PoolHandle
    from raydix.schemas.recording import RecordingStatus, StartRecording
    from raydix.schemas.report import (
        AgeCount,
        CacheReport,
        HistoryPoint,
        NamespaceStats,
        PrefixUse,
        TreePart,
    )
    from raydix.schemas.requests import (
        AbortRequest,
        AcquireRequest,
        AdoptRequest,
        Batch,
        CheckInvariantsRequest,
        CloseSession,
        EvictRequest,
        ExtendRequest,
        GrantRequest,
        InsertRequest,
        LockRequest,
        MatchRequest,
        OpenSession,
        PrefetchRequest,
        ReadKV,
        ReleaseRequest,
        ReleaseWindowRequest,
        ResetRequest,
        RetireRequest,
        RevokeRequest,
        SessionRef,
        StatsRequest,
        TakeBackRequest,
        WaitRequest,
        WithdrawRequest,
        WriteKV,
    )
    from raydix.schemas.responses import (
        Ack,
        AdoptResponse,
        BatchResponse,
        EvictResponse,
        ExtendResponse,
        InsertResponse,
        KVResponse,
        LeaseResponse,
        MatchResponse,
        PrefetchResponse,
        RetireResponse,
        RevokeResponse,
        SessionResponse,
        WaitingResponse,
        WindowResponse,
    )
    from raydix.schemas.routing import (
        FleetCacheStats,
        FleetStats,
        ReplicaRouterStats,
        RouteCandidate,
        RouteConfig,
        RouteExplanation,
    )
    from raydix.schemas.segment import Segment
    from raydix.schemas.stats import (
        CacheStats,
        DiskPoolStats,
        DiskTierStats,
        EvictionTaskStats,
        GhostStats,
        Histogram,
        PoolStats,
        TenantStats,
        TierStats,
        TooLarge,
    )
    from raydix.schemas.tenants import TenantConfig
    from raydix.schemas.tokens import TokenIds
    from raydix.schemas.tree import TreeBranch, TreeRequest, TreeResponse

__all__ = [
    "AbortRequest",
    "Ack",
    "AcquireRequest",
    "AdoptRequest",
    "AdoptResponse",
    "AgeCount",
    "AllBlocksCleared",
    "Batch",
    "BatchResponse",
    "BindModelRequest",
    "BindModelResponse",
    "BlockHashes",
    "BlockRemoved",
    "BlockStored",
    "CacheBusy",
    "CacheConfig",
    "CacheError",
    "CacheLoad",
    "CacheReport",
    "CacheStats",
    "CacheUnavailable",
    "CheckInvariantsRequest",
    "CloseSession",
    "ConfigMismatch",
    "DiskConfig",
    "DiskPoolStats",
    "DiskTierStats",
    "EventSnapshotRequest",
    "EvictRequest",
    "EvictResponse",
    "EvictionConfig",
    "EvictionTaskStats",
    "ExplainRequest",
    "ExplainResponse",
    "ExtendRequest",
    "ExtendResponse",
    "FleetCacheStats",
    "FleetStats",
    "GhostConfig",
    "GhostStats",
    "GrantRequest",
    "Histogram",
    "HistoryPoint",
    "HostConfig",
    "InsertRequest",
    "InsertResponse",
    "InvalidRequest",
    "KVEvent",
    "KVEventBatch",
    "KVEventSnapshot",
    "KVResponse",
    "LayerShape",
    "LeaseConfig",
    "LeaseExpired",
    "LeaseGrant",
    "LeaseOwner",
    "LeaseResponse",
    "LockRequest",
    "MatchRequest",
    "MatchResponse",
    "Message",
    "MetricsConfig",
    "ModelFingerprint",
    "NamespaceStats",
    "NextEvents",
    "OpenSession",
    "PackedEvents",
    "PoolConfig",
    "PoolExhausted",
    "PoolHandle",
    "PoolStats",
    "PrefetchRequest",
    "PrefetchResponse",
    "PrefixUse",
    "ReadKV",
    "RecordingStatus",
    "ReleaseRequest",
    "ReleaseWindowRequest",
    "ReplicaRouterStats",
    "ResetRequest",
    "RetireRequest",
    "RetireResponse",
    "RevokeRequest",
    "RevokeResponse",
    "RouteCandidate",
    "RouteConfig",
    "RouteExplanation",
    "Segment",
    "SessionRef",
    "SessionResponse",
    "SetWeightsRequest",
    "SlimEvent",
    "SlimEventBatch",
    "SlimEventSnapshot",
    "StaleEpoch",
    "StartRecording",
    "StatsRequest",
    "TakeBackRequest",
    "TenantConfig",
    "TenantStats",
    "TierStats",
    "TokenIds",
    "TooLarge",
    "TreeBranch",
    "TreePart",
    "TreeRequest",
    "TreeResponse",
    "UnknownLease",
    "WaitRequest",
    "WaitingResponse",
    "WeightsRequest",
    "WeightsResponse",
    "WindowResponse",
    "WithdrawRequest",
    "WriteKV",
    "frame_namespace",
    "namespaces_of",
    "unframe_namespace",
]

__getattr__ = lazy_names(
    __name__,
    {
        "config": ("CacheConfig DiskConfig EvictionConfig GhostConfig HostConfig LeaseConfig MetricsConfig PoolConfig"),
        "errors": (
            "CacheBusy CacheError CacheUnavailable ConfigMismatch InvalidRequest LeaseExpired PoolExhausted "
            "StaleEpoch UnknownLease"
        ),
        "events": (
            "AllBlocksCleared BlockHashes BlockRemoved BlockStored CacheLoad EventSnapshotRequest KVEvent KVEventBatch "
            "KVEventSnapshot NextEvents PackedEvents SlimEvent SlimEventBatch SlimEventSnapshot"
        ),
        "explain": "ExplainRequest ExplainResponse",
        "fingerprint": (
            "BindModelRequest BindModelResponse ModelFingerprint SetWeightsRequest WeightsRequest WeightsResponse"
        ),
        "layer_shape": "LayerShape",
        "leases": "LeaseGrant LeaseOwner",
        "message": "Message",
        "namespace": "frame_namespace namespaces_of unframe_namespace",
        "pool_handle": "PoolHandle",
        "recording": "RecordingStatus StartRecording",
        "report": "AgeCount CacheReport HistoryPoint NamespaceStats PrefixUse TreePart",
        "requests": (
            "AbortRequest AcquireRequest AdoptRequest Batch CheckInvariantsRequest CloseSession EvictRequest "
            "ExtendRequest GrantRequest InsertRequest LockRequest MatchRequest OpenSession PrefetchRequest ReadKV "
            "ReleaseRequest ReleaseWindowRequest ResetRequest RetireRequest RevokeRequest SessionRef StatsRequest "
            "TakeBackRequest WaitRequest WithdrawRequest WriteKV"
        ),
        "responses": (
            "Ack AdoptResponse BatchResponse EvictResponse ExtendResponse InsertResponse KVResponse LeaseResponse "
            "MatchResponse PrefetchResponse RetireResponse RevokeResponse SessionResponse WaitingResponse "
            "WindowResponse"
        ),
        "routing": "FleetCacheStats FleetStats ReplicaRouterStats RouteCandidate RouteConfig RouteExplanation",
        "segment": "Segment",
        "stats": "CacheStats DiskPoolStats DiskTierStats EvictionTaskStats GhostStats Histogram PoolStats TenantStats "
        "TierStats TooLarge",
        "tenants": "TenantConfig",
        "tokens": "TokenIds",
        "tree": "TreeBranch TreeRequest TreeResponse",
    },
)


def __dir__() -> list[str]:
    return __all__
