"""The request for where a match ends and why, and its response."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from raydix.schemas.message import PydanticMessage
from raydix.schemas.requests import Namespace, Tokens

ExplainReason = Literal[
    "complete",
    "page_alignment",
    "window",
    "no_state",
    "evicted",
    "retired",
    "other_namespace",
    "never_stored",
    "forgotten",
    "not_there",
    "not_shared",
]

_SENTENCES: dict[str, str] = {
    "complete": "all of it can be used",
    "page_alignment": "all of its whole pages can be used; the rest is less than a page",
    "window": "more full KV is there, but not the sliding-window KV that its end needs",
    "no_state": "more full KV is there, but no recurrent state at its end",
    "evicted": "what follows was evicted",
    "retired": "its namespace was retired, with whatever was there",
    "other_namespace": "what follows is there, but in another namespace",
    "never_stored": "what follows was never stored since the cache started, {remembered_s:.1f} s ago",
    "forgotten": "what follows was not there in the last {remembered_s:.1f} s; whether it was before is forgotten",
    "not_there": "what follows is not there; this kind of cache remembers no more",
    "not_shared": "this kind of cache shares nothing",
}


class ExplainRequest(PydanticMessage):
    """Ask where a match of `tokens` ends, and why. A probe: nothing is locked, nothing changes."""

    token_field: ClassVar[str | None] = "tokens"

    tokens: Tokens
    namespace: Namespace = None


class ExplainResponse(PydanticMessage):
    """Where a match ends, and why it ends there. As text, one sentence: if a tier has more, that instead of why."""

    num_tokens: int = Field(description="tokens asked for")
    prefix_len: int = Field(description="leading tokens with KV that can be used now")
    full_prefix_len: int = Field(description="leading tokens with full-attention KV")
    reason: ExplainReason
    cause: str | None = Field(default=None, description="of an eviction: watermark, shortfall, cap or request")
    seconds_ago: float | None = Field(default=None, description="of an eviction or a retirement")
    remembered_s: float | None = Field(
        default=None, description="how far back the cache remembers evicted and retired tokens"
    )
    other_prefix_len: int = Field(default=0, description="leading tokens that are there in another namespace, if more")
    other_extra_key: str | None = Field(default=None, description="that namespace's fields")
    other_lora_id: str | None = None
    other_cache_salt: str | None = None
    host_len: int = Field(
        default=0,
        description="leading tokens that can be used now or loaded from the host tier; 0: there is no host tier",
    )
    was_dropped: bool = Field(
        default=False,
        description="tokens behind those of all tiers were evicted from the pool before they were written to the tier "
        "below it",
    )
    disk_len: int = Field(
        default=0,
        description="leading tokens that can be used now or loaded from the host tier or the disk; 0: there is no disk "
        "tier",
    )
    disk_left_s: float | None = Field(
        default=None,
        description="seconds since the page behind those of all tiers was evicted from the disk; None: it was not "
        "there, or that is forgotten",
    )

    def __str__(self) -> str:
        when = "" if self.seconds_ago is None else f", {self.seconds_ago:.1f} s ago"
        cause = "" if self.cause is None else f" ({self.cause})"
        sentence = _SENTENCES[self.reason].format(remembered_s=self.remembered_s or 0.0)
        hit = f"{self.prefix_len:,} of {self.num_tokens:,} tokens hit"
        on_disk = "" if self.disk_left_s is None else f"was on the disk until {self.disk_left_s:.1f} s ago"
        below = self._below()
        if not below:
            end = f"; it {on_disk}" if on_disk else ", and dropped before it was written" if self.was_dropped else ""
            return f"{hit}: {sentence}{cause}{when}{end}"
        end = on_disk or ("was dropped before it was written" if self.was_dropped else "")
        return f"{hit}; {below}: acquire loads them{end and f'; what follows them {end}'}"

    def _below(self) -> str:
        """Return the tokens that the tiers below have and the pool lacks; empty: there are none."""
        in_memory = max(self.prefix_len, self.host_len)
        places = {"host": in_memory - self.prefix_len, "disk": self.disk_len - in_memory}
        parts = [f"on the {place}" for place in places if places[place] > 0]
        counts = [f"{count:,}" for count in places.values() if count > 0]
        if len(parts) < 2:
            return "".join(f"{count} more are {part}" for count, part in zip(counts, parts, strict=True))
        return f"{counts[0]} more are {parts[0]} and {counts[1]} {parts[1]}"
