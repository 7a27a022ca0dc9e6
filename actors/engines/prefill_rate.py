"""`PrefillRate`: how fast an engine computes prompts, by the steps that it has run."""

from __future__ import annotations

_LEAST_TOKENS = 256  # prompt tokens of a step that counts; shorter steps say little
_KEPT = 0.8  # share of its weight that an earlier step keeps with each later step


class PrefillRate:
    """A moving mean of the prompt tokens that an engine computes in a second, from steps with at least 256 of them."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0  # weighted sums over the steps so far
        self._num_tokens = 0  # prompt tokens of the step that runs
        self._begun_at = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """The mean; None: no such step was run yet."""
        return self._tokens / self._seconds if self._seconds else None

    def begin_step(self, num_tokens: int, now_s: float) -> None:
        """Note that a step with so many prompt tokens begins, and that the one before has ended."""
        self.end_step(now_s)
        self._num_tokens, self._begun_at = num_tokens, now_s

    def end_step(self, now_s: float) -> None:
        """Note that the step has ended. No effect if that is known."""
        if self._num_tokens >= _LEAST_TOKENS and now_s > self._begun_at:
            self._tokens = _KEPT * self._tokens + self._num_tokens
            self._seconds = _KEPT * self._seconds + now_s - self._begun_at
        self._num_tokens = 0
