"""`RaydixConnector`: vLLM's engines on one node share the KV of a Raydix cache.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "RaydixConnector",
        "kv_connector_module_path": "raydix.actors.engines.vllm.connector", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"cache": "kv-0"}}'

`raydix start --for vllm MODEL` starts a cache that fits, and prints this line. The settings in
`kv_connector_extra_config` are the fields of `raydix.actors.engines.settings.EngineSettings`.

vLLM makes one connector in its scheduler (S) and one in each worker (W), and calls both once or more in every step:

| method of vLLM | side | what vLLM expects | what this connector does |
|---|---|---|---|
| `on_new_request` | S | note that a request has arrived | begins the look-up: a lock in each rank's cache |
| `get_num_new_matched_tokens` | S | tokens to load beyond its own hit; None: ask again | reads it; None: a tier loads |
| `update_state_after_alloc` | S | the blocks to load into | plans the load |
| `build_connector_meta` | S | the message to the workers | plans saves of completed blocks, ends and loads |
| `handle_preemptions` | W | old blocks are read no more | cancels saves of lost blocks, or waits for their copies |
| `bind_connector_metadata` | W | the message of this step | starts loads, and asks for slots of the saves |
| `start_load_kv` | W | loads begin | nothing: they have begun before the forward pass |
| `wait_for_layer_load` | W | the layer's KV is there | nothing: all loads are asynchronous |
| `save_kv_layer` | W | a layer's KV may be saved | nothing: whole blocks of all layers are saved together |
| `wait_for_save` | W | the saves of the step are submitted | lets the copy thread read the blocks of the step |
| `get_finished` | W | saves and loads that have ended | each once, finished or failed |
| `get_block_ids_with_load_errors` | W | blocks of failed loads | the blocks, in the step that reports the load |
| `build_connector_worker_meta` | W | the message to the scheduler | saved lengths, refusals, failures, weights |
| `update_connector_output` | S | read the workers' messages | updates what each request can load and must save |
| `request_finished` | S | whether the blocks are held | ends the lease; holds blocks until they are saved |
| `register_kv_caches` | W | the KV tensors | checks that the cache fits, and maps its pool |
| `reset_cache` | S | forget all KV: weights may have changed | joins the cache's weights, or detaches the engine |
| `get_kv_connector_stats` | S, W | counts since the last call | look-ups, hits, loads, saves, failures, times |
| `build_kv_connector_stats` | | the counts as an object | `RaydixStats` |
| `build_prom_metrics` | | Prometheus metrics | `RaydixPromMetrics` |
| `get_required_kvcache_layout` | | the layout that the connector needs | None; refuses models with states by name |
| `requires_kv_delivery` | S | whether saves must arrive | False: a save that is lost is a later miss |
| `shutdown` | S, W | end | closes the session, which ends its leases |

No method waits for a reply of the cache, apart from the first connection at start. A cache that is silent, restarts or
does not exist costs hits; the engine computes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.metrics.stats import CacheHitSource

from raydix.actors.client.loop_thread import LoopThread
from raydix.actors.engines.block_copies import BlockCopies
from raydix.actors.engines.cache_link import CacheLink, close_links, make_ray_client
from raydix.actors.engines.engine_kv import EngineKV
from raydix.actors.engines.scheduler_side import ScheduledRequest, SchedulerSide
from raydix.actors.engines.settings import EngineSettings
from raydix.actors.engines.step_messages import StepPlan, StepReport
from raydix.actors.engines.transfer_counts import (
    BUCKETS_S,
    COUNTS,
    SECONDS,
    TransferCounts,
    merge_counts,
    metric_name,
    summarize_counts,
)
from raydix.actors.engines.vllm.kv import check_model, describe_vllm
from raydix.actors.engines.worker_side import WorkerSide
from raydix.schemas import InvalidRequest
from raydix.schemas.engine_namespace import namespace_of

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.raydix")

# Time limit of the first attempt to reach the cache. Without an answer the engine starts all the same.
_START_S = 20.0


class RaydixPlan(KVConnectorMetadata):
    """The message of one step from the scheduler to the workers."""

    def __init__(self, step: StepPlan, *, is_idle: bool) -> None:
        self.step = step
        self.is_idle = is_idle


class RaydixReport(KVConnectorWorkerMetadata):
    """The message of one step from the workers to the scheduler."""

    def __init__(self, step: StepReport) -> None:
        self.step = step

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RaydixReport:
        """Return the report of the ranks of both."""
        assert isinstance(other, RaydixReport), other
        return RaydixReport(self.step.merge(other.step))


class RaydixStats(KVConnectorStats):
    """The counts of scheduler and workers since the last step."""

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the counts of another."""
        assert isinstance(other, RaydixStats), other
        self.data: dict[str, Any] = merge_counts(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return counts and mean times, for vLLM's log line."""
        return summarize_counts(self.data)

    def reset(self) -> None:
        """Forget all counts."""
        self.data = {}

    def is_empty(self) -> bool:
        """Return whether nothing was counted."""
        return not self.data


class RaydixPromMetrics(KVConnectorPromMetrics):
    """The counts as metrics of Prometheus: `vllm:raydix_*`."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: metric_types[Counter](name=metric_name(name), documentation=meaning, labelnames=labelnames)
            for name, meaning in COUNTS.items()
        }
        self._histograms = {
            name: metric_types[Histogram](
                name=metric_name(name),
                documentation=meaning,
                buckets=list(BUCKETS_S),
                labelnames=labelnames,
            )
            for name, meaning in SECONDS.items()
        }
        # An alert sees the first failure only if the count was 0 before.
        for labels in per_engine_labelvalues.values():
            for counter in self._counters.values():
                counter.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counts of a step."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name].labels(*labels).inc(value)
            else:
                for seconds in value:
                    self._histograms[name].labels(*labels).observe(seconds)


class RaydixConnector(KVConnectorBase_V1):
    """vLLM's connector to a Raydix cache; see the module."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None, "vLLM has read it"
        if transfer.kv_role != "kv_both":
            raise InvalidRequest(f'kv_role must be "kv_both", not {transfer.kv_role!r}: a cache is read and fed')
        if transfer.kv_load_failure_policy != "recompute":
            raise InvalidRequest(
                f'kv_load_failure_policy must be "recompute", not {transfer.kv_load_failure_policy!r}: pages can be '
                "lost, as when the cache restarts, and vLLM would then end the request with an error"
            )
        _log_as_vllm()
        self.settings = EngineSettings.of(transfer.kv_connector_extra_config)
        self._num_ranks = vllm_config.parallel_config.tensor_parallel_size
        self._layer_names = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
        self._plan: RaydixPlan | None = None
        self._failed_blocks: set[int] = set()
        self._counts = TransferCounts()
        self._loop = LoopThread("raydix-connector")
        self._requests: dict[str, Request] = {}
        self.scheduler: SchedulerSide | None = None
        self.worker: WorkerSide | None = None
        name = f"vllm {(transfer.engine_id or '')[:8]}"
        if role is KVConnectorRole.SCHEDULER:
            kvs = [describe_vllm(vllm_config, kv_cache_config, rank) for rank in range(self._num_ranks)]
            self._links = [
                self._make_link(rank, kv, f"{name} scheduler", maps_pool=False) for rank, kv in enumerate(kvs)
            ]
            if not kvs[0].reads:
                logger.warning(
                    "vLLM has switched its prefix caching off for this model: RaydixConnector answers 0 hits, as "
                    "KV that is loaded could give wrong answers"
                )
            self.scheduler = SchedulerSide(
                self.settings, self._links, self._loop, kvs[0].block_size, reads=kvs[0].reads, counts=self._counts
            )
            self._start_links()
        else:
            rank = get_tensor_model_parallel_rank()
            self._kv = describe_vllm(vllm_config, kv_cache_config, rank)
            self._rank = rank
            self._links = [self._make_link(rank, self._kv, f"{name} worker {rank}", maps_pool=True)]

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Return None: any layout is served. vLLM calls this before it makes groups of the model's layers.

        Raises:
            InvalidRequest: the model cannot be served.
        """
        check_model(vllm_config)
        return None

    def _make_link(self, rank: int, kv: EngineKV, owner: str, *, maps_pool: bool) -> CacheLink:
        settings = self.settings
        cache = settings.cache_of(rank, self._num_ranks)
        return CacheLink(
            cache,
            partial(make_ray_client, cache, settings.namespace, settings.ray_address, owner),
            kv.fingerprint,
            partial(kv.check_config, check=settings.check),
            label=settings.weights,
            loop=self._loop,
            maps_pool=maps_pool,
            reconnect_s=settings.reconnect_s,
        )

    def _start_links(self) -> None:
        for link in self._links:
            link.start(_START_S)

    # ---------------------------------------------------------------- the scheduler

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a save that is lost is a later miss."""
        return False

    @property
    def _scheduler(self) -> SchedulerSide:
        assert self.scheduler is not None, "vLLM calls this in its scheduler"
        return self.scheduler

    def on_new_request(self, request: Request) -> None:
        """Begin the look-up, unless the prompt has embeddings in place of token ids."""
        if request.prompt_embeds is not None or request.pooling_params is not None:
            return
        lora = request.lora_request
        namespace = namespace_of(
            lora.lora_name if lora else None,
            lora.lora_path if lora else None,
            request.cache_salt,
            [(feature.identifier, feature.mm_position.offset) for feature in request.mm_features],
        )
        self._requests[request.request_id] = request
        self._scheduler.add_request(request.request_id, partial(_read_tokens, request), namespace)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the tokens to load; they are loaded between steps."""
        if request.skip_reading_prefix_cache:
            return 0, False
        hit = self._scheduler.find_hit(request.request_id, request.num_tokens, num_computed_tokens)
        return hit, bool(hit)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Plan the load into the request's blocks."""
        if num_external_tokens:
            self._scheduler.allocate(request.request_id, num_external_tokens, blocks.get_block_ids()[0])

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return the workers' tasks in this step."""
        state = scheduler_output.kv_connector_block_state
        scheduled = []
        num_prompt_tokens = 0
        for request_id, number in scheduler_output.num_scheduled_tokens.items():
            request = self._requests.get(request_id)
            if request is not None and state is not None:
                computed = min(request.num_computed_tokens + number, request.num_tokens)
                num_prompt_tokens += max(0, min(computed, request.num_prompt_tokens) - request.num_computed_tokens)
                scheduled.append(
                    ScheduledRequest(request_id, computed, partial(_first_group, state.resolve_block_ids, request_id))
                )
        is_idle = scheduler_output.total_num_scheduled_tokens == 0
        preempted = set(scheduler_output.preempted_req_ids or ())
        plan = self._scheduler.plan_step(scheduled, preempted, is_idle=is_idle, num_prompt_tokens=num_prompt_tokens)
        return RaydixPlan(plan, is_idle=is_idle)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Read the workers' reports."""
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, RaydixReport):
            self._scheduler.read_report(report.step)
        self._scheduler.finish_loads(set(connector_output.finished_recving or ()))

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """End the request's lease; hold its blocks if they are being saved."""
        self._requests.pop(request.request_id, None)
        return self._scheduler.finish_request(request.request_id), None

    def reset_cache(self) -> bool | None:
        """Join the cache's weights, or detach the engine. Never raises, and waits for no reply."""
        self._scheduler.reset()
        return None

    # ---------------------------------------------------------------- the worker

    @property
    def _worker(self) -> WorkerSide:
        assert self.worker is not None, "vLLM registers its KV caches first"
        return self.worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Connect to the cache; refuse one that does not fit."""
        layers = [kv_caches[name] for name in self._layer_names]
        self._start_links()
        link, kv = self._links[0], self._kv
        copies = BlockCopies(layers, kv.block_size, check=self.settings.check)
        needed = [segment.bytes for segment in kv.segments]
        assert copies.slot_bytes[: len(needed)] == needed, (copies.slot_bytes, needed)
        self.worker = WorkerSide(
            self.settings,
            self._rank,
            link,
            self._loop,
            copies,
            kv.block_size,
            keeps_blocks=kv.keeps_blocks,
            counts=self._counts,
        )

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Make sure that no block is read that its request has lost."""
        assert isinstance(kv_connector_metadata, RaydixPlan)
        self._worker.before_step(kv_connector_metadata.step)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Start the loads, and ask for slots of the saves, before the forward pass."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, RaydixPlan)
        self._plan = connector_metadata
        self._worker.begin_step(connector_metadata.step)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Do nothing: the loads have begun."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: all loads are asynchronous."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Do nothing: whole blocks of all layers are saved together."""

    def wait_for_save(self) -> None:
        """Let the copy thread read the blocks that the step has computed."""
        assert self._plan is not None, "vLLM binds the message first"
        self._worker.end_step(is_idle=self._plan.is_idle)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests with saves that have ended, and the requests with loads that have ended."""
        saved, loaded, self._failed_blocks = self._worker.take_results()
        return saved, loaded

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks of the failed loads that `get_finished` has just reported."""
        return self._failed_blocks

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return the changes since the last step."""
        report = self._worker.take_report()
        return None if report is None else RaydixReport(report)

    # ---------------------------------------------------------------- both

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return the counts since the last call."""
        data = self._counts.take()
        return RaydixStats(data=data) if data else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Return counts as an object."""
        return RaydixStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Return the metrics of Prometheus."""
        return RaydixPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Close the session, which ends its leases."""
        if self.worker is not None:
            self.worker.close()
        close_links(self._links, self._loop)
        self._loop.stop()


def _log_as_vllm() -> None:
    """Have this package's loggers write as vLLM's do: vLLM sets up no others."""
    vllm, ours = logging.getLogger("vllm"), logging.getLogger("raydix")
    if not ours.handlers:
        ours.handlers, ours.propagate = [*vllm.handlers], vllm.propagate
        ours.setLevel(vllm.level)


def _read_tokens(request: Request, start: int, end: int | None) -> Sequence[int]:
    tokens: Sequence[int] = request.all_token_ids[start:end]
    return tokens


def _first_group(resolve: Any, request_id: str) -> Sequence[int]:
    blocks: Sequence[int] = resolve(request_id)[0]
    return blocks
