"""`read_capacity`: the size of a pool as users write it, in options and settings: 200_000, 1M, 1e6, 8GiB.

`k`, `M` and `G` are decimal numbers of tokens. `KB`, `MB`, `GB`, `KiB`, `MiB`, `GiB` and `TiB` are bytes. They give a
number of tokens where the bytes of a token are known. A pool has whole pages, so a capacity is rounded down to them.
The size of a tier below a pool may also be a multiple of the pool: 4x.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import NamedTuple

from raydix.actors.cluster.settings_file import SettingsError
from raydix.schemas.shown import brief, byte_size, counted

FORMS = "tokens, such as 200_000, 1M or 1e6, or bytes, such as 8GiB"
HOST_OPTION = "--host-capacity"
DISK_OPTION = "--disk"
TIER_FORMS = "tokens, such as 200_000 or 1M, bytes, such as 64GiB, or a multiple of the pool, such as 4x"

_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_NUMBER = re.compile(r"(\d[\d_,]*(?:\.\d+)?(?:[eE]\+?\d{1,2})?)\s*([a-zA-Z]*)", re.ASCII)
_MULTIPLE = re.compile(r"(\d[\d_,]*(?:\.\d+)?)\s*[xX]", re.ASCII)
_MOST_CHARACTERS = 64


class Capacity(NamedTuple):
    """The size of a pool: a number of tokens, or of bytes."""

    text: str  # the size as the user wrote it
    place: str  # begins an error: the option, or the file, line and key
    number: int
    is_bytes: bool

    def num_tokens(self, page_size: int, token_bytes: int = 0, unknown: str = "") -> int:
        """Return the tokens of a pool of at most this size, in whole pages.

        Args:
            token_bytes: the bytes of a token in the pool; 0: not known.
            unknown: why they are not known, for the error.

        Raises:
            SettingsError: it holds no page, or more tokens than a pool can have, or bytes are given and `token_bytes`
                is 0.
        """
        # This imports pydantic, which takes long: a wrong option is reported before.
        from raydix.schemas.config import MAX_SLOTS

        if self.is_bytes and not token_bytes:
            raise SettingsError(
                f"{self.place} must be tokens, such as 200_000 or 1M, not {self.text!r}: {unknown}", "1M, say"
            )
        tokens = self.number // token_bytes if self.is_bytes else self.number
        if tokens < page_size:
            held = f"{self.text!r}, which is {counted(tokens, 'token')}"
            size = f" of {byte_size(token_bytes)} each" if self.is_bytes else ""
            raise SettingsError(
                f"{self.place} must hold a page, {counted(page_size, 'token')}{size}, not {held}",
                f"{1000 * page_size}, say",
            )
        if tokens > MAX_SLOTS:
            bytes_meant = f"; for bytes write {self.text}iB" if self.text[-1:].lower() in ("k", "m", "g") else ""
            raise SettingsError(
                f"{self.place} must be at most {counted(MAX_SLOTS, 'token')}, not {self.text!r}, which is {tokens:,}",
                f"a smaller number{bytes_meant}",
            )
        return tokens - tokens % page_size


def read_tier_capacity(text: str, place: str, pool_slots: int) -> Capacity:
    """Return the size of a tier that a text names: as `read_capacity`, or as a multiple of the pool ("4x").

    Args:
        place: begins an error: the option, or the file, line and key.
        pool_slots: of the pool.

    Raises:
        SettingsError: it names none of them.
    """
    found = _MULTIPLE.fullmatch(text.strip()) if len(text) <= _MOST_CHARACTERS else None
    if found is None:
        return read_capacity(text, place, TIER_FORMS)
    return Capacity(text.strip(), place, int(_decimal(found) * pool_slots), is_bytes=False)


def read_disk(text: str) -> tuple[str, Capacity]:
    """Return the folder and the size of a disk tier that `--disk PATH:SIZE` names. The path may have colons.

    The size is as of `read_tier_capacity`, for a pool of one slot: a multiple of the pool is known by its text alone.

    Raises:
        SettingsError: it has another form.
    """
    path, _, size = text.rpartition(":")
    try:
        if not path:
            raise SettingsError("no path")
        return path, read_tier_capacity(size, DISK_OPTION, pool_slots=1)
    except SettingsError:
        raise SettingsError(
            f"{DISK_OPTION} must be PATH:SIZE, not {brief(text)}; SIZE is {TIER_FORMS}",
            f"{DISK_OPTION} /nvme/raydix:1TiB",
        ) from None


def read_bytes(text: str, place: str) -> int:
    """Return the number of bytes that a text names, such as "1TiB" or "2e12".

    Args:
        place: begins an error, such as the file, line and key.

    Raises:
        SettingsError: it names none.
    """
    forms = "bytes, such as 1TiB or 2e12"
    size = read_capacity(text, place, forms)
    if not size.is_bytes and size.text[-1].isalpha():  # 1M would be tokens elsewhere
        raise SettingsError(f"{place} must be {forms}, not {brief(text)}", f"{place.split()[-1]} {size.text}iB")
    return size.number


def read_capacity(text: str, place: str, forms: str = FORMS) -> Capacity:
    """Return the size that a text names: tokens ("200_000", "1.5M", "1e6") or bytes ("8GiB", "500 MB").

    Args:
        place: begins an error: the option, or the file, line and key.
        forms: the forms of a size, for the error.

    Raises:
        SettingsError: it names neither.
    """
    found = _NUMBER.fullmatch(text.strip()) if len(text) <= _MOST_CHARACTERS else None
    unit = found.group(2).lower() if found else ""
    if found is None or unit not in _UNITS:
        raise SettingsError(f"{place} must be {forms}, not {brief(text)}", f"{place.split()[-1]} 1M")
    return Capacity(text.strip(), place, int(_decimal(found) * _UNITS[unit]), unit.endswith("b"))


def _decimal(found: re.Match[str]) -> Decimal:
    """Return the number that the first group of a match has."""
    return Decimal(found.group(1).replace("_", "").replace(",", ""))
