"""`RadixKey`: token ids packed into bytes, so that the tree compares them with memcmp."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from raydix.cache_core.errors import InvalidKeyError
from raydix.cache_core.kernels import Key

NARROW_LIMIT = 2**32
_UNSIGNED: dict[int, np.dtype[Any]] = {4: np.dtype("<u4"), 8: np.dtype("<u8")}  # by bytes an id


class RadixKey(Key):
    """A row of token ids within a namespace: what a prefix is looked up by.

    Takes a list of ids, a list of equally long tuples of ids (EAGLE-style bigrams), an `array.array`, or a 1-D integer
    numpy array or torch tensor. Ids lie in [0, 2**64). `extra_key`, a str, isolates namespaces: keys of different
    ones never share a node. Of another `RadixKey` the ids are taken, and its namespace, too, where none is given.

    The ids are packed into a copy. Those of a numpy array of 32-bit integers in a row lie packed already: they are read
    where they are, so leave such an array as it is while its key is in use, or have them `kept`. Either costs one pass
    over the ids, in C. What a cache takes over it copies.

    Raises:
        InvalidKeyError: an id is negative, fractional or too large, tuples differ in length, or `extra_key` is no str.
    """

    __slots__ = ()

    data: bytes  # little-endian ids; of lent ones a copy, from when it is first asked for
    width: int  # bytes an id
    arity: int  # ids of a tuple; 0: plain ids
    unit: int  # bytes of one element
    num_tokens: int
    extra_key: str | None

    @staticmethod
    def _pack_slowly(token_ids: Any) -> tuple[bytes, int, int]:
        return _pack(token_ids)

    def kept(self) -> Self:
        """This key, whose ids are a copy of its own from now on: whoever holds on to a key wants that."""
        _ = self.data
        return self

    @property
    def ids(self) -> NDArray[Any]:
        """The ids, flat, as a read-only uint32 or uint64 array."""
        return np.frombuffer(self.data, _UNSIGNED[self.width])

    @property
    def token_ids(self) -> list[int] | list[tuple[int, ...]]:
        """The elements as Python integers or tuples. O(n)."""
        if self.arity:
            return list(map(tuple, self.ids.reshape(-1, self.arity).tolist()))
        ids: list[int] = self.ids.tolist()
        return ids

    def with_width(self, width: int) -> RadixKey:
        """The same key at another width; narrowing is the caller's promise that every id fits."""
        if width == self.width:
            return self
        return RadixKey.from_packed(self.ids.astype(_UNSIGNED[width]).tobytes(), width, self.extra_key, self.arity)

    def bigrams(self) -> RadixKey:
        """The pairs of neighbouring ids of a plain key: n ids make n - 1 pairs."""
        if self.arity:
            raise InvalidKeyError("bigrams are made of plain ids")
        ids = self.ids
        pairs = np.stack((ids[:-1], ids[1:]), axis=1) if len(ids) else np.empty((0, 2), ids.dtype)
        return RadixKey.from_packed(pairs.tobytes(), self.width, self.extra_key, 2)

    def num_narrow(self) -> int:
        """How many leading elements fit in 32 bits an id."""
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
                raise InvalidKeyError("a key can be sliced in steps of 1 only")
        else:
            start = index + len(self) if index < 0 else index
            if not 0 <= start < len(self):
                raise IndexError(f"index {index} is outside a key of length {len(self)}")
            stop = start + 1
        part = self.data[start * self.unit : max(start, stop) * self.unit]
        return _narrowed(RadixKey.from_packed(part, self.width, self.extra_key, self.arity))

    def __add__(self, other: RadixKey) -> RadixKey:
        """The elements of both in a row; they must be of one namespace and arity."""
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
    """The key at the least width that holds it, so that equal ids are equal bytes."""
    return key.with_width(4) if key.width == 8 and key.num_narrow() == len(key) else key


def _pack(token_ids: Any) -> tuple[bytes, int, int]:
    """Packed ids, the bytes of an id, and the ids of a tuple (0: plain ids)."""
    if isinstance(token_ids, torch.Tensor):
        if token_ids.is_floating_point() or token_ids.is_complex():
            raise InvalidKeyError(f"token ids must be integers, not {token_ids.dtype}: cast them first")
        return _pack_array(_array_of(token_ids))
    if isinstance(token_ids, (np.ndarray, array)):
        return _pack_array(np.asarray(token_ids))
    if isinstance(token_ids, RadixKey):
        return token_ids.data, token_ids.width, token_ids.arity
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, (str, bytes, bytearray)):
        raise InvalidKeyError(f"token ids must be a list, array or tensor, not {type(token_ids).__name__}")
    if len(token_ids) and isinstance(token_ids[0], tuple):
        return _pack_tuples(token_ids)
    return _pack_ints(token_ids)


def _array_of(ids: torch.Tensor) -> NDArray[Any]:
    try:
        return ids.detach().resolve_neg().cpu().numpy()
    except (TypeError, RuntimeError) as error:
        is_dense = ids.layout is torch.strided and not (ids.is_nested or ids.is_quantized or ids.is_meta)
        if is_dense and isinstance(error, RuntimeError):  # of a GPU
            raise
        raise InvalidKeyError("token ids must be a dense tensor of integers that has values") from None


def _pack_ints(ids: Sequence[Any], arity: int = 0) -> tuple[bytes, int, int]:
    for code, width in (("I", 4), ("Q", 8)):
        try:
            return struct.pack(f"<{len(ids)}{code}", *ids), width, arity
        except struct.error:
            continue
        except (TypeError, RuntimeError):  # numpy's and torch's, of an array or tensor that is no integer
            break
    raise InvalidKeyError("every token id must be an integer in [0, 2**64)")


def _pack_tuples(tuples: Sequence[Any]) -> tuple[bytes, int, int]:
    arity = len(tuples[0])
    if not 0 < arity < 256 or not all(isinstance(each, tuple) and len(each) == arity for each in tuples):
        raise InvalidKeyError("the tuples of a key must be of one length, between 1 and 255")
    return _pack_ints(list(chain.from_iterable(tuples)), arity)


def _pack_array(ids: NDArray[Any]) -> tuple[bytes, int, int]:
    dtype = ids.dtype
    if ids.ndim != 1 or dtype.kind not in "iu":
        raise InvalidKeyError(f"token ids must be a 1-D array of integers, not {dtype} of shape {ids.shape}")
    width = 4
    if ids.size:  # `argmin` and `argmax` cost a fraction of `min` and `max`
        if dtype.kind == "i" and (lowest := ids.item(ids.argmin())) < 0:
            raise InvalidKeyError(f"token ids must not be negative: found {lowest}")
        if dtype.itemsize == 8 and ids.item(ids.argmax()) >= NARROW_LIMIT:
            width = 8
    return ids.astype(_UNSIGNED[width], copy=False).tobytes(), width, 0
