"""Runs of tokens (or blocks) as plain lists, and what two of them share."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch

from raydix.cache_core.errors import InvalidKeyError

_AS_THEY_ARE = {int, str, bytes, tuple}  # what most tokens are, and most blocks


def _scalar(item: Any) -> Any:
    """Python's value in place of NumPy's, or of that of a tensor without dimensions."""
    is_scalar = isinstance(item, np.generic) or (isinstance(item, torch.Tensor) and not item.dim())
    return item.item() if is_scalar else item


def _token(item: Any) -> Any:
    token = _scalar(item)
    if isinstance(token, torch.Tensor):  # hashed by which object it is, not by value
        raise InvalidKeyError(f"a token must be a value, not a tensor of shape {tuple(token.shape)}")
    return token


def plain_list(items: Any, plain: Callable[[Any], Any] = _scalar) -> list[Any]:
    """A list of its own, with Python's values in place of NumPy's (or torch's)."""
    if hasattr(items, "tolist"):
        plain = items.tolist()
        if not isinstance(plain, list):
            raise InvalidKeyError(f"one row of values is needed, not {items!r}")
        return plain
    return [item if type(item) in _AS_THEY_ARE else plain(item) for item in items]


def token_list(tokens: Any) -> list[Hashable]:
    """A list of its own of at least one token, each of them hashable by value, else InvalidKeyError."""
    run = plain_list(tokens, _token)
    if not run:
        raise InvalidKeyError("no tokens")
    try:
        hash(tuple(run))
    except TypeError as error:
        raise InvalidKeyError(f"tokens must be hashable: {error}") from error
    return run


def common_pages(tokens: list[Hashable], run: list[Hashable], page: int) -> int:
    """How many leading pages two lists share whose first pages are equal. O(tokens shared and as many again)."""
    low, high = 1, min(len(tokens), len(run)) // page  # the first `low` are equal, none beyond `high` is
    while low < high:
        middle = (low + high + 1) // 2
        if tokens[low * page : middle * page] == run[low * page : middle * page]:
            low = middle
        else:
            high = middle - 1
    return low
