"""`ModelBindings`: the model that computes the KV of each `lora_id`, and the sessions that are bound to it.

    generation 3 of "french"                  generation 7
    ├ the first bind sets fingerprint A       ├ the first bind sets B
    ├ A joins, B is refused                   ├ B joins, A is refused
    └ retire(lora_id="french") or reset() ──> └ sessions bound to 3 must bind again

The generation of the base has a label, which names its weights: given by `set_weights`, or by the first bind.
Sessions that have bound nothing are not checked, but a cache with a disk keeps their KV apart: it is matched until the
first bind of the generation, which retires it, and they publish nothing from then on. So no KV of a model that is not
known is written to the disk, or met by a session that is bound.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import count
from typing import NamedTuple

from raydix.actors.sessions.bound_models import LAPSED, MAX_BINDINGS, BoundModels
from raydix.cache_core import LeasedCache
from raydix.cache_core.leases.lease_table import LeaseRecord
from raydix.schemas import ConfigMismatch, ModelFingerprint, namespaces_of, unframe_namespace
from raydix.schemas.shown import brief, counted

logger = logging.getLogger(__name__)


class _Binding(NamedTuple):
    generation: int
    fingerprint: ModelFingerprint


class BaseWeights(NamedTuple):
    """The weights of the base's generation."""

    label: str | None  # None: nothing has named them yet
    generation: int  # 0: none has begun


_UNNAMED = BaseWeights(None, 0)


class ModelBindings:
    """The bindings of a cache, and of its sessions.

    At most `MAX_BINDINGS` are kept: the one used least recently is retired with its pages. The base's is never
    retired: the KV of every `lora_id` depends on it.

    Attributes:
        sessions: the bound models of each session that has bound any, by id.
        weights: the label and number of the base's generation.
        disk: the cache of the disk tier; None: there is no disk.

    Args:
        core: the cache.
        configured: `CacheConfig.fingerprint`: the base of all sessions; empty: each session binds its own.
    """

    def __init__(self, core: LeasedCache, configured: str) -> None:
        self.sessions: dict[str, BoundModels] = {}
        self.weights = _UNNAMED
        self._core = core
        self._configured = configured
        self._numbers = count(LAPSED + 1)
        # The least recently used comes first.
        self._bindings: OrderedDict[str | None, _Binding] = OrderedDict()  # lora_id -> binding
        self.disk: LeasedCache | None = None
        self._strangers = _Strangers()
        self._warned: set[str] = set()  # ids of open sessions with an insert that published nothing

    def __len__(self) -> int:
        return len(self._bindings)

    @property
    def base_name(self) -> str:
        """The base model's fingerprint, as text; empty: none is configured or bound."""
        binding = self._bindings.get(None)
        return self._configured or ("" if binding is None else str(binding.fingerprint))

    # ---------------------------------------------------------------- sessions

    def bind(self, session_id: str, lora_id: str | None, fingerprint: ModelFingerprint) -> int:
        """Bind a session to the current generation and return its number; set its fingerprint if it has none.

        Raises:
            ConfigMismatch: the generation has another fingerprint or label, or the cache is configured for another
                base.
        """
        self._check_configured(lora_id, fingerprint)
        binding = self._bindings.get(lora_id)
        if binding is None:
            generation = next(self._numbers) if lora_id is not None else self._begin_base(fingerprint.weights)
            binding = self._bindings[lora_id] = _Binding(generation, self._with_shared_fields(fingerprint))
            self._retire_strangers(lora_id)
            self._drop_surplus()
        elif difference := _difference(fingerprint, binding.fingerprint):
            raise ConfigMismatch(
                f"{_name(lora_id)} is bound to another model in this cache: {difference}. If every worker has the "
                f"new weights, call {_ending(lora_id)}; else use another cache, or another lora_id"
            )
        else:
            self._bindings.move_to_end(lora_id)
        if session_id not in self.sessions:
            self.sessions[session_id] = BoundModels()
        self.sessions[session_id].add(lora_id, binding.generation)
        return binding.generation

    def models_of(self, extra_key: str | None) -> tuple[str, str | None, str] | None:
        """Return the models that compute the KV of a namespace, and the label of the base's weights; None: not bound.

        The first two are the fingerprints of the base and of the adapter; None without an adapter. A configured base
        includes its weights, so it has no label.
        """
        lora_id = _lora_id_of(extra_key)
        adapter = None if lora_id is None else self._bindings.get(lora_id)
        if not self.base_name or (lora_id is not None and adapter is None):
            return None
        name, label = None if adapter is None else str(adapter.fingerprint), self.weights.label or ""
        return self.base_name, name, "" if self._configured else label

    def lapse(self, session_id: str, lora_ids: Iterable[str | None], more: bool) -> None:
        """Require a client that has come back in a new session to bind again each model that it had bound."""
        self.sessions[session_id] = bound = BoundModels()
        bound.forgot = more
        for lora_id in lora_ids:
            bound.add(lora_id, LAPSED)

    def forget(self, session_id: str) -> None:
        """Forget a session that has ended."""
        self.sessions.pop(session_id, None)
        self._warned.discard(session_id)

    # ---------------------------------------------------------------- published KV

    def may_publish(self, session_id: str, extra_key: str | None) -> bool:
        """Return whether KV that a session has computed may be published in a namespace, and note that it will be.

        Ask in a cache with a disk alone. Only sessions that have bound the models of the namespace may publish; until
        these are bound, any session may.
        """
        lora_id = _lora_id_of(extra_key)
        missing = [part for part in {None, lora_id} if not self._is_bound(session_id, part)]
        if not missing:
            return True
        if self.models_of(extra_key) is None:
            self._strangers.add(missing)
            return True
        if session_id not in self._warned:
            self._warned.add(session_id)
            logger.warning(
                "nothing that session %s inserts is published where it has not bound the models that other sessions "
                "have bound: it must call %s",
                session_id,
                " and ".join(map(_binding, missing)),
            )
        return False

    def _is_bound(self, session_id: str, lora_id: str | None) -> bool:
        """Return whether a session is bound to the present generation of a `lora_id`, or of the base."""
        if lora_id is None and self._configured:
            return True
        bound, binding = self.sessions.get(session_id), self._bindings.get(lora_id)
        return bound is not None and binding is not None and bound.generations.get(lora_id) == binding.generation

    def _retire_strangers(self, lora_id: str | None) -> None:
        """Retire the KV that sessions have published without binding a model that is now bound for the first time.

        The disk has none of it, but may have KV of the bound model.
        """
        if not self._strangers.remove(lora_id):
            return
        is_meant = (lambda _: True) if lora_id is None else namespaces_of(None, lora_id, None)
        self._outdate(is_meant)
        num_namespaces = self._core.retire(is_meant, self.disk)
        about = counted(num_namespaces, "namespace")
        logger.info("%s is bound: the KV that other sessions had published in %s is retired", _name(lora_id), about)

    # ---------------------------------------------------------------- checks

    def check(self, session_id: str, extra_key: str | None, lease_id: str) -> None:
        """Check that a session that has bound any model may take a lease of this namespace, or has taken it already.

        Raises:
            ConfigMismatch: the session has to bind again first.
        """
        bound = self.sessions[session_id]
        lora_id = _lora_id_of(extra_key)
        behind = []
        for adapter in (lora_id, None) if lora_id is not None else (None,):
            generation, binding = bound.generations.get(adapter), self._bindings.get(adapter)
            if binding is not None and binding.generation == generation:
                self._bindings.move_to_end(adapter)
            elif bound.may_have_bound(adapter):
                behind.append(adapter)
        if behind and self._core.leases.find(lease_id, session_id) is None:
            raise ConfigMismatch(
                f"{' and '.join(map(_name, behind))} may have another model by now: the cache was reset, it was "
                "retired, or the session is a new one. Bind again, with the weights as they are now: "
                f"{', '.join(map(_binding, behind))}"
            )

    def check_adoption(self, session_id: str, lease: LeaseRecord) -> None:
        """`check`, and check that the lease is of a generation that has not ended.

        Raises:
            ConfigMismatch: it has ended, or the session has to bind again first.
        """
        self.check(session_id, lease.key.extra_key, "")
        if lease.outdated:
            raise ConfigMismatch(
                f"lease {lease.lease_id!r} was acquired before a reset or a retirement of its lora_id: its KV may be "
                "of another model than this session is bound to. Acquire again"
            )

    def _check_configured(self, lora_id: str | None, fingerprint: ModelFingerprint) -> None:
        if lora_id is None and self._configured not in ("", str(fingerprint)):
            raise ConfigMismatch(
                f"the cache is configured for the base model {brief(self._configured)} (CacheConfig.fingerprint), not "
                f"{str(fingerprint)!r}: use another cache, or a lora_id"
            )

    # ---------------------------------------------------------------- generations

    def end_generation(self, lora_id: str) -> None:
        """Begin the next generation of a `lora_id`, without a fingerprint. The caller retires its pages."""
        self._bindings.pop(lora_id, None)
        self._strangers.remove(lora_id)
        self._outdate(namespaces_of(None, lora_id, None))

    def end_all(self) -> None:
        """Begin the next generation of every `lora_id` and of the base, without a label. The caller resets the core."""
        self._bindings.clear()
        self._strangers = _Strangers()
        self.weights = _UNNAMED
        self._outdate(lambda _: True)

    def set_weights(self, label: str) -> bool:
        """Return whether the base has other weights so far; if so, `end_all` and name the new ones.

        Raises:
            ConfigMismatch: the cache is configured for one base.
        """
        if self._configured:
            raise ConfigMismatch(
                f"the cache is configured for the base model {brief(self._configured)} (CacheConfig.fingerprint), "
                f"a hash that includes its weights: they cannot become {brief(label)}. Start the cache without a "
                "fingerprint"
            )
        if label == self.weights.label:
            return False
        self.end_all()
        self.weights = BaseWeights(label, next(self._numbers))
        return True

    def _begin_base(self, label: str) -> int:
        """Return the number of the base's generation, which begins here unless `set_weights` has begun it.

        Raises:
            ConfigMismatch: `set_weights` has named other weights.
        """
        if self.weights.label is None:
            self.weights = BaseWeights(label, next(self._numbers))
        elif self.weights.label != label:
            raise ConfigMismatch(
                f"the base model has the weights {brief(self.weights.label)} in this cache (set_weights), not "
                f"{brief(label)}: bind with those once this worker has them. If every worker has {brief(label)}, call "
                f"{_ending(None)}"
            )
        return self.weights.generation

    def _outdate(self, is_meant: Callable[[str | None], bool]) -> None:
        for lease in self._core.leases:
            lease.outdated = lease.outdated or is_meant(lease.key.extra_key)

    def _drop_surplus(self) -> None:
        if len(self._bindings) > MAX_BINDINGS:
            lora_id = next(adapter for adapter in self._bindings if adapter is not None)
            self.end_generation(lora_id)
            self._core.retire(namespaces_of(None, lora_id, None))

    def _with_shared_fields(self, fingerprint: ModelFingerprint) -> ModelFingerprint:
        """Return the fingerprint with the fields of the binding used last, if they are equal: it saves memory."""
        if self._bindings:
            fields = next(reversed(self._bindings.values())).fingerprint.fields
            if fields == fingerprint.fields:
                return fingerprint.model_copy(update={"fields": fields})
        return fingerprint


class _Strangers:
    """The models whose namespaces have KV of sessions that have not bound them: `lora_id`s, and None for the base.

    At most `MAX_BINDINGS` are noted; one more, and every `lora_id` counts as one of them.
    """

    __slots__ = ("_are_all", "_noted")

    def __init__(self) -> None:
        self._noted: set[str | None] = set()
        self._are_all = False

    def add(self, lora_ids: Iterable[str | None]) -> None:
        """Note some."""
        self._noted.update(lora_ids)
        if len(self._noted) > MAX_BINDINGS:
            self._noted &= {None}
            self._are_all = True

    def remove(self, lora_id: str | None) -> bool:
        """Return whether it is one of them; its KV is being retired, so it is none from now on."""
        is_noted = lora_id in self._noted or (self._are_all and lora_id is not None)
        if is_noted and lora_id is None:  # All namespaces are retired.
            self._noted.clear()
            self._are_all = False
        self._noted.discard(lora_id)
        return is_noted


def _lora_id_of(extra_key: str | None) -> str | None:
    return None if extra_key is None else unframe_namespace(extra_key)[1]


def _name(lora_id: str | None) -> str:
    return "the base model" if lora_id is None else f"lora_id {brief(lora_id)}"


def _difference(fingerprint: ModelFingerprint, bound: ModelFingerprint) -> str:
    difference = fingerprint.difference(bound)
    if fingerprint.weights == bound.weights:
        return difference
    return f"{difference}; the weights are {brief(fingerprint.weights)}, not {brief(bound.weights)}"


def _ending(lora_id: str | None) -> str:
    return "set_weights(label) or reset()" if lora_id is None else f"retire(lora_id={brief(lora_id)})"


def _binding(lora_id: str | None) -> str:
    return "bind_model(fingerprint)" if lora_id is None else f"bind_model(fingerprint, lora_id={brief(lora_id)})"
