"""`DuePrefixes`: the prefixes that wait to be written to a tier, the one used last first."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator

from raydix.cache_core import RadixKey

_MOST = 4096  # prefixes
_MOST_BYTES = 64 * 2**20  # of their token ids


class DuePrefixes:
    """A bounded queue of prefixes, as a tree's keys of whole pages. The one that was not used for longest falls out."""

    def __init__(self) -> None:
        self._keys: OrderedDict[tuple[str | None, bytes], RadixKey] = OrderedDict()  # the one used last comes last
        self._num_bytes = 0
        self._numbers = Counter[str | None]()  # namespace -> its prefixes

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[RadixKey]:
        """Yield the prefixes, the one used last at the end."""
        return iter(self._keys.values())

    def offer(self, key: RadixKey) -> int:
        """Add a prefix, or note its use; return how many others have fallen out."""
        name, num_dropped = _name(key), 0
        if self._keys.pop(name, None) is None:
            self._num_bytes += len(key.data)
            self._numbers[key.extra_key] += 1
        self._keys[name] = key
        while len(self._keys) > _MOST or self._num_bytes > _MOST_BYTES:
            self.take(next(iter(self._keys.values())))
            num_dropped += 1
        return num_dropped

    @property
    def namespaces(self) -> Collection[str | None]:
        """The namespaces of the prefixes."""
        return self._numbers.keys()

    def hottest(self) -> RadixKey | None:
        """Return the prefix that was used last; None if there is none."""
        return next(reversed(self._keys.values()), None)

    def take(self, key: RadixKey) -> None:
        """Remove a prefix."""
        del self._keys[_name(key)]
        self._num_bytes -= len(key.data)
        self._numbers[key.extra_key] -= 1
        if not self._numbers[key.extra_key]:
            del self._numbers[key.extra_key]

    def forget(self, is_meant: Callable[[str | None], bool]) -> None:
        """Remove the prefixes of namespaces that are retired."""
        for key in [key for key in self._keys.values() if is_meant(key.extra_key)]:
            self.take(key)


def _name(key: RadixKey) -> tuple[str | None, bytes]:
    return key.extra_key, key.data
