"""The lengths in tokens of a small twin: windows, positions and rope; and its special tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raydix.actors.huggingface import twin_rules as rules

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def ropes_of(fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rope parameters of a configuration, for each kind of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        found = fields.get(name)
        if isinstance(found, dict):
            nested = [parameters for parameters in found.values() if isinstance(parameters, dict)]
            yield from nested or [found]


def shorten(part: PreTrainedConfig, window: int) -> None:
    fields = dict(vars(part))
    for name in rules.WINDOWS & fields.keys():
        value = fields[name]
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > window:
            setattr(part, name, type(value)(window))
    longest = rules.MAX_POSITIONS
    for rope in ropes_of(fields):
        longest = max(longest, _shorten_rope(rope, fields, window))
    if any(rope.get("rope_type", rope.get("type")) == "dynamic" for rope in ropes_of(fields)):
        longest = window  # it scales beyond the positions
    for name in rules.POSITIONS & fields.keys():
        if type(value := fields[name]) is int and value > longest:
            setattr(part, name, longest)


def _shorten_rope(rope: dict[str, Any], fields: Mapping[str, Any], window: int) -> int:
    """Shorten the lengths of rope in place; return the positions that keep the ratio to the original ones."""
    longest = 0
    original = rope.get("original_max_position_embeddings") or fields.get("original_max_position_embeddings")
    if type(original) is int and original > window:
        most = fields.get("max_position_embeddings") or original
        longest = min(rules.MAX_EXTENDED_POSITIONS, math.ceil(most * window / original))
        if "original_max_position_embeddings" in rope:
            rope["original_max_position_embeddings"] = window
    return longest


def move_token_ids(parts: Sequence[PreTrainedConfig]) -> None:
    """Make the vocabularies small, and move all special tokens into them: different ids stay different."""
    named = [(part, name, value) for part in parts for name, value in vars(part).items() if _names_tokens(name)]
    ids = {token for _, _, value in named for token in _tokens_in(value)}
    free = (token for token in range(rules.VOCABULARY - 1, -1, -1) if token not in ids)
    moved = {token: token if token < rules.VOCABULARY else next(free, rules.VOCABULARY - 1) for token in sorted(ids)}
    for part, name, value in named:
        if isinstance(value, (list, tuple)):
            setattr(part, name, type(value)(moved.get(token, token) for token in value))
        elif type(value) is int:
            setattr(part, name, moved.get(value, value))
    for part in parts:
        sizes = {name: vars(part)[name] for name in rules.VOCABULARIES if type(vars(part).get(name)) is int}
        largest = max(sizes.values(), default=0)
        for name, size in sizes.items():
            small = rules.VOCABULARY if size == largest else rules.VOCABULARY - 8
            setattr(part, name, min(size, small))


def _names_tokens(name: str) -> bool:
    return name.endswith(rules.TOKEN_NAMES)


def _tokens_in(value: Any) -> list[int]:
    every = value if isinstance(value, (list, tuple)) else [value]
    return [token for token in every if type(token) is int and token >= 0]
