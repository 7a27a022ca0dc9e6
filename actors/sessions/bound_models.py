"""`BoundModels`: the models that one session has bound. Its client keeps one, and so does the cache."""

from __future__ import annotations

from itertools import islice

MAX_BINDINGS = 16_384  # limit for a cache; limit for the memory of a session
LAPSED = 0  # stands for the generation of a binding that ended with the session before


class BoundModels:
    """The generations that a session has bound, by `lora_id`, the latest last; None is the base model.

    Attributes:
        generations: by `lora_id`; at most `MAX_BINDINGS` of them, and the base's.
        forgot: there were more. A `lora_id` that is not among them may have been bound, too.
    """

    __slots__ = ("forgot", "generations")

    def __init__(self) -> None:
        self.generations: dict[str | None, int] = {}
        self.forgot = False

    def add(self, lora_id: str | None, generation: int) -> None:
        """Note that the session is bound to this generation."""
        self.generations.pop(lora_id, None)
        self.generations[lora_id] = generation
        if len(self.generations) > MAX_BINDINGS + 1:
            del self.generations[next(adapter for adapter in self.generations if adapter is not None)]
            self.forgot = True

    def may_have_bound(self, lora_id: str | None) -> bool:
        """Return whether the session has bound it, or may have: the base's binding is never forgotten."""
        return lora_id in self.generations or (self.forgot and lora_id is not None)

    def latest(self, limit: int) -> tuple[tuple[str | None, ...], bool]:
        """Return the `lora_id`s bound last, at most `limit`, the base among them; and whether there were more."""
        adapters = (adapter for adapter in reversed(self.generations) if adapter is not None)
        base = [None] if None in self.generations else []
        names = [*islice(adapters, limit - 1), *base]
        return tuple(reversed(names)), self.forgot or len(names) < len(self.generations)
