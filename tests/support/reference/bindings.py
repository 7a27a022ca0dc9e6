"""A simple model of a cache with sessions that are bound to models, to compare the real one with.

Pages are of one token, and nothing is ever evicted. Each cached token has a label: the weights that computed its KV.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

Name = str | None  # a `lora_id`; None: the base
Space = tuple[Name, str | None]  # `lora_id` and `cache_salt`
Tokens = tuple[int, ...]


@dataclass
class Held:
    """A lease."""

    space: Space
    tokens: Tokens
    labels: list[str]  # of its leading tokens, as far as they were cached
    began: int  # when
    retired: bool = False


@dataclass
class Client:
    """A client, in whatever session it is."""

    weights: dict[Name, str]
    bound: dict[Name, int] = field(default_factory=dict)  # generations
    leases: dict[int, Held] = field(default_factory=dict)


class Refused(Exception):
    """ConfigMismatch."""


class ReferenceBindings:
    """The rules, one after the other."""

    def __init__(self, most: int, clients: list[Client]) -> None:
        self.most = most
        self.clients = clients
        self.models: dict[Name, tuple[int, str]] = {}  # used least recently first
        self.label: str | None = None  # of the base's generation
        self.generation = 0  # of the base
        self.cached: dict[Space, dict[Tokens, str]] = {}
        self.ended: dict[Name, int] = {}  # when its last generation did
        self._numbers, self._times, self._leases = count(1), count(1), count(1)
        self.now = 0

    def bind(self, client: Client, name: Name) -> int:
        """Bind it with the weights that it has."""
        if name not in self.models:
            if name is None:
                self._name(client.weights[None])
            self.models[name] = self.generation if name is None else next(self._numbers), client.weights[name]
            if len(self.models) > self.most:
                self.retire(next(each for each in self.models if each is not None), None)
        generation, weights = self.models[name]
        if weights != client.weights[name]:
            raise Refused
        self._use(name)
        client.bound[name] = generation
        return generation

    def _name(self, label: str) -> None:
        if self.label not in (None, label):
            raise Refused
        if self.label is None:
            self.label, self.generation = label, next(self._numbers)

    def _use(self, name: Name) -> None:
        self.models[name] = self.models.pop(name)

    def check(self, client: Client, name: Name) -> None:
        """Refuse a client that is behind."""
        is_behind = False
        for each in dict.fromkeys((name, None)):
            if each in client.bound:
                if each in self.models and self.models[each][0] == client.bound[each]:
                    self._use(each)
                else:
                    is_behind = True
        if is_behind:
            raise Refused

    def acquire(self, client: Client, space: Space, tokens: Tokens) -> tuple[int, Held]:
        """A new lease, and its number."""
        self.check(client, space[0])
        self.now = next(self._times)
        cached, labels = self.cached.get(space, {}), []
        while len(labels) < len(tokens) and (part := tokens[: len(labels) + 1]) in cached:
            labels.append(cached[part])
        lease = Held(space, tokens, labels, self.now)
        number = next(self._leases)
        client.leases[number] = lease
        return number, lease

    def adopt(self, client: Client, granter: Client, number: int) -> Held:
        """Hand a lease over."""
        lease = granter.leases[number]
        if client.bound:
            self.check(client, lease.space[0])
            if lease.began < self.ended.get(lease.space[0], 0):
                raise Refused
        client.leases[number] = granter.leases.pop(number)
        return lease

    def insert(self, client: Client, number: int) -> bool:
        """Publish all of a lease; whether that had any effect."""
        lease = client.leases[number]
        label = client.weights[lease.space[0]]
        lease.labels += [label] * (len(lease.tokens) - len(lease.labels))
        if not lease.retired:
            cached = self.cached.setdefault(lease.space, {})
            for stop, each in enumerate(lease.labels, 1):
                cached.setdefault(lease.tokens[:stop], each)
        return not lease.retired

    def retire(self, name: Name, salt: str | None) -> None:
        """Call `retire` with the fields that are not None."""
        self._retire([space for space in self._spaces() if name in (None, space[0]) and salt in (None, space[1])])
        if salt is None:
            self.models.pop(name, None)
            self.ended[name] = self.now = next(self._times)

    def reset(self) -> None:
        """`reset`."""
        self._retire(self._spaces())
        self.models.clear()
        self.label, self.generation = None, 0
        self.now = next(self._times)
        self.ended = dict.fromkeys(NAMES, self.now)

    def set_weights(self, label: str) -> int:
        """`set_weights`; the base's generation."""
        if label != self.label:
            self.reset()
            self._name(label)
        return self.generation

    def _spaces(self) -> list[Space]:
        return [(name, salt) for name in NAMES for salt in SALTS]

    def _retire(self, spaces: list[Space]) -> None:
        for space in spaces:
            self.cached.pop(space, None)
        for client in self.clients:
            for lease in client.leases.values():
                lease.retired = lease.retired or lease.space in spaces


NAMES: tuple[Name, ...] = (None, "x", "y", "z")
SALTS: tuple[str | None, ...] = (None, "s")
