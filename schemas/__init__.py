"""Messages between clients and a cache, its configuration, errors and statistics.

Names are loaded when they are first used.
"""

from typing import TYPE_CHECKING

from raydix.schemas.lazy_names import lazy_names

if TYPE_CHECKING:  # the one list of public names: `lazy_names` reads it
    from raydix.schemas.config import CacheConfig as CacheConfig
    from raydix.schemas.config import DiskConfig as DiskConfig
    from raydix.schemas.config import EvictionConfig as EvictionConfig
    from raydix.schemas.config import GhostConfig as GhostConfig
    from raydix.schemas.config import HostConfig as HostConfig
    from raydix.schemas.config import LeaseConfig as LeaseConfig
    from raydix.schemas.config import MetricsConfig as MetricsConfig
    from raydix.schemas.config import PoolConfig as PoolConfig
    from raydix.schemas.errors import CacheBusy as CacheBusy
    from raydix.schemas.errors import CacheError as CacheError
    from raydix.schemas.errors import CacheUnavailable as CacheUnavailable
    from raydix.schemas.errors import ConfigMismatch as ConfigMismatch
    from raydix.schemas.errors import InvalidRequest as InvalidRequest
    from raydix.schemas.errors import LeaseExpired as LeaseExpired
    from raydix.schemas.errors import PoolExhausted as PoolExhausted
    from raydix.schemas.errors import StaleEpoch as StaleEpoch
    from raydix.schemas.errors import UnknownLease as UnknownLease
    from raydix.schemas.events import AllBlocksCleared as AllBlocksCleared
    from raydix.schemas.events import BlockHashes as BlockHashes
    from raydix.schemas.events import BlockRemoved as BlockRemoved
    from raydix.schemas.events import BlockStored as BlockStored
    from raydix.schemas.events import CacheLoad as CacheLoad
    from raydix.schemas.events import EventSnapshotRequest as EventSnapshotRequest
    from raydix.schemas.events import KVEvent as KVEvent
    from raydix.schemas.events import KVEventBatch as KVEventBatch
    from raydix.schemas.events import KVEventSnapshot as KVEventSnapshot
    from raydix.schemas.events import NextEvents as NextEvents
    from raydix.schemas.events import PackedEvents as PackedEvents
    from raydix.schemas.events import SlimEvent as SlimEvent
    from raydix.schemas.events import SlimEventBatch as SlimEventBatch
    from raydix.schemas.events import SlimEventSnapshot as SlimEventSnapshot
    from raydix.schemas.explain import ExplainRequest as ExplainRequest
    from raydix.schemas.explain import ExplainResponse as ExplainResponse
    from raydix.schemas.fingerprint import BindModelRequest as BindModelRequest
    from raydix.schemas.fingerprint import BindModelResponse as BindModelResponse
    from raydix.schemas.fingerprint import ModelFingerprint as ModelFingerprint
    from raydix.schemas.fingerprint import SetWeightsRequest as SetWeightsRequest
    from raydix.schemas.fingerprint import WeightsRequest as WeightsRequest
    from raydix.schemas.fingerprint import WeightsResponse as WeightsResponse
    from raydix.schemas.layer_shape import LayerShape as LayerShape
    from raydix.schemas.leases import LeaseGrant as LeaseGrant
    from raydix.schemas.leases import LeaseOwner as LeaseOwner
    from raydix.schemas.message import Message as Message
    from raydix.schemas.namespace import frame_namespace as frame_namespace
    from raydix.schemas.namespace import namespaces_of as namespaces_of
    from raydix.schemas.namespace import unframe_namespace as unframe_namespace
    from raydix.schemas.pool_handle import PoolHandle as PoolHandle
    from raydix.schemas.recording import RecordingStatus as RecordingStatus
    from raydix.schemas.recording import StartRecording as StartRecording
    from raydix.schemas.report import AgeCount as AgeCount
    from raydix.schemas.report import CacheReport as CacheReport
    from raydix.schemas.report import HistoryPoint as HistoryPoint
    from raydix.schemas.report import NamespaceStats as NamespaceStats
    from raydix.schemas.report import PrefixUse as PrefixUse
    from raydix.schemas.report import TreePart as TreePart
    from raydix.schemas.requests import AbortRequest as AbortRequest
    from raydix.schemas.requests import AcquireRequest as AcquireRequest
    from raydix.schemas.requests import AdoptRequest as AdoptRequest
    from raydix.schemas.requests import Batch as Batch
    from raydix.schemas.requests import CheckInvariantsRequest as CheckInvariantsRequest
    from raydix.schemas.requests import CloseSession as CloseSession
    from raydix.schemas.requests import EvictRequest as EvictRequest
    from raydix.schemas.requests import ExtendRequest as ExtendRequest
    from raydix.schemas.requests import GrantRequest as GrantRequest
    from raydix.schemas.requests import InsertRequest as InsertRequest
    from raydix.schemas.requests import LockRequest as LockRequest
    from raydix.schemas.requests import MatchRequest as MatchRequest
    from raydix.schemas.requests import OpenSession as OpenSession
    from raydix.schemas.requests import PrefetchRequest as PrefetchRequest
    from raydix.schemas.requests import ReadKV as ReadKV
    from raydix.schemas.requests import ReleaseRequest as ReleaseRequest
    from raydix.schemas.requests import ReleaseWindowRequest as ReleaseWindowRequest
    from raydix.schemas.requests import ResetRequest as ResetRequest
    from raydix.schemas.requests import RetireRequest as RetireRequest
    from raydix.schemas.requests import RevokeRequest as RevokeRequest
    from raydix.schemas.requests import SessionRef as SessionRef
    from raydix.schemas.requests import StatsRequest as StatsRequest
    from raydix.schemas.requests import TakeBackRequest as TakeBackRequest
    from raydix.schemas.requests import WaitRequest as WaitRequest
    from raydix.schemas.requests import WithdrawRequest as WithdrawRequest
    from raydix.schemas.requests import WriteKV as WriteKV
    from raydix.schemas.responses import Ack as Ack
    from raydix.schemas.responses import AdoptResponse as AdoptResponse
    from raydix.schemas.responses import BatchResponse as BatchResponse
    from raydix.schemas.responses import EvictResponse as EvictResponse
    from raydix.schemas.responses import ExtendResponse as ExtendResponse
    from raydix.schemas.responses import InsertResponse as InsertResponse
    from raydix.schemas.responses import KVResponse as KVResponse
    from raydix.schemas.responses import LeaseResponse as LeaseResponse
    from raydix.schemas.responses import MatchResponse as MatchResponse
    from raydix.schemas.responses import PrefetchResponse as PrefetchResponse
    from raydix.schemas.responses import RetireResponse as RetireResponse
    from raydix.schemas.responses import RevokeResponse as RevokeResponse
    from raydix.schemas.responses import SessionResponse as SessionResponse
    from raydix.schemas.responses import WaitingResponse as WaitingResponse
    from raydix.schemas.responses import WindowResponse as WindowResponse
    from raydix.schemas.routing import FleetCacheStats as FleetCacheStats
    from raydix.schemas.routing import FleetStats as FleetStats
    from raydix.schemas.routing import ReplicaRouterStats as ReplicaRouterStats
    from raydix.schemas.routing import RouteCandidate as RouteCandidate
    from raydix.schemas.routing import RouteConfig as RouteConfig
    from raydix.schemas.routing import RouteExplanation as RouteExplanation
    from raydix.schemas.segment import Segment as Segment
    from raydix.schemas.stats import CacheStats as CacheStats
    from raydix.schemas.stats import DiskPoolStats as DiskPoolStats
    from raydix.schemas.stats import DiskTierStats as DiskTierStats
    from raydix.schemas.stats import EvictionTaskStats as EvictionTaskStats
    from raydix.schemas.stats import GhostStats as GhostStats
    from raydix.schemas.stats import Histogram as Histogram
    from raydix.schemas.stats import LowerTierStats as LowerTierStats
    from raydix.schemas.stats import PoolStats as PoolStats
    from raydix.schemas.stats import TenantStats as TenantStats
    from raydix.schemas.stats import TierStats as TierStats
    from raydix.schemas.stats import TooLarge as TooLarge
    from raydix.schemas.tenants import TenantConfig as TenantConfig
    from raydix.schemas.tokens import TokenIds as TokenIds
    from raydix.schemas.tree import TreeBranch as TreeBranch
    from raydix.schemas.tree import TreeRequest as TreeRequest
    from raydix.schemas.tree import TreeResponse as TreeResponse

    __all__: list[str]
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__)
