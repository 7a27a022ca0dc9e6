"""The configuration of a cache. For an invalid value, pydantic's `ValidationError` says which and why."""

from __future__ import annotations

import hashlib
import json
import operator
import re
import warnings
from collections.abc import Iterable
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from raydix.schemas.layer_shape import LayerKind, Layers, in_runs
from raydix.schemas.segment import Segment, bytes_of, check_segments
from raydix.schemas.shown import brief
from raydix.schemas.tenants import TenantConfig, check_tenants

MAX_SLOTS = 2**31 - 2**16  # slot ids travel as 32-bit integers
_STRIDE_TOKENS = 512

# size of a record -> its table of segments
_TABLES = {"slot_bytes": "segments", "swa_slot_bytes": "swa_segments", "state_bytes": "state_segments"}

_OF_A_LAYER = (  # fields that a pool does not have
    *("num_layers", "num_kv_heads", "head_dim", "v_head_dim", "kv_shapes", "layer_kinds", "state_shapes"),
    *("index_head_dim", "index_layers"),
)

_DTYPES = {  # names that other programs give to torch's dtypes
    "fp64": "float64",
    "double": "float64",
    "fp32": "float32",
    "float": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "float8_e4m3": "float8_e4m3fn",
}


def _dtype_of_torch(dtype: Any) -> Any:
    """Raise ValueError, with the dtype that is meant, for another program's name of a dtype."""
    meant = _DTYPES.get(dtype.removeprefix("torch.").lower()) if isinstance(dtype, str) else None
    if meant is None and isinstance(dtype, str) and dtype.startswith("torch."):
        meant = dtype.removeprefix("torch.")
    if meant is not None:
        raise ValueError(f"must be torch's name of a dtype: {meant} is meant, perhaps")
    return dtype


def _checked_device(device: str) -> str:
    if re.fullmatch(r"auto|cpu|cuda(:(0|[1-9]\d?))?", device) is None:
        meant = ": cuda is meant, perhaps" if device.lower().startswith(("gpu", "nvidia")) or device.isdecimal() else ""
        raise ValueError(f"must be auto, cpu, cuda or cuda:N, with N from 0 to 99{meant}")
    return device


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class PoolConfig(_Config):
    """The KV pool: how many token slots, and the shape of one slot's K and V in every layer.

    With `format="opaque"`, the pool keeps records of bytes, one a page, in place of layers: the KV of an engine, as it
    lies there. Window halves and states are records of their own. Slots of a record cannot be addressed singly.
    """

    num_slots: int = Field(gt=0, le=MAX_SLOTS, description="token slots that callers can use")
    format: Literal["layers", "opaque"] = Field(
        default="layers", description="layers: K and V by slot; opaque: a record of bytes for each page"
    )
    layers: Layers = Field(
        default=(),
        description="the shape of each layer; an entry with a count stands for as many layers; empty: an index-only "
        "cache, without tensors",
    )
    num_swa_slots: int | None = Field(
        default=None,
        gt=0,
        le=MAX_SLOTS,
        description="window slots; None: num_slots. All uncached tokens of a request must fit in them together",
    )
    num_state_slots: int = Field(
        default=0,
        ge=0,
        le=MAX_SLOTS,
        description="recurrent states, those of leases included; with only one, no state is reused",
    )
    slot_bytes: int = Field(default=0, ge=0, description="opaque: bytes of a slot in the record of a page")
    swa_slot_bytes: int = Field(default=0, ge=0, description="opaque: bytes of a slot in the record of a window half")
    state_bytes: int = Field(default=0, ge=0, description="opaque: bytes of the record of a state")
    segments: tuple[Segment, ...] = Field(
        default=(), repr=False, description="opaque: the parts of a page's record; slot_bytes is the sum of their bytes"
    )
    swa_segments: tuple[Segment, ...] = Field(default=(), repr=False, description="opaque: the same, of a window half")
    state_segments: tuple[Segment, ...] = Field(default=(), repr=False, description="opaque: the same, of a state")
    dtype: Annotated[
        Literal["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "uint8"],
        BeforeValidator(_dtype_of_torch),
    ] = "bfloat16"
    device: Annotated[str, AfterValidator(_checked_device)] = "auto"

    @classmethod
    def uniform(
        cls,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        index_head_dim: int = 0,
        **fields: Any,
    ) -> Self:
        """Return the configuration of a pool with layers of full attention that are alike.

        Args:
            num_layers: the number of layers.
            num_kv_heads: KV heads of a layer.
            head_dim: elements of one head's K.
            v_head_dim: elements of one head's V; None: as K.
            index_head_dim: elements of a token's index key; 0: none.
            fields: the other fields of `PoolConfig`, such as `num_slots`.

        Raises:
            ValidationError: a value is wrong.
        """
        layer = {
            "count": num_layers,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "v_head_dim": v_head_dim,
            "index_head_dim": index_head_dim,
        }
        return cls.model_validate({"layers": [layer], **fields})

    @model_validator(mode="before")
    @classmethod
    def _records_are_as_long_as_their_segments(cls, given: Any) -> Any:
        """Take the bytes of a record from its segments, where they are given."""
        if not isinstance(given, dict):
            return given
        if of_layers := [name for name in _OF_A_LAYER if name in given]:
            raise ValueError(
                f"{of_layers[0]} is a layer's: use PoolConfig.uniform(...), or "
                "layers: [{count: 32, num_kv_heads: 8, head_dim: 128}]"
            )
        sums = {size: bytes_of(given.get(table)) for size, table in _TABLES.items() if not given.get(size)}
        return given | {size: num_bytes for size, num_bytes in sums.items() if num_bytes}

    @model_validator(mode="after")
    def _opaque_pools_have_records_and_no_layers(self) -> Self:
        if self.format != "opaque":
            if given := [name for pair in _TABLES.items() for name in pair if getattr(self, name)]:
                raise ValueError(f"{given[0]} is for format='opaque', which has records in place of layers")
            return self
        if self.layers:
            raise ValueError("layers is for pools with layers, and format='opaque' has records: leave it out")
        if not (self.slot_bytes or self.swa_slot_bytes or self.state_bytes):
            raise ValueError("format='opaque' needs slot_bytes, or segments")
        if bool(self.state_bytes) != bool(self.num_state_slots):
            raise ValueError("format='opaque' needs state_bytes (or state_segments) and num_state_slots, or neither")
        if self.num_swa_slots is not None and not self.swa_slot_bytes:
            raise ValueError("format='opaque' needs swa_slot_bytes, or swa_segments, with num_swa_slots")
        for size, table in _TABLES.items():
            check_segments(getattr(self, table), table, getattr(self, size), size)
        return self

    @model_validator(mode="after")
    def _states_have_slots(self) -> Self:
        if self.has_layers_of("state") and not self.num_state_slots:
            raise ValueError("a pool with state layers needs num_state_slots")
        return self

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, in_runs(value) if name == "layers" else value

    def has_layers_of(self, kind: LayerKind) -> bool:
        """Return whether the pool has a layer of this kind."""
        return any(layer.kind == kind for layer in self.layers)

    @property
    def has_tensors(self) -> bool:
        """Whether the pool keeps KV: an index-only cache has none."""
        return self.format == "opaque" or bool(self.layers)

    @property
    def may_lie_on_gpu(self) -> bool:
        """Whether the pool keeps KV that this configuration does not put on the CPU."""
        return self.device != "cpu" and self.has_tensors


def _check_multiple(name: str, number: int | None, unit_name: str, unit: int) -> None:
    """Raise ValueError unless a number is a multiple of a unit, or None."""
    if number is not None and number % unit:
        nearest = max(number - number % unit, unit)
        raise ValueError(f"{name} ({number}) must be a multiple of {unit_name} ({unit}): set it to {nearest}, say")


_TierWindows = Annotated[
    int | None, Field(gt=0, le=MAX_SLOTS, description="window slots; None: in proportion to the pool's")
]
_TierStates = Annotated[
    int | None, Field(gt=0, le=MAX_SLOTS, description="recurrent states; None: in proportion to the pool's")
]
_WriteRate = Annotated[
    float | None, Field(gt=0, allow_inf_nan=False, description="MiB that are written a second, at most; None: no limit")
]
_Marked = TypeVar("_Marked", "EvictionConfig", "HostConfig")


def _with_low_below_high(config: _Marked) -> _Marked:
    """Return a configuration as it is; raise ValueError if its low mark is not below its high mark, if that is used."""
    low, high = config.low_watermark, config.high_watermark
    if high < 1.0 and low >= high:
        raise ValueError(f"low_watermark ({low}) must be below high_watermark ({high})")
    return config


Policy = Literal["lru", "lfu", "fifo", "mru", "filo", "slru", "priority", "2q"]


class EvictionConfig(_Config):
    """When the background task frees slots: woken above the high mark, it stops at the low one."""

    policy: Policy = Field(
        default="lru",
        description="which unlocked leaf is evicted first; kinds other than radix and mamba need lru; "
        "2q takes no tenants",
    )
    high_watermark: float = Field(default=0.9, gt=0, le=1, description="fraction of slots in use; 1.0: task off")
    low_watermark: float = Field(default=0.8, ge=0, lt=1, description="fraction of slots in use")
    slice_ms: float = Field(
        default=1.0,
        gt=0,
        allow_inf_nan=False,
        description="longest time that the task holds the event loop",
    )

    _low_is_below_high = model_validator(mode="after")(_with_low_below_high)


class HostConfig(_Config):
    """A tier in host memory, below the pool: it keeps KV that leaves the pool, until an `acquire` or `lock` loads it.

    Its pool has records of the pool's pages, window halves and states. Its tree is evicted by itself.
    """

    num_slots: int = Field(gt=0, le=MAX_SLOTS, description="token slots, a multiple of page_size")
    num_swa_slots: _TierWindows = None
    num_state_slots: _TierStates = None
    policy: Policy = Field(default="2q", description="which unlocked leaf of the tier is evicted first")
    reserve: float = Field(
        default=0.2,
        gt=0,
        lt=1,
        description="share of the pool that the background task keeps free or written: the KV that is evicted next",
    )
    write_mib_s: _WriteRate = None
    high_watermark: float = Field(
        default=1.0, gt=0, le=1, description="fraction of the tier's slots in use; 1.0: each write evicts its shortfall"
    )
    low_watermark: float = Field(default=1.0, ge=0, le=1, description="fraction of the tier's slots in use")
    pin: bool | None = Field(
        default=None, description="register the memory with CUDA; None: if the cache's process has a GPU"
    )
    load_timeout_s: float = Field(
        default=2.0,
        ge=0,
        allow_inf_nan=False,
        description="how long a lease waits for its load by default; 0: nothing is loaded",
    )

    _low_is_below_high = model_validator(mode="after")(_with_low_below_high)


class DiskConfig(_Config):
    """A tier on a local disk, below the host tier or below a pool in host memory. It is warm after a restart.

    A file has records of the pool's pages, another one those of window halves, a third one those of states.
    """

    path: str = Field(
        min_length=1,
        max_length=4096,
        description="an existing folder of the cache's node, absolute; the cache makes a folder of its name there",
    )
    num_slots: int | None = Field(
        default=None, gt=0, le=MAX_SLOTS, description="token slots, a multiple of page_size; None: as size says"
    )
    size: int | None = Field(
        default=None, gt=0, description="bytes of the disk, divided in the pool's proportion; None: as num_slots says"
    )
    num_swa_slots: _TierWindows = None
    num_state_slots: _TierStates = None
    admit: Literal["second_use", "all"] = Field(
        default="second_use",
        description="which KV is written. second_use: a page at its second use, wherever it lies; all: a page that is "
        "among the coldest in memory",
    )
    reserve: float = Field(
        default=0.1,
        gt=0,
        lt=1,
        description="admit='all': share of the lowest tier in memory that is kept free or written: the KV evicted next",
    )
    write_mib_s: _WriteRate = 256.0
    direct_io: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="read and write past the page cache. auto: where the file system can; off also allows a file "
        "system on another machine",
    )
    load_timeout_s: float = Field(
        default=5.0,
        ge=0,
        allow_inf_nan=False,
        description="how long a lease waits for its load by default, and a prefetch for each of its parts; 0: nothing "
        "is loaded",
    )
    flush_s: float = Field(
        default=10.0,
        ge=0,
        allow_inf_nan=False,
        description="how long a cache that ends writes the KV that is due, at most",
    )

    @field_validator("path")
    @classmethod
    def _path_is_absolute(cls, path: str) -> str:
        if not path.startswith("/") or "\0" in path:
            raise ValueError(
                f"must be an absolute path, such as /nvme/raydix, not {brief(path)}: a cache's process may have "
                "another working directory"
            )
        return path

    @model_validator(mode="after")
    def _has_one_size(self) -> Self:
        if (self.num_slots is None) == (self.size is None):
            raise ValueError("disk needs num_slots or size, one of them")
        if self.size is not None and (self.num_swa_slots is not None or self.num_state_slots is not None):
            name = "num_swa_slots" if self.num_swa_slots is not None else "num_state_slots"
            raise ValueError(f"disk.size is divided in the pool's proportion: leave out {name}, or give num_slots")
        return self


class TierSizes(NamedTuple):
    """The slots of a tier's pools; 0 where the cache has no windows, or no states."""

    num_slots: int
    num_swa_slots: int = 0
    num_state_slots: int = 0


class LeaseConfig(_Config):
    """Time limits and bounds of leases, sessions and the wait queue."""

    acquire_timeout_s: float = Field(
        default=30.0, ge=0, allow_inf_nan=False, description="how long an acquire waits for free slots by default"
    )
    grant_timeout_s: float = Field(
        default=30.0,
        gt=0,
        allow_inf_nan=False,
        description="a granted lease ends if it is not adopted within this time; `grant` can name another",
    )
    session_ttl_s: float = Field(
        default=30.0,
        gt=0,
        allow_inf_nan=False,
        description="a client silent for longer counts as vanished",
    )
    quarantine_grace_s: float = Field(
        default=120.0,
        ge=0,
        allow_inf_nan=False,
        description="how long slots that a vanished client may still write stay in quarantine, if the cache does not "
        "see its process; while it sees that the process lives, they stay there",
    )
    remembered_leases: int = Field(
        default=65_536, ge=1, description="ended leases remembered, so that late requests for them have no effect"
    )
    max_waiters: int = Field(
        default=1024,
        ge=0,
        description="acquires of each tenant that may wait; more raise CacheBusy; 0: none waits",
    )


class MetricsConfig(_Config):
    """Ray's metrics of a cache actor, for Prometheus. They need the extra `metrics`."""

    interval_s: float = Field(
        default=5.0, gt=0, allow_inf_nan=False, description="seconds between readings of the counts"
    )


class GhostConfig(_Config):
    """The other sizes of the pool for which `stats().ghost` estimates the hit rate."""

    max_factor: float = Field(default=8.0, ge=1, le=1024, description="the largest size, as a multiple of the pool")
    max_pages: int = Field(
        default=16_384, ge=256, description="pages followed, 200 bytes each; a sample, if that pool holds more"
    )


_TREES = ("radix", "mamba")
_PAGES = (*_TREES, "trie", "chunk")


with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message='Field name "validate"')  # a deprecated method of pydantic's own

    class CacheConfig(_Config):
        """The whole configuration of a cache. Callers that start a cache under one name must agree on it."""

        kind: Literal["radix", "mamba", "chunk", "trie", "slots"] = Field(
            default="radix",
            description="mamba: with recurrent states; chunk: shares nothing; trie: a RadixTrie; slots: whole rows",
        )
        page_size: int = Field(default=1, ge=1, le=65_536, description="tokens a page; the unit of sharing")
        sliding_window_size: int | None = Field(
            default=None, ge=1, description="tokens that sliding-window layers attend to; kinds radix and mamba"
        )
        max_seq_len: int | None = Field(
            default=None, ge=1, description="slots of a row, the longest sequence in tokens; kind slots only"
        )
        bigram: bool = Field(
            default=False,
            description="keys are pairs of neighbouring tokens, as EAGLE drafts need; not for kinds mamba and slots",
        )
        pool: PoolConfig
        host: HostConfig | None = Field(
            default=None, description="a tier in host memory below the pool; kinds radix and mamba; None: there is none"
        )
        disk: DiskConfig | None = Field(
            default=None,
            description="a tier on a local disk below the host tier, or below a pool in host memory; kinds radix and "
            "mamba; None: there is none",
        )
        eviction: EvictionConfig = EvictionConfig()
        leases: LeaseConfig = LeaseConfig()
        tenants: tuple[TenantConfig, ...] = Field(
            default=(), description="namespaces with a floor or a cap of slots; kinds radix and mamba"
        )
        events: Literal["full", "slim", False] = Field(
            default=False,
            description="publish events of stored and removed pages; costs a hash of each page inserted. full, which "
            "True means, too: with token ids, as vLLM's; slim: for routers, hashes alone, pending pages and the load",
        )
        events_stride_tokens: int = Field(
            default=_STRIDE_TOKENS,
            ge=1,
            description="slim events name the pages at multiples of it: a multiple of page_size; page_size if larger",
        )
        ghost: GhostConfig | None = Field(
            default=None, description="estimate the hit rates of other pool sizes; kinds radix, mamba and trie"
        )
        json_logs: bool = Field(default=False, description="a cache actor logs JSON lines, with its name and epoch")
        metrics: MetricsConfig | None = Field(
            default=None, description="publish the counts as Ray's metrics; by cache actors only"
        )
        validate: bool = Field(  # type: ignore[assignment]
            default=False,
            description="for debugging, slow: check every invariant after every batch, and the content of a CPU pool",
        )
        fingerprint: str = Field(
            default="",
            max_length=4096,
            description="the base model of all sessions, whether they bind it or not: `str()` of its ModelFingerprint, "
            "or another name; no other may be bound, nor other weights set; empty: any may be",
        )

        @model_validator(mode="after")
        def _pool_is_whole_pages(self) -> Self:
            _check_multiple("num_slots", self.pool.num_slots, "page_size", self.page_size)
            return self

        @model_validator(mode="after")
        def _kind_has_its_features(self) -> Self:
            pool, differ = self.pool, len(set(self.pool.layers)) > 1
            has_index = any(layer.index_head_dim for layer in pool.layers)
            features = {  # feature -> whether it is used, the kinds that have it, the reason why others have not
                "sliding_window_size": (self.sliding_window_size is not None, _TREES, ""),
                "index_head_dim of pool.layers": (has_index, _TREES, ""),
                "eviction.policy": (self.eviction.policy != "lru", _TREES, ": it evicts by 'lru' only"),
                "tenants": (bool(self.tenants), _TREES, ""),
                "host": (self.host is not None, _TREES, ""),
                "disk": (self.disk is not None, _TREES, ""),
                "events": (bool(self.events), (*_TREES, "chunk"), ""),
                "ghost": (self.ghost is not None, (*_TREES, "trie"), ": its requests share no pages"),
                "bigram": (self.bigram, ("radix", "trie", "chunk"), ": it has a place for each token, not for pairs"),
                "pool.format='opaque'": (pool.format == "opaque", _PAGES, ": its sequences are not whole pages"),
                "pool.layers that differ": (differ, _PAGES, ": its sequences are one tensor"),
            }
            for feature, (is_used, kinds, reason) in features.items():
                if is_used and self.kind not in kinds:
                    *others, last = map(repr, kinds)
                    named = f"{', '.join(others)} and {last}"
                    raise ValueError(f"{feature} is for kinds {named}, not {self.kind!r}{reason}")
            return self

        @model_validator(mode="after")
        def _kind_has_its_pools(self) -> Self:
            has_windows = self.pool.num_swa_slots is not None or self.pool.has_layers_of("swa")
            if self.sliding_window_size is None and has_windows:
                raise ValueError("a pool with window slots or 'swa' layers needs sliding_window_size")
            _check_multiple("num_swa_slots", self.pool.num_swa_slots, "page_size", self.page_size)
            if (self.kind == "mamba") != (self.pool.num_state_slots > 0):
                raise ValueError("kind 'mamba' needs num_state_slots, and no other kind takes them")
            return self

        @model_validator(mode="after")
        def _records_are_pages(self) -> Self:
            if self.pool.format == "layers":
                return self
            if (self.sliding_window_size is not None) != bool(self.pool.swa_slot_bytes):
                raise ValueError("pool.format='opaque' needs swa_slot_bytes and sliding_window_size, or neither")
            return self

        @model_validator(mode="after")
        def _rows_are_whole(self) -> Self:
            if (self.kind == "slots") != (self.max_seq_len is not None):
                raise ValueError("kind 'slots' needs max_seq_len, and no other kind takes it")
            if self.max_seq_len is None:
                return self
            _check_multiple("max_seq_len", self.max_seq_len, "page_size", self.page_size)
            _check_multiple("num_slots", self.pool.num_slots, "max_seq_len", self.max_seq_len)
            return self

        @field_validator("events", mode="before")
        @classmethod
        def _true_is_full(cls, events: Any) -> Any:
            return "full" if events is True else events

        @model_validator(mode="after")
        def _stride_is_whole_pages(self) -> Self:
            stride, page = self.events_stride_tokens, self.page_size
            if self.events != "slim":
                if stride != _STRIDE_TOKENS:
                    raise ValueError("events_stride_tokens is for events='slim': leave it out")
            elif stride > page and stride % page:
                raise ValueError(
                    f"events_stride_tokens must be a multiple of page_size ({page}), not {stride}: "
                    f"set it to {-(-stride // page) * page}, say"
                )
            return self

        @model_validator(mode="after")
        def _tenants_fit_the_pool(self) -> Self:
            if self.tenants and self.eviction.policy == "2q":
                raise ValueError(
                    "eviction.policy='2q' takes no tenants: choose another policy, 'lru' say, or leave the tenants out"
                )
            check_tenants(self.tenants, self.pool.num_slots, self.page_size)
            return self

        @model_validator(mode="after")
        def _host_tier_fits_the_pool(self) -> Self:
            host = self.host
            if host is None:
                return self
            if self.eviction.high_watermark == 1.0:
                raise ValueError(
                    "host needs eviction.high_watermark below 1.0: the background task writes KV to the host before it "
                    "is evicted"
                )
            self._check_slots("host", host)
            return self

        @model_validator(mode="after")
        def _disk_tier_fits_the_pool(self) -> Self:
            disk = self.disk
            if disk is None:
                return self
            if self.host is None and self.pool.may_lie_on_gpu:
                raise ValueError(
                    f"disk needs a tier in host memory above it: set pool.device to 'cpu', not {self.pool.device!r}, "
                    "or add CacheConfig.host"
                )
            self._check_slots("disk", disk)
            return self

        def _check_slots(self, name: str, tier: HostConfig | DiskConfig) -> None:
            """Raise ValueError if a tier has no KV to keep, slots that the cache's kind has not, or no whole pages."""
            if not self.pool.has_tensors:
                raise ValueError(f"{name} keeps KV, and this cache has none: leave it out, or give the pool layers")
            if tier.num_swa_slots is not None and self.sliding_window_size is None:
                raise ValueError(f"{name}.num_swa_slots needs sliding_window_size: leave it out")
            if tier.num_state_slots is not None and self.kind != "mamba":
                raise ValueError(f"{name}.num_state_slots is for kind 'mamba': leave it out")
            _check_multiple(f"{name}.num_slots", tier.num_slots, "page_size", self.page_size)
            _check_multiple(f"{name}.num_swa_slots", tier.num_swa_slots, "page_size", self.page_size)

        @property
        def host_sizes(self) -> TierSizes:
            """The slots of the host tier's pools. Those that `host` leaves out are in proportion to the pool's.

            Raises:
                ValueError: the cache has no host tier.
            """
            if self.host is None:
                raise ValueError("this cache has no host tier: set CacheConfig.host")
            return self._sizes_of(self.host, self.host.num_slots)

        def disk_sizes(self, page_bytes: int = 0, half_bytes: int = 0, state_bytes: int = 0) -> TierSizes:
            """Return the slots of the disk tier's pools. Those that `disk` leaves out are in proportion to the pool's.

            Args:
                page_bytes, half_bytes, state_bytes: that the record of a page, of a window half, and of a state take
                    on the disk, their rows in the index included. `disk.size` is divided by them.

            Raises:
                ValueError: the cache has no disk tier, or its size has no room for one record of each kind, or for
                    more slots than a tier can have.
            """
            disk, pool, page = self.disk, self.pool, self.page_size
            if disk is None:
                raise ValueError("this cache has no disk tier: set CacheConfig.disk")
            if disk.num_slots is not None:
                return self._sizes_of(disk, disk.num_slots)
            assert disk.size is not None
            num_halves = 0 if self.sliding_window_size is None else (pool.num_swa_slots or pool.num_slots) // page
            in_pool = pool.num_slots // page, num_halves, pool.num_state_slots
            record_bytes = page_bytes, half_bytes, state_bytes
            if not (pool_bytes := sum(map(operator.mul, in_pool, record_bytes))):
                raise ValueError("disk.size is in bytes, and the pool's records have none: give disk.num_slots")
            least = sum(num_bytes for number, num_bytes in zip(in_pool, record_bytes, strict=True) if number)
            if disk.size < least:
                raise ValueError(
                    f"disk.size must have room for a record of each kind, {least:,} bytes, not {disk.size:,} bytes"
                )
            numbers = [max(1, disk.size * number // pool_bytes) if number else 0 for number in in_pool]
            for place, num_bytes in enumerate(record_bytes):  # A kind of which the share is no record gets one.
                over = sum(map(operator.mul, numbers, record_bytes)) - disk.size
                if over > 0 and num_bytes and numbers[place]:
                    numbers[place] = max(1, numbers[place] - -(-over // num_bytes))
            sizes = TierSizes(numbers[0] * page, numbers[1] * page, numbers[2])
            if max(sizes) > MAX_SLOTS:
                raise ValueError(
                    f"disk.size ({disk.size:,} bytes) is room for {max(sizes):,} slots, and a tier has {MAX_SLOTS:,} "
                    "at most: make it smaller, or page_size larger"
                )
            return sizes

        def _sizes_of(self, tier: HostConfig | DiskConfig, num_slots: int) -> TierSizes:
            """Return the slots of a tier's pools, those that it leaves out in proportion to the pool's."""
            pool, page = self.pool, self.page_size
            share, num_swa, num_states = num_slots / pool.num_slots, 0, 0
            if self.sliding_window_size is not None:
                in_pool = pool.num_swa_slots or pool.num_slots
                num_swa = tier.num_swa_slots or max(page, int(share * in_pool) // page * page)
            if self.kind == "mamba":
                num_states = tier.num_state_slots or max(1, int(share * pool.num_state_slots))
            return TierSizes(num_slots, num_swa, num_states)

        @property
        def tiers_below(self) -> dict[str, str]:
            """The tiers below the pool, by name, each with its medium. The pool is the tier "device"."""
            below = {"host": "CPU"} if self.host is not None else {}
            return below if self.disk is None else below | {"disk": "STORAGE"}

        @property
        def stride_tokens(self) -> int:
            """The tokens of a stride of slim events: `events_stride_tokens`, or `page_size` if that is larger."""
            return max(self.events_stride_tokens, self.page_size)

        @property
        def run_len(self) -> int:
            """Slots that are allocated together, one after the other: a page, or with kind "slots" a whole row."""
            return self.page_size if self.max_seq_len is None else self.max_seq_len

        def record_digest(self) -> str:
            """Return a short hash of the records of an opaque pool: pools with equal ones can exchange pages."""
            pool = self.pool
            tables = [[segment.model_dump() for segment in getattr(pool, table)] for table in _TABLES.values()]
            sizes = [pool.format, self.page_size, *(getattr(pool, size) for size in _TABLES)]
            return hashlib.sha256(json.dumps([sizes, tables]).encode()).hexdigest()[:16]

        def digest(self) -> str:
            """Return a short hash of every field that differs from its default: equal digests, equal configurations.

            A field that is added with a default changes no digest. A default that changes gets a new protocol number:
            see `raydix.schemas.protocol`.
            """
            dumped = self if self.events != "full" else self.model_copy(update={"events": True})  # its only name once
            fields = dumped.model_dump_json(exclude_defaults=True, warnings=False)
            return hashlib.sha256(fields.encode()).hexdigest()[:16]
