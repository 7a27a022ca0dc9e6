"""Errors of transformers, as `ConfigMismatch`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from raydix.schemas import CacheError, ConfigMismatch

_LONGEST = 300  # characters of a reason


@contextmanager
def refusing(failure: str, raises: type[Exception] = ConfigMismatch) -> Iterator[None]:
    """Convert any error of the code inside, which makes or runs a model, to one class.

    transformers has no common class of errors: it raises any of Python's for a model that it cannot make or run. Errors
    of a cache and a lack of memory are not converted.

    Args:
        failure: the beginning of the message, such as "transformers cannot make this llama model".
        raises: the class to raise.
    """
    try:
        yield
    except (raises, CacheError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise raises(f"{failure}: {type(error).__name__}: {_short(error)}") from error


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
