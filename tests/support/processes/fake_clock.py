"""A clock for what takes one: its seconds pass when a test says so."""


class Clock:
    """Seconds that pass when told."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
