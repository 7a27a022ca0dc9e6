"""The layers of a configuration that its small twin keeps: some of every kind, in order.

    layer_types              s s s s s f s s s s s f        s f s
    num_kv_shared_layers                 4            ->      ...
    first_k_dense_replace    3                              1

The kind of a layer consists of its entry in every list with one entry per layer; whether its index is in a list of
indices, or among a number of first or last layers; and its settings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raydix.actors.huggingface import twin_rules as rules

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def select_layers(part: PreTrainedConfig, overrides: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Reduce a configuration to few layers, in place; return the settings of the kept layers."""
    fields = dict(vars(part))
    counts = [name for name in rules.LAYER_COUNTS if type(fields.get(name)) is int]
    lists = {name: value for name, value in fields.items() if _is_list(name, value)}
    num_layers = fields[counts[0]] if counts else max((len(value) for value in lists.values()), default=0)
    if num_layers < 2:
        return overrides
    per_layer = {name: value for name, value in lists.items() if len(value) == num_layers}
    kinds = list(zip(*_columns(fields, per_layer, overrides, num_layers), strict=True))
    pattern = max((len(fields[name] or ()) for name in rules.PATTERNS if name in fields), default=0)
    periods = _periods(fields, per_layer)
    if pattern or periods:
        least = max(2 * pattern, _shorten_periods(part, fields, periods))
        last_new = max(kinds.index(kind) for kind in set(kinds))
        kept = list(range(min(num_layers, max(least, min(last_new + 2, rules.MAX_LAYERS)))))
    else:
        kept = keep_some(kinds)
    for name, value in per_layer.items():
        setattr(part, name, type(value)(value[index] for index in kept))
    for name in counts:
        if fields[name] == num_layers:
            setattr(part, name, len(kept))
    _count_again(part, fields, kept, num_layers)
    return {new: overrides[old] for new, old in enumerate(kept) if old in overrides}


def keep_some(kinds: Sequence[Hashable], most: int = rules.MAX_LAYERS) -> list[int]:
    """Return the index of the first layer of every kind, and of a second one after a change of kind; two at least."""
    first: dict[Hashable, int] = {}
    for index, kind in enumerate(kinds):
        first.setdefault(kind, index)
    must = sorted(first.values())[:most]
    kept: list[int] = []
    counts: Counter[Hashable] = Counter()
    for index, kind in enumerate(kinds):
        still_must = sum(layer >= index for layer in must)
        is_change = bool(kept) and kind != kinds[kept[-1]] and counts[kind] < 2
        if index in must or (is_change and len(kept) + still_must < most):
            kept.append(index)
            counts[kind] += 1
    if len(kept) == 1:
        kept.append(kept[0] + 1 if len(kinds) > kept[0] + 1 else kept[0] - 1)
    return sorted(kept)


def _is_list(name: str, value: Any) -> bool:
    return isinstance(value, (list, tuple)) and name not in rules.NOT_PER_LAYER | rules.LAYER_INDICES


def _columns(
    fields: Mapping[str, Any],
    per_layer: Mapping[str, Sequence[Any]],
    overrides: Mapping[int, Mapping[str, Any]],
    num_layers: int,
) -> Iterator[list[Hashable]]:
    yield [repr(sorted(overrides.get(index, {}).items())) for index in range(num_layers)]
    for value in per_layer.values():
        yield [repr(entry) for entry in value]
    for name in rules.LAYER_INDICES & fields.keys():
        if fields[name] is not None:
            yield [index in fields[name] for index in range(num_layers)]
    for name in rules.FIRST_LAYERS & fields.keys():
        if type(fields[name]) is int:
            yield [index < fields[name] for index in range(num_layers)]
    for name in rules.LAST_LAYERS & fields.keys():
        if type(fields[name]) is int:
            yield [index >= num_layers - fields[name] for index in range(num_layers)]


def _count_again(part: PreTrainedConfig, fields: Mapping[str, Any], kept: Sequence[int], num_layers: int) -> None:
    for name in rules.LAYER_INDICES & fields.keys():
        if fields[name] is not None:
            indices = [new for new, old in enumerate(kept) if old in fields[name]]
            setattr(part, name, type(fields[name])(indices))
    for name in rules.FIRST_LAYERS & fields.keys():
        if type(fields[name]) is int:
            setattr(part, name, sum(old < fields[name] for old in kept))
    for name in rules.LAST_LAYERS & fields.keys():
        if type(fields[name]) is int:
            setattr(part, name, sum(old >= num_layers - fields[name] for old in kept))


def _periods(fields: Mapping[str, Any], per_layer: Mapping[str, Any]) -> list[str]:
    """Return the names of the periods that decide kinds of layers; a list of types precedes attention's."""
    names = [name for name in rules.PERIODS if type(fields.get(name)) is int and fields[name] > 1]
    return [name for name in names if not (name == "attn_layer_period" and "layers_block_type" in per_layer)]


def _shorten_periods(part: PreTrainedConfig, fields: Mapping[str, Any], periods: Sequence[str]) -> int:
    """Make periods short; return the number of layers with every kind and a change back."""
    longest = 1
    for name in periods:
        period = min(fields[name], 3 if rules.PERIODS[name] == "attn_layer_offset" else 2)
        setattr(part, name, period)
        longest = max(longest, period)
        offset = rules.PERIODS[name]
        if offset is not None and type(fields.get(offset)) is int:
            setattr(part, offset, min(fields[offset], period - 1))
    return 2 * longest
