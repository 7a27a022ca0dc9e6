"""The kinds of caches and their differences, as data for the shared contract, `test_contract_*`.

A new kind is one more entry of `KINDS`. A promise that not every kind gives is selected with `only`, by a trait: a
function with a docstring about the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
from _pytest.mark import ParameterSet
from support.caches.pool_layers import layer_shapes

from raydix.cache_core.components.window_kv import kept_tail
from raydix.schemas import CacheConfig, EvictionConfig, HostConfig, LeaseConfig, PoolConfig

NUM_PAGES = 8
MAX_WAITERS = 3
NUM_LAYERS = 3


@dataclass(frozen=True)
class KindUnderTest:
    """One configuration: eight pages, at most three waiters, no background eviction, every rule checked at each step.

    The harness publishes its pages: `CacheUnderTest.publish` and `insert`.
    """

    name: str
    page_size: int = 1
    config: dict[str, Any] = field(default_factory=dict)  # of `CacheConfig`, beyond what all have
    pool: dict[str, Any] = field(default_factory=dict)  # more fields of `PoolConfig`
    shares: bool = True  # published pages can be hit
    shares_slots: bool = True  # all leases that hit a page have the same slots for it
    counts_pages: bool = True  # sizes count the pages that are used, not more
    lost_tokens: int = 0  # at the end of a prompt, that make no unit of the tree
    largest_leaf: int | None = None  # pages of one `publish` that an eviction takes at a time; None: all of it
    replaces_unused: bool = False  # of two copies of an unused page, the later is kept
    layer_kinds: tuple[str, ...] = ("full",) * NUM_LAYERS  # "swa": leases hold window slots; "state": one state each
    index_head_dim: int = 0  # elements of an index key, which all layers with K and V keep; 0: they keep none

    def __str__(self) -> str:
        return self.name

    @property
    def publishes_states(self) -> bool:
        """Whether a hit ends where a state was published, and only there."""
        return "state" in self.layer_kinds

    @property
    def window_size(self) -> int:
        """Tokens that sliding-window layers attend to; 0 where there are none."""
        return int(self.config.get("sliding_window_size", 0))

    @property
    def has_window(self) -> bool:
        """Whether a lease holds window slots besides its slots."""
        return "swa" in self.layer_kinds

    def reusable(self, num_tokens: int) -> int:
        """How many pages can be hit once so many tokens are published, or of so many tokens that are the same."""
        return max(0, num_tokens - self.lost_tokens) // self.page_size if self.shares else 0

    def leaf(self, num_pages: int) -> int:
        """Return the pages that the smallest eviction takes, if one insert has published that many."""
        return num_pages if self.largest_leaf is None else min(num_pages, self.largest_leaf)

    def cache_config(self) -> CacheConfig:
        """The configuration."""
        layers = layer_shapes(self.layer_kinds, 1, 2, 1, self.index_head_dim)
        pool = {"num_slots": NUM_PAGES * self.page_size, "dtype": "float32", "device": "cpu", "layers": layers}
        return CacheConfig(
            page_size=self.page_size,
            pool=PoolConfig(**pool | self.pool),
            leases=LeaseConfig(max_waiters=MAX_WAITERS),
            validate=True,
            **{"eviction": EvictionConfig(high_watermark=1.0)} | self.config,
        )

    def with_host(self) -> KindUnderTest:
        """Return the same kind above a host tier of twice its size, to which all unlocked KV is written soon."""
        marks = EvictionConfig(high_watermark=0.95, low_watermark=0.9)
        host = HostConfig(num_slots=2 * NUM_PAGES * self.page_size, reserve=0.99)
        return replace(self, name=f"{self.name}-host", config={**self.config, "eviction": marks, "host": host})


def radix(page_size: int = 1, index_head_dim: int = 0) -> KindUnderTest:
    """The kind to which others are compared: every published page can be hit."""
    return KindUnderTest(f"radix{page_size}", page_size, index_head_dim=index_head_dim)


def window(page_size: int, window_size: int, bigram: bool = False, num_swa_pages: int = NUM_PAGES) -> KindUnderTest:
    """A run's last window is a node of its own, so that a lock holds no more window slots than it needs."""
    return KindUnderTest(
        f"{'bigram-' if bigram else ''}window{page_size}",
        page_size,
        {"sliding_window_size": window_size, "bigram": bigram},
        {"num_swa_slots": num_swa_pages * page_size},
        lost_tokens=int(bigram),
        largest_leaf=kept_tail(window_size, page_size) // page_size,
        layer_kinds=("full", "swa", "full"),
    )


def mamba(page_size: int, num_states: int = 3 * NUM_PAGES) -> KindUnderTest:
    """`publish` leaves a state after each page, so each is a node of its own."""
    return KindUnderTest(
        f"mamba{page_size}",
        page_size,
        {"kind": "mamba"},
        {"num_state_slots": num_states},
        largest_leaf=1,
        layer_kinds=("full", "state", "full"),
    )


def hybrid(page_size: int, window_size: int, num_swa_pages: int = NUM_PAGES) -> KindUnderTest:
    """Windows, states and index keys together; leaves are as small as with states."""
    states = mamba(page_size)
    return replace(
        states,
        name=f"hybrid{page_size}",
        config={**states.config, "sliding_window_size": window_size},
        pool={**states.pool, "num_swa_slots": num_swa_pages * page_size},
        layer_kinds=("full", "swa", "state"),
        index_head_dim=3,
    )


def bigram(page_size: int) -> KindUnderTest:
    """A pair of neighbours makes a unit: the last token has no neighbour yet."""
    return KindUnderTest(f"bigram{page_size}", page_size, {"bigram": True}, lost_tokens=1)


def trie(page_size: int) -> KindUnderTest:
    """Runs are trimmed block by block."""
    return KindUnderTest(f"trie{page_size}", page_size, {"kind": "trie"}, largest_leaf=1, replaces_unused=True)


def chunk(page_size: int) -> KindUnderTest:
    """Slots stay private to the end."""
    return KindUnderTest(f"chunk{page_size}", page_size, {"kind": "chunk"}, shares=False)


def slots(page_size: int) -> KindUnderTest:
    """A lease owns a row of slots, as long as the pool of the others; there are eight rows."""
    row = NUM_PAGES * page_size
    return KindUnderTest(
        f"slots{page_size}",
        page_size,
        {"kind": "slots", "max_seq_len": row},
        {"num_slots": NUM_PAGES * row},
        shares_slots=False,
        counts_pages=False,
    )


KINDS = (
    radix(1),
    radix(16, index_head_dim=3),
    window(4, 6),
    window(4, 6, bigram=True),
    mamba(4),
    hybrid(4, 6),
    bigram(4),
    trie(4),
    chunk(16),
    slots(4),
)
PAGES_OF_ONE = (window(1, 3), mamba(1), bigram(1), trie(1), slots(1))  # nothing that Ray would add to: in process alone
TIGHT_WINDOW = window(4, 4, num_swa_pages=4)  # fewer window slots than slots
TIGHT_HYBRID = hybrid(4, 6, num_swa_pages=4)
TIGHT_STATES = mamba(4, num_states=4)  # fewer states than leases

Access = Literal["local", "client", "ray"]  # in process, through a client in process, through a client on Ray
Trait = Callable[[KindUnderTest], bool]


def reached_kinds(*traits: Trait, faulty: Mapping[Trait, str] | None = None) -> list[ParameterSet]:
    """Each kind with all these traits, reached in each way: parameters for the fixture `cache`."""
    ways: dict[Access, tuple[KindUnderTest, ...]] = {
        "local": KINDS + PAGES_OF_ONE,
        "client": (KINDS[0], hybrid(4, 6)),  # in process it is a session more, and the same calls as "local"
        "ray": KINDS,
    }
    once = {str(kind) for kind in ways["client"]}
    params = []
    for access, kinds in ways.items():
        for kind in kinds:
            if all(trait(kind) for trait in traits):
                faults = [reason for trait, reason in (faulty or {}).items() if trait(kind)]
                marks = [pytest.mark.xfail(strict=True, reason=reason) for reason in faults]
                marks += [pytest.mark.ray] if access == "ray" else []
                is_alike = (
                    str(kind) not in once if access == "ray" else kind in PAGES_OF_ONE
                )  # Ray carries the same bytes
                marks += [pytest.mark.more] if is_alike else []
                params.append(pytest.param((kind, access), marks=marks, id=f"{kind}-{access}"))
    assert params, f"no kind has all of {[trait.__name__ for trait in traits]}"
    return params


def only(*traits: Trait, faulty: Mapping[Trait, str] | None = None) -> pytest.MarkDecorator:
    """The test's `cache` is of each kind that has all these traits; without it, of each kind there is.

    `faulty` names kinds that break the promise today, and how: these are expected to fail until they are mended.
    """
    return pytest.mark.parametrize("cache", reached_kinds(*traits, faulty=faulty), indirect=True)


def shares(kind: KindUnderTest) -> bool:
    """A chunk cache publishes nothing: there is nothing to hit, to compute twice, or to evict."""
    return kind.shares


def shares_slots(kind: KindUnderTest) -> bool:
    """If a lease has a row of slots, a hit copies the prefix, or takes over a row without a lease."""
    return kind.shares_slots


def counts_pages(kind: KindUnderTest) -> bool:
    """If a lease takes a whole row of slots, sizes do not show how many of them it uses."""
    return kind.counts_pages


def replaces_unused(kind: KindUnderTest) -> bool:
    """Of two copies of an unused page, only a trie keeps the later."""
    return kind.replaces_unused


def pages_of_several(kind: KindUnderTest) -> bool:
    """With pages of one token, nothing happens within a page."""
    return kind.page_size > 1


def has_states(kind: KindUnderTest) -> bool:
    """Only models with recurrent layers have states."""
    return kind.publishes_states


def has_no_states(kind: KindUnderTest) -> bool:
    """Only models with recurrent layers have states."""
    return not kind.publishes_states


def has_window(kind: KindUnderTest) -> bool:
    """Only models with sliding-window layers have window slots; `test_hybrid` has those that have states as well."""
    return kind.has_window and not kind.publishes_states


def has_window_and_states(kind: KindUnderTest) -> bool:
    """Only models with both can test their interaction."""
    return kind.has_window and kind.publishes_states


def has_no_window(kind: KindUnderTest) -> bool:
    """Only models with sliding-window layers have window slots."""
    return not kind.has_window
