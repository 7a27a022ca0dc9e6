"""`Explanation`: where a match ends, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Reason = Literal[
    "complete",  # every token can be used
    "page_alignment",  # every whole page can be used; less than a page is left over
    "window",  # more full KV is cached, but not the sliding-window KV that its end needs
    "no_state",  # more full KV is cached, but no recurrent state at its end
    "evicted",  # the next page was evicted
    "retired",  # the namespace was retired; its pages were not recorded
    "other_namespace",  # other namespaces have the next page
    "never_stored",  # the next page was never in the cache
    "forgotten",  # the next page was not in the cache for `remembered_s`; there is no record of earlier times
    "not_there",  # the next page is not in the cache, which keeps no history
    "not_shared",  # this kind of cache shares nothing
]


class Elsewhere(NamedTuple):
    """Another namespace that has the same tokens."""

    extra_key: str | None
    prefix_len: int  # tokens


@dataclass(slots=True)
class Explanation:
    """Where a match ends, and why."""

    num_tokens: int  # the key's length
    prefix_len: int  # leading tokens that can be used
    full_prefix_len: int  # leading tokens with full KV in the cache
    reason: Reason
    cause: str | None = None  # an eviction's: "watermark", "shortfall", "cap" or "request"
    seconds_ago: float | None = None  # the age of the eviction or retirement
    remembered_s: float | None = None  # the known absence of a "never_stored" or "forgotten" next page
    was_dropped: bool = False  # the tier below did not have all of an "evicted" next node
    elsewhere: Elsewhere | None = None  # the namespace with the most tokens, if any has more than this one

    @classmethod
    def of_lengths(cls, num_tokens: int, prefix_len: int, full_prefix_len: int, page_size: int) -> Explanation:
        """Return the explanation that follows from the lengths alone."""
        if full_prefix_len < num_tokens - num_tokens % page_size:
            reason: Reason = "not_there"
        else:
            reason = "complete" if full_prefix_len == num_tokens else "page_alignment"
        return cls(num_tokens, prefix_len, full_prefix_len, reason)
