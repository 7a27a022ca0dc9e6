"""`Segment`: a layer's part of a record in an opaque pool."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

ItemType = Literal["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"]
ITEM_BYTES = dict(zip(get_args(ItemType), (8, 4, 2, 2, 1, 1, 1, 1), strict=True))


class Segment(BaseModel):
    """A layer's part of an opaque record. Its sizes are those of one slot; in a table of states, of a whole state.

    In the record of a page, the segment begins at `page_size * offset` and has `page_size * bytes` bytes. The order of
    its values is the engine's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    name: str = Field(min_length=1, max_length=512, description="the engine's name of the layer")
    layer: int = Field(ge=0)
    dtype: ItemType
    shape: tuple[Annotated[int, Field(ge=1)], ...]
    bytes: int = Field(ge=1)
    offset: int = Field(ge=0, description="where it begins: at the end of the segment before it")

    @classmethod
    def at(cls, offset: int, *, name: str, layer: int, dtype: str, shape: tuple[int, ...]) -> Self:
        """Return a segment with the bytes of its shape."""
        num_bytes = _num_bytes(dtype, shape)
        return cls.model_validate(
            {"name": name, "layer": layer, "dtype": dtype, "shape": shape, "bytes": num_bytes, "offset": offset}
        )

    def __str__(self) -> str:
        return f"{self.name} at {self.offset}: {self.shape} {self.dtype}"

    @model_validator(mode="after")
    def _bytes_are_those_of_the_shape(self) -> Self:
        needed = _num_bytes(self.dtype, self.shape)
        if self.bytes != needed:
            raise ValueError(f"bytes must be {needed}, those of shape {self.shape} in {self.dtype}, not {self.bytes}")
        return self


def _num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    num_bytes: int = prod(shape) * ITEM_BYTES.get(dtype, 0)
    return num_bytes


def check_segments(segments: Sequence[Segment], table: str, num_bytes: int, size: str) -> None:
    """Raise ValueError unless segments follow one another, and end with the record."""
    end = 0
    for segment in segments:
        if segment.offset != end:
            raise ValueError(f"{table}: {segment.name!r} must have the offset {end}, not {segment.offset}")
        end += segment.bytes
    if segments and end != num_bytes:
        raise ValueError(f"{size} must be {end}, the bytes of {table}, not {num_bytes}")


def bytes_of(segments: Any) -> int:
    """Return the sum of the bytes of segments, which are not validated yet; 0 where they are wrong."""
    if not isinstance(segments, (list, tuple)):
        return 0
    sizes = [part.get("bytes") if isinstance(part, dict) else getattr(part, "bytes", None) for part in segments]
    numbers: list[int] = [size for size in sizes if isinstance(size, int)]
    return sum(numbers)
