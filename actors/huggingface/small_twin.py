"""`small_twin`: a transformers configuration with the same behaviour and small sizes; `build_twin` makes the model.

A check of a full-size model takes too long, and its dtype hides small differences. The twin has the same classes, mix
of layers and switches, but few and narrow layers, and short windows:

    layers      a few of every kind, in their order, and a change back: s s s s s f s s s s s f -> s f s
    widths      all scaled by one factor, head sizes by another, so that equal ones stay equal
    windows     at most `window` tokens, also the boundaries of rope scaling
    token ids   moved into the small vocabulary; different ids stay different

`twin_rules` has the names of the fields.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch

from raydix.actors.huggingface import twin_rules as rules
from raydix.actors.huggingface.errors import refusing
from raydix.actors.huggingface.twin_layers import select_layers
from raydix.actors.huggingface.twin_tokens import move_token_ids, ropes_of, shorten

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class TwinUnavailable(Exception):
    """No small twin can be made of a configuration; the message names the reason."""


def small_twin(config: PreTrainedConfig, *, window: int = 64) -> PreTrainedConfig:
    """Copy a configuration with the same classes, kinds of layers and switches, and small sizes.

    Sizes only shrink, so a small configuration keeps its sizes. The dtype is float32; a quantization is dropped.

    Args:
        config: configuration of a causal LM, or of a multi-modal model with one. It is not changed.
        window: the longest sliding window, attention chunk or original rope length of the twin, in tokens. Shorter ones
            stay; None stays None.

    Raises:
        TwinUnavailable: a size is missing, or transformers rejects the small sizes.
    """
    twin = copy.deepcopy(config)
    with refusing(f"no small twin of this {config.model_type} configuration", TwinUnavailable):
        for part in _parts(twin):
            _set_switches(part)
        if not _is_small(twin):
            _shrink_sizes(twin)
            move_token_ids(list(_parts(twin)))
        for part in _parts(twin):
            shorten(part, window)
        if lost := _cache_layers(config) - _cache_layers(twin):
            raise ValueError(f"no layer with a {sorted(lost)} is left in the twin")
    return twin


def build_twin(config: PreTrainedConfig, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    """Build a causal LM with random weights on the CPU, in evaluation mode.

    Constant and one-dimensional parameters get noise, so that a missing layer changes the logits. The random state of
    this process does not change, and nothing is downloaded.

    Args:
        config: a configuration from `small_twin`. It is not changed.
        seed: seed of the weights. Equal seeds and configurations give equal weights.
        dtype: dtype of the weights. float64: of all of them; else transformers keeps some in float32.

    Raises:
        TwinUnavailable: transformers has no causal LM of this configuration, or fails to make it.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise TwinUnavailable(f"transformers itself has no causal LM of {type(config).__name__}")
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        with refusing(f"transformers cannot make this {config.model_type} model", TwinUnavailable):
            model = _from_config(config, dtype)
        _add_noise(model)
    return (model.double() if dtype is torch.float64 else model).eval()


def _from_config(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    made_of = copy.deepcopy(config)
    vars(made_of).pop("auto_map", None)  # remote code would be downloaded
    for part in _parts(made_of):
        part.dtype = dtype
        if dtype is torch.float64:
            part._experts_implementation = "eager"  # others multiply no matrices of float64
    model: torch.nn.Module = AutoModelForCausalLM.from_config(made_of, dtype=dtype)  # type: ignore[no-untyped-call]
    return model


@torch.no_grad()
def _add_noise(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):  # steps of all sizes, also clamped ones
            parameter.copy_(torch.linspace(-9, 1, parameter.numel()).view_as(parameter))
        elif parameter.is_floating_point() and (
            parameter.ndim <= 1 or bool((parameter == parameter.flatten()[0]).all())
        ):
            parameter.add_(torch.randn_like(parameter), alpha=0.1)


def _parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Yield a configuration and all configurations in it."""
    from transformers import PreTrainedConfig

    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value)


def _set_switches(part: PreTrainedConfig) -> None:
    for name in ("quantization_config", "_name_or_path"):
        vars(part).pop(name, None)
    part.dtype = torch.float32
    if "flash" in str(vars(part).get("_attn_implementation_internal")):
        part._attn_implementation_internal = None  # it needs a GPU
    for name in rules.SPREADS:
        if isinstance(spread := vars(part).get(name), float) and 0 < spread < rules.SPREAD:
            setattr(part, name, rules.SPREAD)


# ---------------------------------------------------------------- sizes


def _shrink_sizes(twin: PreTrainedConfig) -> None:
    text = twin.get_text_config(decoder=True)
    before = _first(vars(text), rules.HIDDEN)
    same = [
        (part, name)
        for part in _parts(twin)
        for name in rules.SAME_AS_HIDDEN & vars(part).keys()
        if vars(part)[name] == before and part is not text
    ]
    parts = [(part, select_layers(part, _pop_overrides(part))) for part in _parts(twin)]
    sizes = [_Sizes.of(part, overrides) for part, overrides in parts]
    if twin.model_type in rules.ONE_SCALE:
        least = max(size.dims for size in sizes if size.dims < 1)
        sizes = [_Sizes.of(part, overrides, least) for part, overrides in parts]
    for (part, overrides), size in zip(parts, sizes, strict=True):
        size.apply(part, overrides)
        if overrides:
            setattr(part, "per_layer_config", overrides)  # noqa: B010 - mypy's type of the property is too narrow
    for part, name in same:
        setattr(part, name, _first(vars(text), rules.HIDDEN))


def _cache_layers(config: PreTrainedConfig) -> set[str]:
    """Return the kinds of layers in the model's own cache; none if it has no such cache."""
    from transformers import DynamicCache

    with suppress(TwinUnavailable), refusing("transformers has no cache for it", TwinUnavailable):
        return {type(layer).__name__ for layer in DynamicCache(config=config).layers}
    return set()


def _is_small(config: PreTrainedConfig) -> bool:
    """Whether the model is already small."""
    text = vars(config.get_text_config(decoder=True))
    sizes = {"width": _first(text, rules.HIDDEN), "layers": _first(text, rules.LAYER_COUNTS)}
    if (sizes["width"] or 0) > 128 or (sizes["layers"] or 0) > rules.MAX_LAYERS or text.get("vocab_size", 0) > 1024:
        return False
    try:
        with refusing("transformers cannot make it", TwinUnavailable), torch.device("meta"):
            model = _from_config(config)
    except TwinUnavailable:
        return False
    return sum(parameter.numel() for parameter in model.parameters()) <= rules.FEW_PARAMETERS


def _pop_overrides(part: PreTrainedConfig) -> dict[int, dict[str, Any]]:
    """Remove and return the settings of single layers, so that the fields of the configuration can be read."""
    spec = vars(part).pop("_heterogeneity_spec", None)
    return {} if spec is None else copy.deepcopy(spec.per_layer_overrides)


@dataclass(slots=True)
class _Sizes:
    """The scale of the sizes of one configuration."""

    dims: Fraction  # head sizes are scaled by this
    widths: Fraction
    heads: dict[int, int] = field(default_factory=dict)  # number of heads (of queries, of KV) -> small number

    @classmethod
    def of(
        cls, part: PreTrainedConfig, overrides: Mapping[int, Mapping[str, Any]], dims: Fraction | None = None
    ) -> _Sizes:
        fields = vars(part)
        every = [fields, *overrides.values()]
        heads = _small_heads(_ints(every, rules.QUERY_HEADS), _ints(every, rules.KV_HEADS))
        hidden, num_heads = _first(fields, rules.HIDDEN), _first(fields, sorted(rules.QUERY_HEADS))
        dim = _first(fields, ("head_dim", "attention_head_dim", "kv_channels", "dim_head", "d_head"))
        if dim is None and hidden is not None and num_heads is not None:
            dim = hidden // num_heads
        known = _ints(every, rules.HEAD_DIMS) | ({dim} if dim else set())
        if dims is None:
            dims = min(Fraction(1), Fraction(_smallest_dim(fields), min(known, default=1)))
        sizes = cls(dims, Fraction(1), heads)
        if hidden is not None:
            small = 32
            if num_heads is not None and dim is not None:
                attended = heads[num_heads] * sizes.dim(dim)
                small = attended
                if num_heads * dim != hidden:
                    small = min(64, _multiple_of_8(Fraction(attended * hidden, num_heads * dim)))
            sizes.widths = min(Fraction(1), Fraction(small, hidden))
        return sizes

    def apply(self, part: PreTrainedConfig, overrides: Mapping[int, dict[str, Any]]) -> None:
        before = dict(vars(part))
        for name, value in before.items():
            if isinstance(value, (int, list, tuple)):
                setattr(part, name, self.shrink(name, value))
        for rope in ropes_of(vars(part)):
            self._shrink_rope(rope)
        for own in overrides.values():
            own.update({name: self.shrink(name, value) for name, value in own.items()})
        _keep_products(part, before)
        for name, value in rules.EXCEPTIONS.get(part.model_type, {}).items():
            setattr(part, name, value)

    def shrink(self, name: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)) and value and all(type(item) is int for item in value):
            return type(value)(self.shrink(name, item) for item in value)
        if type(value) is not int or value <= 0:
            return value
        if name in rules.HEAD_DIMS:
            return self.dim(value)
        if name in rules.WIDTHS:
            return self.width(value)
        if name in rules.KV_HEADS or name in rules.QUERY_HEADS:
            return self.heads[value]
        return min(value, rules.LIMITS.get(name, value))

    def _shrink_rope(self, rope: dict[str, Any]) -> None:
        for name in ("short_factor", "long_factor"):
            if factors := rope.get(name):
                num = self.dim(2 * len(factors)) // 2
                rope[name] = [factors[index * len(factors) // num] for index in range(num)]
        if sections := rope.get("mrope_section"):
            num = self.dim(2 * sum(sections)) // 2
            small = [section * num // sum(sections) for section in sections]
            rope["mrope_section"] = [small[0] + num - sum(small), *small[1:]]

    def dim(self, value: int) -> int:
        return min(value, max(2, 2 * round(value * self.dims / 2)))

    def width(self, value: int) -> int:
        scaled = value * self.widths
        return min(value, _multiple_of_8(scaled))


def _small_heads(queries: set[int], kv: set[int]) -> dict[int, int]:
    """Return small numbers of heads. If one is a multiple of the other, it stays one; 1 stays 1."""
    targets = iter((4,) if len(kv) == 1 and kv & queries else (2, 4, 8, 16))
    small = {1: 1}
    for number in sorted(kv - {1}):
        small[number] = min(number, next(targets, 16))
    most = max((small[number] for number in kv), default=0)
    for number in queries - kv:
        small[number] = min(number, max(4, 2 * most))
    return small


def _keep_products(part: PreTrainedConfig, before: Mapping[str, Any]) -> None:
    for name, factors, divisor in rules.PRODUCTS:
        if all(type(before.get(size)) is int for size in (name, *factors, *divisor)):
            if before[name] * math.prod(before[factor] for factor in divisor) == math.prod(
                before[factor] for factor in factors
            ):
                after = vars(part)
                setattr(part, name, math.prod(after[i] for i in factors) // math.prod(after[i] for i in divisor))
    if all(type(before.get(name)) is int for name in (rules.SUM, *rules.SUM_OF)):
        setattr(part, rules.SUM, sum(vars(part)[name] for name in rules.SUM_OF))


def _smallest_dim(fields: Mapping[str, Any]) -> int:
    """Return a rotary share by which at least four elements of a head rotate."""
    shares = [fields.get("partial_rotary_factor"), fields.get("rotary_pct")]
    shares += [rope.get("partial_rotary_factor") for rope in ropes_of(fields)]
    least = min((share for share in shares if isinstance(share, float) and share > 0), default=1.0)
    return 8 if least >= 0.5 else 16


def _first(fields: Mapping[str, Any], names: Iterable[str]) -> int | None:
    for name in names:
        if type(value := fields.get(name)) is int and value > 0:
            return value
    return None


def _ints(every: Iterable[Mapping[str, Any]], names: Iterable[str]) -> set[int]:
    found = set()
    for fields in every:
        for name in names:
            value = fields.get(name)
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if type(item) is int and item > 0:
                    found.add(item)
    return found


def _multiple_of_8(number: Fraction) -> int:
    return max(8, 8 * math.ceil(number / 8))
