"""A clock with seconds that pass when the test advances it."""


class Clock:
    """Seconds that pass on `advance`."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
