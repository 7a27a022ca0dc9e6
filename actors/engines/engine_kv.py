"""`EngineKV`: the records of one worker's KV in an engine, the cache that fits it, and the fingerprint of its model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest

from raydix.actors.engines.block_copies import STAMP_BYTES
from raydix.schemas import CacheConfig, ConfigMismatch, ModelFingerprint, PoolConfig, Segment
from raydix.schemas.fingerprint import FieldValue


@dataclass(frozen=True)
class EngineKV:
    """The KV of one rank of an engine.

    Attributes:
        block_size: tokens of a block.
        segments: of the record of a page, one for each layer.
        fields: of the model's fingerprint; engines share KV only if all are equal.
        keeps_blocks: a running request keeps all its blocks; False: a sliding window frees them.
        reads: loaded KV gives right answers in this engine.
    """

    block_size: int
    segments: tuple[Segment, ...]
    fields: dict[str, FieldValue]
    keeps_blocks: bool = True
    reads: bool = True

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all layers."""
        return sum(segment.bytes for segment in self.segments)

    def fingerprint(self, label: str) -> ModelFingerprint:
        """Return the fingerprint of the model with weights of that label."""
        return ModelFingerprint(fields=self.fields, weights=label)

    def pool_config(self, num_tokens: int, *, check: bool = False, device: str = "cpu") -> PoolConfig:
        """Return a pool for this KV: a record of bytes for each page.

        Args:
            num_tokens: tokens that it holds.
            check: add a segment of stamps, for the setting `check`.
            device: host memory by default. A pool on a card takes its bytes from the engine's own KV there.
        """
        return PoolConfig(num_slots=num_tokens, format="opaque", segments=self._segments(check), device=device)

    def _segments(self, check: bool) -> tuple[Segment, ...]:
        stamps = ("stamps", "uint8", (STAMP_BYTES,))
        return (
            (*self.segments, *segments_of([stamps], len(self.segments), self.token_bytes)) if check else self.segments
        )

    def check_config(self, config: CacheConfig, *, check: bool = False) -> None:
        """Check that a cache fits.

        Raises:
            ConfigMismatch: it does not; the message has each field that differs, with both values, and the first
                segment that differs.
        """
        pool, segments = config.pool, self._segments(check)
        differing: list[tuple[str, object, object]] = [
            (name, found, wanted)
            for name, found, wanted in (
                ("kind", config.kind, "radix"),
                ("sliding_window_size", config.sliding_window_size, None),
                ("pool.format", pool.format, "opaque"),
            )
            if found != wanted
        ]
        if config.page_size > self.block_size or self.block_size % config.page_size:
            differing.append(("page_size", config.page_size, f"{self.block_size} or a divisor of it"))
        if not differing and pool.segments and pool.segments != segments:
            differing.append(_first_difference(pool.segments, segments))
        elif not differing and pool.slot_bytes != (wanted_bytes := sum(segment.bytes for segment in segments)):
            differing.append(("pool.slot_bytes", pool.slot_bytes, wanted_bytes))
        if differing:
            text = "; ".join(f"{name} is {found}, not {wanted}" for name, found, wanted in differing)
            raise ConfigMismatch(f"the cache does not fit the engine: {text}. `raydix start --for vllm` makes one")


def segments_of(
    parts: Iterable[tuple[str, str, tuple[int, ...]]], first_layer: int = 0, start: int = 0
) -> tuple[Segment, ...]:
    """Return segments that follow one another.

    Args:
        parts: the name, the dtype and the shape of each.
        first_layer: number of the first of them.
        start: where it begins.
    """
    segments: list[Segment] = []
    for layer, (name, dtype, shape) in enumerate(parts, first_layer):
        segment = Segment.at(start, name=name, layer=layer, dtype=dtype, shape=shape)
        segments.append(segment)
        start += segment.bytes
    return tuple(segments)


def _first_difference(found: tuple[Segment, ...], wanted: tuple[Segment, ...]) -> tuple[str, object, object]:
    """Return the name of the first segment that differs, and both values; one of them may be missing."""
    place, has, needs = next(
        (place, has, needs) for place, (has, needs) in enumerate(zip_longest(found, wanted)) if has != needs
    )
    return f"segment {place} of a record", has or "missing", needs or "missing"
