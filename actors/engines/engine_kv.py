"""`EngineKV`: the shape of one worker's KV in an engine, the cache that fits it, and the fingerprint of its model."""

from __future__ import annotations

from dataclasses import dataclass

from raydix.actors.engines.block_copies import STAMP_BYTES
from raydix.schemas import CacheConfig, ConfigMismatch, ModelFingerprint, PoolConfig
from raydix.schemas.fingerprint import FieldValue


@dataclass(frozen=True)
class EngineKV:
    """The KV of one rank of an engine.

    Attributes:
        block_size: tokens of a block.
        slot_bytes: bytes of a token in each layer.
        fields: of the model's fingerprint; engines share KV only if all are equal.
        keeps_blocks: a running request keeps all its blocks; False: a sliding window frees them.
        reads: loaded KV gives right answers in this engine.
    """

    block_size: int
    slot_bytes: tuple[int, ...]
    fields: dict[str, FieldValue]
    keeps_blocks: bool = True
    reads: bool = True

    def fingerprint(self, label: str) -> ModelFingerprint:
        """Return the fingerprint of the model with weights of that label."""
        return ModelFingerprint(fields=self.fields, weights=label)

    def pool_config(self, num_tokens: int, *, check: bool = False, device: str = "auto") -> PoolConfig:
        """Return a pool for this KV, as bytes: one head of `slot_bytes` in each layer.

        Args:
            num_tokens: tokens that it holds.
            check: add a layer of stamps, for the setting `check`.
        """
        layers = self._layers(check)
        if len(set(layers)) == 1:
            return PoolConfig(
                num_slots=num_tokens,
                num_layers=len(layers),
                num_kv_heads=1,
                head_dim=layers[0],
                v_head_dim=0,
                dtype="uint8",
                device=device,
            )
        shapes = tuple((1, each, 0) for each in layers)
        return PoolConfig(num_slots=num_tokens, num_layers=len(layers), kv_shapes=shapes, dtype="uint8", device=device)

    def _layers(self, check: bool) -> tuple[int, ...]:
        return (*self.slot_bytes, STAMP_BYTES) if check else self.slot_bytes

    def check_config(self, config: CacheConfig, *, check: bool = False) -> None:
        """Check that a cache fits.

        Raises:
            ConfigMismatch: it does not; the message has each field that differs, with both values.
        """
        layers = tuple((1, each, 0) for each in self._layers(check))
        pool = config.pool
        differing: list[tuple[str, object, object]] = [
            (name, found, wanted)
            for name, found, wanted in (
                ("kind", config.kind, "radix"),
                ("sliding_window_size", config.sliding_window_size, None),
                ("pool.dtype", pool.dtype, "uint8"),
                ("pool.num_layers", pool.num_layers, len(layers)),
            )
            if found != wanted
        ]
        if config.page_size > self.block_size or self.block_size % config.page_size:
            differing.append(("page_size", config.page_size, f"{self.block_size} or a divisor of it"))
        if not differing and pool.layer_shapes != layers:
            layer = next(at for at, shape in enumerate(layers) if pool.layer_shapes[at] != shape)
            differing.append((f"shape of layer {layer}", pool.layer_shapes[layer], layers[layer]))
        if differing:
            text = "; ".join(f"{name} is {found}, not {wanted}" for name, found, wanted in differing)
            raise ConfigMismatch(f"the cache does not fit the engine: {text}. `raydix start --for vllm` makes one")
