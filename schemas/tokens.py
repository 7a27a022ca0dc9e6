"""`TokenIds`: token ids in messages, packed as little-endian unsigned integers and checked once."""

from __future__ import annotations

import struct
import sys
from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from raydix.schemas.shown import shown

PACKED_DTYPES = _INT32, _UINT32 = np.dtype("<i4"), np.dtype("<u4")  # the bytes of such arrays are packed ids already
_or = np.bitwise_or.reduce


class TokenIds:
    """Immutable token ids, 4 bytes each, or 8 each if one of them needs more than 32 bits.

    `TokenIds.pack(ids)` makes one. Equal ids always pack to equal bytes, so a comparison is a memcmp.
    """

    __slots__ = ("data", "width")

    def __init__(self, data: bytes, width: int) -> None:
        self.data = data  # little-endian, `width` bytes an id
        self.width = width  # 4 or 8

    @classmethod
    def pack(cls, ids: Any) -> TokenIds:
        """Pack a list, tuple, `array.array`, 1-D numpy array or 1-D torch tensor of ids in [0, 2**64).

        Takes one pass over the ids, in C. Packed ids are returned as they are.

        Raises:
            ValueError: an id is negative, fractional or too large, or the ids are not one-dimensional integers.
        """
        if type(ids) is np.ndarray:
            return cls._pack_array(ids)
        if isinstance(ids, TokenIds):
            if not ids.is_whole():
                raise ValueError("the packed token ids are torn: pack them with TokenIds.pack")
            return ids
        if isinstance(ids, (list, tuple, range)):
            return cls._pack_sequence(ids)
        return cls._pack_array(_as_array(ids))

    @classmethod
    def _pack_sequence(cls, ids: list[Any] | tuple[Any, ...] | range) -> TokenIds:
        for code, width in (("I", 4), ("Q", 8)):
            try:
                return cls(struct.pack(f"<{len(ids)}{code}", *ids), width)
            except struct.error:
                continue
            except (TypeError, RuntimeError):  # An id is an array or a tensor, not an integer.
                break
        raise ValueError(f"token ids must be integers in [0, 2**64): {_what_else(ids)}")

    @classmethod
    def _pack_array(cls, ids: NDArray[Any]) -> TokenIds:
        if ids.ndim != 1:
            raise ValueError(f"token ids must be one-dimensional, not of shape {ids.shape}")
        if ids.dtype is _UINT32:
            return cls(ids.tobytes(), 4)
        if ids.dtype.kind not in "iu":
            raise ValueError(f"token ids must be integers, not {ids.dtype}: cast them first")
        every_bit = int(_or(ids))  # one pass: negative if any id is, wide if any id is
        if every_bit < 0:
            raise ValueError(f"token ids must not be negative: found {int(ids.min())}")
        if ids.dtype is _INT32:
            return cls(ids.tobytes(), 4)
        width = 8 if every_bit >> 32 else 4
        return cls(ids.astype(f"<u{width}", copy=False).tobytes(), width)

    @property
    def ids(self) -> NDArray[Any]:
        """The ids as a read-only numpy view, uint32 or uint64."""
        return np.frombuffer(self.data, f"<u{self.width}")

    def tolist(self) -> list[int]:
        """Return the ids as Python integers."""
        ids: list[int] = self.ids.tolist()
        return ids

    def __len__(self) -> int:
        return len(self.data) // self.width

    def slice(self, start: int, stop: int) -> TokenIds:
        """Return the ids [start, stop), packed in 4 bytes each if they fit."""
        part = self.data[start * self.width : stop * self.width]
        return TokenIds(part, 4) if self.width == 4 else TokenIds._pack_array(np.frombuffer(part, "<u8"))

    def is_whole(self) -> bool:
        """Whether the bytes are a whole number of ids, 4 or 8 bytes each."""
        return self.width in (4, 8) and isinstance(self.data, bytes) and len(self.data) % self.width == 0

    def starts_with(self, prefix: TokenIds) -> bool:
        """Whether the first `len(prefix)` ids are the ids of `prefix`."""
        if self.width == prefix.width:
            return self.data.startswith(prefix.data)
        return len(self) >= len(prefix) and bool((self.ids[: len(prefix)] == prefix.ids).all())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenIds) and (self.width, self.data) == (other.width, other.data)

    def __hash__(self) -> int:
        return hash((self.width, self.data))

    def __reduce__(self) -> tuple[type[TokenIds], tuple[bytes, int]]:
        return TokenIds, (self.data, self.width)

    def __repr__(self) -> str:
        if not self.is_whole():
            return f"TokenIds({self.data!r}, width={self.width!r})"
        head = ", ".join(map(str, self.ids[:6].tolist()))
        return f"TokenIds([{head}{', ...' if len(self) > 6 else ''}], len={len(self)})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(cls.pack)


def _as_array(ids: Any) -> NDArray[Any]:
    """Return a numpy view of an array or tensor. Does not import torch: a caller with a tensor has done so."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(ids, torch.Tensor):
        if ids.is_floating_point() or ids.is_complex():
            raise ValueError(f"token ids must be integers, not {ids.dtype}: cast them first")
        try:
            return np.asarray(ids.detach().resolve_neg().cpu())
        except (TypeError, RuntimeError) as error:
            is_dense = ids.layout is torch.strided and not (ids.is_nested or ids.is_quantized or ids.is_meta)
            if is_dense and isinstance(error, RuntimeError):  # A GPU has failed.
                raise
            raise ValueError("token ids must be a dense tensor of integers that has values") from None
    if isinstance(ids, array) or hasattr(ids, "__array__"):
        try:
            return np.asarray(ids)
        except Exception as error:  # the array's own: it lies on a GPU, say
            raise ValueError(f"token ids cannot be read from {type(ids).__name__}: {shown(str(error))}") from None
    raise ValueError(f"token ids must be a list, array or tensor of integers, not {type(ids).__name__}")


def _what_else(ids: Any) -> str:
    """Return the reason why a sequence is not one of ids."""
    if len(ids) == 1 and (isinstance(ids[0], (list, tuple)) or getattr(ids[0], "ndim", False)):
        return "this is a batch of one row, pass the row alone"
    return "found one that is negative, fractional, too large or no integer"
