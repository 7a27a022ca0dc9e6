"""`RadixKey`: token ids packed into bytes, so that the tree compares them with memcmp.

The service's token ids arrive packed, and `RadixKey.from_packed` takes them; all other callers' ids are packed here.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raydix.cache_core.errors import InvalidKeyError
from raydix.cache_core.kernels import Key

NARROW_LIMIT = 2**32
_UNSIGNED: dict[int, np.dtype[Any]] = {4: np.dtype("<u4"), 8: np.dtype("<u8")}  # bytes an id -> type


class RadixKey(Key):
    """Token ids within a namespace, by which a cache finds a prefix.

    Args:
        token_ids: a list of ids in [0, 2**64), a list of equally long tuples of them (EAGLE-style bigrams), an
            `array.array`, a 1-D integer numpy array or torch tensor, or another `RadixKey`.
        extra_key: the namespace: keys of different namespaces never share a node. None: the default namespace, or that
            of the other key.

    The ids are packed into a copy, in one pass. A list of ints and an int32 array take the least time.

    Raises:
        InvalidKeyError: an id is negative, fractional or too large, tuples differ in length, or `extra_key` is not a
            str.
    """

    __slots__ = ()

    data: bytes  # little-endian ids
    width: int  # bytes an id
    arity: int  # ids of a tuple; 0: plain ids
    unit: int  # bytes of one element
    num_tokens: int
    extra_key: str | None

    @staticmethod
    def _pack_slowly(token_ids: Any) -> tuple[bytes, int, int]:
        return _pack(token_ids)

    @property
    def ids(self) -> NDArray[Any]:
        """The ids, flat: a read-only 1-D array of uint32 or uint64."""
        return np.frombuffer(self.data, _UNSIGNED[self.width])

    @property
    def token_ids(self) -> list[int] | list[tuple[int, ...]]:
        """The elements as Python integers or tuples. O(n)."""
        if self.arity:
            return list(map(tuple, self.ids.reshape(-1, self.arity).tolist()))
        ids: list[int] = self.ids.tolist()
        return ids

    def with_width(self, width: int) -> RadixKey:
        """Return this key with `width` bytes an id. The caller must know that every id fits."""
        if width == self.width:
            return self
        return RadixKey.from_packed(self.ids.astype(_UNSIGNED[width]).tobytes(), width, self.extra_key, self.arity)

    def bigrams(self) -> RadixKey:
        """Return the pairs of neighbouring ids of a plain key: n ids make n - 1 pairs."""
        if self.arity:
            raise InvalidKeyError("bigrams need a key of plain ids, not of tuples")
        ids = self.ids
        pairs = np.stack((ids[:-1], ids[1:]), axis=1) if len(ids) else np.empty((0, 2), ids.dtype)
        return RadixKey.from_packed(pairs.tobytes(), self.width, self.extra_key, 2)

    def num_narrow(self) -> int:
        """Return the number of leading elements with ids of at most 32 bits."""
        if self.width == 4:
            return len(self)
        wide = np.flatnonzero(self.ids >= NARROW_LIMIT)
        return int(wide[0]) // (self.arity or 1) if len(wide) else len(self)

    def __len__(self) -> int:
        return self.num_tokens

    def __iter__(self) -> Iterator[int | tuple[int, ...]]:
        return iter(self.token_ids)

    def __getitem__(self, index: int | slice) -> RadixKey:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise InvalidKeyError(f"a key is sliced in steps of 1, not {step}")
        else:
            start = index + len(self) if index < 0 else index
            if not 0 <= start < len(self):
                raise IndexError(f"index {index} is outside a key of length {len(self)}")
            stop = start + 1
        part = self.data[start * self.unit : max(start, stop) * self.unit]
        return _narrowed(RadixKey.from_packed(part, self.width, self.extra_key, self.arity))

    def __add__(self, other: RadixKey) -> RadixKey:
        """Return the elements of both keys; they must have the same namespace and arity."""
        if (self.extra_key, self.arity) != (other.extra_key, other.arity):
            raise InvalidKeyError("keys of different namespaces cannot be joined")
        width = max(self.width, other.width)
        data = self.with_width(width).data + other.with_width(width).data
        return RadixKey.from_packed(data, width, self.extra_key, self.arity)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RadixKey):
            return NotImplemented
        return (self.extra_key, self.arity, self.width, self.data) == (
            other.extra_key,
            other.arity,
            other.width,
            other.data,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_packed, (self.data, self.width, self.extra_key, self.arity)

    def __hash__(self) -> int:
        return hash((self.extra_key, self.arity, self.data))

    def __repr__(self) -> str:
        head = ", ".join(map(str, self[:8].token_ids))
        more = ", ..." if len(self) > 8 else ""
        return f"RadixKey([{head}{more}], len={len(self)}, extra_key={self.extra_key!r})"


def check_key(key: object) -> None:
    """Raise InvalidKeyError unless it is a `RadixKey`."""
    if not isinstance(key, RadixKey):
        raise InvalidKeyError(f"a RadixKey is needed, not {type(key).__name__}") from None


def _narrowed(key: RadixKey) -> RadixKey:
    """Return the key at the least width that holds its ids, so that equal ids are equal bytes."""
    return key.with_width(4) if key.width == 8 and key.num_narrow() == len(key) else key


def _pack(token_ids: Any) -> tuple[bytes, int, int]:
    """Return the packed ids, the bytes of an id, and the ids of a tuple (0: plain ids)."""
    if isinstance(token_ids, RadixKey):
        return token_ids.data, token_ids.width, token_ids.arity
    if isinstance(token_ids, torch.Tensor):
        token_ids = _array_of(token_ids)
    if isinstance(token_ids, (np.ndarray, array)):
        return *_pack_array(np.asarray(token_ids)), 0
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, (str, bytes, bytearray)):
        raise InvalidKeyError(f"token ids must be a list, array or tensor, not {type(token_ids).__name__}")
    if not len(token_ids) or not isinstance(token_ids[0], tuple):
        return *_pack_ints(token_ids), 0
    arity = len(token_ids[0])
    if not 0 < arity < 256 or not all(isinstance(token, tuple) and len(token) == arity for token in token_ids):
        raise InvalidKeyError("the tuples of a key must be of one length, between 1 and 255")
    return *_pack_ints(list(chain.from_iterable(token_ids))), arity


def _array_of(ids: torch.Tensor) -> NDArray[Any]:
    if ids.is_floating_point() or ids.is_complex():
        raise InvalidKeyError(f"token ids must be integers, not {ids.dtype}: cast them first")
    try:
        return ids.detach().resolve_neg().cpu().numpy()
    except (TypeError, RuntimeError) as error:
        is_dense = ids.layout is torch.strided and not (ids.is_nested or ids.is_quantized or ids.is_meta)
        if is_dense and isinstance(error, RuntimeError):  # A GPU has failed.
            raise
        raise InvalidKeyError("token ids must be a dense tensor of integers that has values") from None


def _pack_ints(ids: Sequence[Any]) -> tuple[bytes, int]:
    for code, width in (("I", 4), ("Q", 8)):
        with suppress(struct.error, TypeError, RuntimeError):  # the others: of an array or tensor that is no integer
            return struct.pack(f"<{len(ids)}{code}", *ids), width
    raise InvalidKeyError("every token id must be an integer in [0, 2**64)")


def _pack_array(ids: NDArray[Any]) -> tuple[bytes, int]:
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidKeyError(f"token ids must be a 1-D array of integers, not {ids.dtype} of shape {ids.shape}")
    every_bit = int(np.bitwise_or.reduce(ids))  # negative if any id is, and wide if any id is
    if every_bit < 0:
        raise InvalidKeyError(f"token ids must not be negative: found {int(ids.min())}")
    width = 8 if every_bit >= NARROW_LIMIT else 4
    return ids.astype(_UNSIGNED[width], copy=False).tobytes(), width
