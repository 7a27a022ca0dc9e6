"""Why a match ends where it ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Reason = Literal[
    "complete",  # every token can be used
    "page_alignment",  # every whole page can be used: what follows is less than a page
    "window",  # more full KV is there, but not the sliding-window KV that its end needs
    "no_state",  # more full KV is there, but no recurrent state at its end
    "evicted",  # what follows was there, and was evicted
    "retired",  # the namespace was retired, with whatever was there; what that was, is not remembered
    "other_namespace",  # what follows is there, but in other namespaces
    "never_stored",  # what follows was never there
    "forgotten",  # what follows was not there for `remembered_s`; whether it was before is forgotten
    "not_there",  # what follows is not there; the kind of cache keeps no record of what was
    "not_shared",  # the kind of cache shares nothing
]


class Elsewhere(NamedTuple):
    """Another namespace with the same tokens."""

    extra_key: str | None
    prefix_len: int  # tokens


@dataclass(slots=True)
class Explanation:
    """Where a match ends, and why it goes no further."""

    num_tokens: int  # of the key
    prefix_len: int  # leading tokens that can be used
    full_prefix_len: int  # leading tokens whose full KV is there
    reason: Reason
    cause: str | None = None  # of an eviction: "watermark", "shortfall", "cap" or "request"
    seconds_ago: float | None = None  # of an eviction or a retirement
    remembered_s: float | None = None  # how far back what was never stored, or is forgotten, would be known
    elsewhere: Elsewhere | None = None  # where most of the tokens are, if other namespaces have more

    @classmethod
    def of_lengths(cls, num_tokens: int, prefix_len: int, full_prefix_len: int, page_size: int) -> Explanation:
        """What the lengths alone tell."""
        if full_prefix_len < num_tokens - num_tokens % page_size:
            reason: Reason = "not_there"
        else:
            reason = "complete" if full_prefix_len == num_tokens else "page_alignment"
        return cls(num_tokens, prefix_len, full_prefix_len, reason)
