"""The most tokens that a transformers model takes, and the ranges of lengths in which its KV can be reused.

In some models the KV of a token depends on the length of the whole sequence, so KV of a shorter sequence is wrong:

    longrope     |── short factors ──|──────── long factors ────────|   two namespaces
    dynamic NTK  |── original ───────|── new at each length ────────|   one, then every pass computes all tokens
    Doge         |── all tokens ─────|── selected tokens ───────────|   the same
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raydix.schemas import InvalidRequest

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LONG_KEY = "raydix:long:"
"""The start of the `extra_key` of sequences in a second range; an `extra_key` of a caller must not begin with it."""

_LIMITS = ("max_position_embeddings", "max_target_positions", "n_positions", "max_seq_len", "max_seq_length")


@dataclass(frozen=True, slots=True)
class LengthRange:
    """A range of sequence lengths in which the KV of a token depends only on the tokens before it.

    Attributes:
        longest: the longest sequence in the range, in tokens; None: no end.
        is_first: whether the range begins at the first token.
        reusable: whether KV can be reused within the range; else each pass must compute all tokens.
    """

    longest: int | None
    is_first: bool = True
    reusable: bool = True

    def extra_key(self, given: str | None) -> str | None:
        """Return the `extra_key` under which sequences in this range are cached.

        Raises:
            InvalidRequest: the caller's `extra_key` begins with `LONG_KEY`.
        """
        if given is not None and given.startswith(LONG_KEY):
            raise InvalidRequest(f"extra_key must not begin with {LONG_KEY!r}: that is for long sequences")
        return given if self.is_first else LONG_KEY + ("" if given is None else f"={given}")


@dataclass(frozen=True, slots=True)
class ModelLengths:
    """The ranges of a model in order, and the longest sequence that it takes.

    Attributes:
        ranges: at least one; the last has no end.
        max_positions: the limit in tokens; None: no known limit.
    """

    ranges: tuple[LengthRange, ...]
    max_positions: int | None

    @classmethod
    def of(cls, config: PreTrainedConfig) -> ModelLengths:
        """Return the lengths of a model, from its configuration."""
        text = config.get_text_config(decoder=True)
        ropes = list(_ropes(text))
        max_positions = _max_positions(text, ropes)
        long_from = [rope["original_max_position_embeddings"] for rope in ropes if rope.get("rope_type") == "longrope"]
        dynamic = any("dynamic" in str(rope.get("rope_type")) for rope in ropes)
        ends = [text.max_position_embeddings] if dynamic else []
        ends += [end] if (end := getattr(text, "keep_window_size", None)) is not None else []
        if ends or len(set(long_from)) > 1:
            first = LengthRange(min([*ends, *long_from]))
            return cls((first, LengthRange(None, is_first=False, reusable=False)), max_positions)
        if long_from:
            return cls((LengthRange(long_from[0]), LengthRange(None, is_first=False)), max_positions)
        return cls((LengthRange(None),), max_positions)

    def range_of(self, num_tokens: int) -> LengthRange:
        """Return the range of a sequence length."""
        return next(lengths for lengths in self.ranges if lengths.longest is None or num_tokens <= lengths.longest)

    def first(self, num_tokens: int) -> int:
        """Return the smaller of a number of tokens and the longest sequence in the first range."""
        return min(end for end in (num_tokens, self.ranges[0].longest, self.max_positions) if end is not None)

    def check(self, num_tokens: int) -> None:
        """Check that the model takes a sequence of this many tokens.

        Raises:
            InvalidRequest: the sequence is too long.
        """
        if self.max_positions is not None and num_tokens > self.max_positions:
            raise InvalidRequest(
                f"{num_tokens} tokens to compute, but the model has {self.max_positions} positions: "
                "shorten the prompt or lower max_new_tokens"
            )


def _ropes(text: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    """Yield the parameters of a model's rotary embeddings: of all layers, or of each kind of layer."""
    given = getattr(text, "rope_parameters", None) or {}
    nested = [parameters for parameters in given.values() if isinstance(parameters, dict)]
    yield from nested or [given]


def _max_positions(text: PreTrainedConfig, ropes: list[dict[str, Any]]) -> int | None:
    """Return the longest sequence: the configuration's, or the one to which its rope is scaled."""
    named = next((limit for name in _LIMITS if isinstance(limit := getattr(text, name, None), int) and limit > 0), None)
    if named is None:
        return None
    extended = [_extended(rope, named) for rope in ropes]
    return max([named, *extended])


def _extended(rope: dict[str, Any], named: int) -> int:
    kind, factor = str(rope.get("rope_type")), rope.get("factor") or 1.0
    if kind in ("yarn", "linear"):
        return int(factor * (rope.get("original_max_position_embeddings") or named))
    return int(factor * named) if "dynamic" in kind else named
