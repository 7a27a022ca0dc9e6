"""The version of the protocol between clients and a cache, and the handshake that compares versions.

A handshake is a row of one string, one integer and one string: "raydix", the protocol, and the package's version. On a
Unix socket it is the payload of the first frame, and of the answer to it, as a JSON array in UTF-8. Over Ray it is the
argument and the result of the actor's method `handshake`. This layout never changes, whatever the protocol.
A first frame or an answer of another form is of protocol 0, which had no handshake.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Literal

from raydix.schemas.errors import ConfigMismatch
from raydix.schemas.shown import shown
from raydix.schemas.version import package_version

# Raise it whenever a message, a call or the meaning of one changes. A default of `CacheConfig` that changes gets a new
# protocol number: `CacheConfig.digest()` leaves out fields that have their default, so equal digests would stand for
# different configurations otherwise. A field that is added with a default needs no new number.
PROTOCOL = 10

Handshake = tuple[str, int, str]
_NAME = "raydix"
_UNKNOWN = "unknown"
_MAX_BYTES = 1024  # the largest packed handshake
_MAX_PROTOCOL = 2**31 - 1
_MAX_VERSION = 64  # characters that an error shows


@cache
def handshake() -> Handshake:
    """Return the handshake of this process."""
    return _NAME, PROTOCOL, package_version()


@cache
def packed_handshake() -> bytes:
    """Return the handshake of this process as the payload of a frame."""
    return json.dumps(handshake()).encode()


def read_handshake(row: object) -> Handshake | None:
    """Return the handshake that another process has sent, as a row or packed; None if it is of protocol 0."""
    if isinstance(row, (bytes, memoryview)):
        try:
            row = json.loads(bytes(row)) if len(row) <= _MAX_BYTES else None
        except (ValueError, RecursionError):
            return None
    match row:
        case [str(name), int(protocol), str(package_version)] if name == _NAME and 0 <= protocol <= _MAX_PROTOCOL:
            return name, int(protocol), shown(package_version)[:_MAX_VERSION]
    return None


def check_handshake(row: object, sender: Literal["cache", "client"]) -> None:
    """Compare the handshake that the cache, or a client, has sent with this process's.

    Args:
        row: the handshake, as a row or packed; anything else is of protocol 0.

    Raises:
        ConfigMismatch: the protocols differ; the message names both versions, and the process to restart.
    """
    _, protocol, package_version = read_handshake(row) or (_NAME, 0, _UNKNOWN)
    if protocol == PROTOCOL:
        return
    own = handshake()[2]
    theirs, ours = f"protocol {protocol} (raydix {package_version})", f"protocol {PROTOCOL} (raydix {own})"
    if sender == "cache":
        advice = f"restart the cache with raydix {own}, or install the cache's version of raydix here"
    else:
        advice = f"install raydix {own} in the client's environment and restart the client"
    receiver = "client" if sender == "cache" else "cache"
    raise ConfigMismatch(f"the {sender} speaks {theirs}, but this {receiver} speaks {ours}: {advice}")
