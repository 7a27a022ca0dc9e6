"""`RouteChooser`: the choice of a fleet's member for a prompt, and the arithmetic of members with several ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import NamedTuple

import numpy as np

from raydix.actors.fleet.cost import Candidate, TierColumns, choose, compared, cost
from raydix.actors.fleet.fleet_member import FleetMember
from raydix.actors.fleet.members import FleetMembers
from raydix.actors.fleet.membership import PageShape
from raydix.actors.fleet.route import Route
from raydix.cache_core import RadixKey, page_hashes
from raydix.cache_core.fleet_index.page_hashes import Hashes
from raydix.schemas import RouteConfig, TokenIds

Runs = dict[int, tuple[int, int]]
"""Column -> leading tokens of a prompt that are stored there, and that are stored, pending or promised there."""


_NO_HOSTS: dict[int, int] = {}


class Prompt(NamedTuple):
    """A prompt, as the index knows it."""

    num_tokens: int
    hashes: Hashes  # the hash of each page that ends a stride
    shape: PageShape  # the shape by which it was hashed
    pages: Hashes | None = None  # the hash of each page; None: no cache had ends

    @property
    def stride(self) -> int:
        """The pages of a stride that a look-up counts: one if it has no pages."""
        return 1 if self.pages is None else self.shape.stride_tokens // self.shape.page_size

    @property
    def unit(self) -> int:
        """The tokens of a page in the result of a look-up."""
        return self.shape.stride_tokens if self.pages is None else self.shape.page_size


class Comparison(NamedTuple):
    """The candidates for a prompt.

    Attributes:
        candidates: in no order.
        runs: of the candidates; a member with several ranks has the tokens that all its ranks hold.
        rank_runs: of each rank, for candidates with several ranks.
        host_lens: column -> leading tokens that are stored in the pool or in the host tier, of members that have one.
    """

    candidates: list[Candidate]
    runs: Runs
    rank_runs: Runs
    host_lens: dict[int, int]

    def loading(self, column: int) -> int:
        """Return the tokens that a candidate would load from its host tier."""
        return max(0, self.host_lens.get(column, 0) - self.runs[column][1])


class RouteChooser:
    """Chooses the member for a prompt, and counts the request there until its first token.

    A member with several ranks has the least hit of its ranks, and the waiting tokens of its busiest rank.

    Args:
        members: the members to choose from.
        config: how a member is chosen.

    Attributes:
        config: how a member is chosen.
        host_cost: cost of a token to load from a host tier, as a share of computing it.
        num_routes: requests that were routed; a request that is routed again counts once.
    """

    def __init__(self, members: FleetMembers, config: RouteConfig) -> None:
        self.config = config
        self.num_routes = 0
        self._members = members
        self._index = members.index
        self._routes = members.routes
        self._rng = Random()
        self.host_cost = config.tier_cost["CPU"]

    def prompt_of(self, packed: TokenIds, namespace: str | None) -> Prompt:
        """Return a prompt, hashed by the shape that the members have now."""
        shape = self._members.shape
        assert shape is not None, "a cache is alive, so its shape is known"
        key = RadixKey.from_packed(packed.data, packed.width, namespace)
        if not self._index.has_ends:
            hashes = page_hashes(key, shape.page_size, shape.stride_tokens, namespace, shape.bigram)
            return Prompt(len(packed), hashes, shape, None)
        pages = page_hashes(key, shape.page_size, None, namespace, shape.bigram)
        stride = shape.stride_tokens // shape.page_size
        return Prompt(len(packed), np.ascontiguousarray(pages[stride - 1 :: stride]), shape, pages)

    def fits(self, prompt: Prompt) -> bool:
        """Return whether a prompt was hashed as the members need it now."""
        return prompt.shape == self._members.shape and (prompt.pages is not None or not self._index.has_ends)

    def send(self, prompt: Prompt, columns: Sequence[int] = (), replaces: Route | None = None) -> Route:
        """Choose a member, and count the request there, in one step.

        Args:
            columns: of the members to choose from; empty: all.
            replaces: the earlier route of the request, which counts no more.
        """
        members, weight = self._members, self.config.weight
        self._routes.expire()
        comparison = self.compare(prompt, columns or members.columns)
        best = choose(comparison.candidates, weight, self._rng)
        stored, expected = comparison.runs[best.cache]
        host_len, loading, uncached = 0, 0, int(best.uncached)
        if comparison.host_lens:
            host_len, loading = comparison.host_lens.get(best.cache, 0), comparison.loading(best.cache)
            uncached = max(0, prompt.num_tokens - expected - loading)
        price = f"({uncached} uncached + {self.host_cost:g} * {loading} to load)" if loading else f"{uncached} uncached"
        member = members.by_column[best.cache]
        member.num_routes += 1
        if replaces is None:
            self.num_routes += 1
        elif (earlier := members.by_name.get(replaces.cache)) is not None and earlier.num_routes:
            earlier.num_routes -= 1
        return Route(
            member.name,
            prefix_len=stored,
            promised_len=expected,
            uncached_tokens=uncached,
            pending_tokens=int(best.pending),
            rank_others=partial(_names_of_others, comparison.candidates, best, weight, members.by_column),
            why=f"least cost of {len(comparison.candidates)}: {best.pending:.0f} pending + {weight:g} * {price} tokens",
            end=self._count(prompt, best, comparison),
            prompt=prompt,
            host_len=host_len,
            loading_tokens=loading,
        )

    def compare(self, prompt: Prompt, columns: Sequence[int]) -> Comparison:
        """Return the candidates among the members with the given columns."""
        unit, num_random, tiers = prompt.unit, self.config.num_random, self._members.tiers
        if tiers is not None:
            return self._compare_tiers(prompt, columns, tiers)
        found = compared(self._index, prompt.hashes, columns, num_random, self._rng, prompt.pages, prompt.stride)
        runs = {column: (stored * unit, expected * unit) for column, (stored, expected) in found.items()}
        rank_runs = self._lower_to_least(prompt, runs) if self._members.ranks else {}
        num_tokens, pending = prompt.num_tokens, self.pending
        candidates = [
            Candidate(column, pending(column), max(0, num_tokens - expected)) for column, (_, expected) in runs.items()
        ]
        return Comparison(candidates, runs, rank_runs, _NO_HOSTS)

    def _compare_tiers(self, prompt: Prompt, columns: Sequence[int], tiers: TierColumns) -> Comparison:
        """Return the candidates, of members with host tiers."""
        members, unit, num_random = self._members, prompt.unit, self.config.num_random
        if columns is not members.columns:
            tiers = members.tiers_of(columns)
        pages = prompt.pages, prompt.stride
        found = compared(self._index, prompt.hashes, columns, num_random, self._rng, *pages, tiers)
        all_runs = {column: (stored * unit, expected * unit) for column, (stored, expected) in found.items()}
        hosts = [column for column in all_runs if column in tiers.pool]
        stored_below = {tiers.pool[column]: all_runs.pop(column)[0] for column in hosts}
        host_lens = {column: max(below, all_runs[column][0]) for column, below in stored_below.items()}
        rank_runs = self._lower_to_least(prompt, all_runs, host_lens) if members.ranks else {}
        comparison = Comparison([], all_runs, rank_runs, host_lens)
        for column, (_, expected) in all_runs.items():
            loading = comparison.loading(column)
            uncached = max(0, prompt.num_tokens - expected - loading) + self.host_cost * loading
            comparison.candidates.append(Candidate(column, self.pending(column), uncached))
        return comparison

    def pending(self, column: int) -> int:
        """Return the tokens that wait at a member, or are computed there: at the rank where they are most."""
        ranks = self._members.ranks
        if column in ranks:
            return max(map(self._routes.pending, ranks[column]))
        return self._routes.pending(column)

    def _lower_to_least(self, prompt: Prompt, runs: Runs, host_lens: dict[int, int] | None = None) -> Runs:
        """Replace the tokens that a member's first rank holds by the tokens that all its ranks hold.

        Args:
            host_lens: as in `Comparison`; replaced, too.

        Returns:
            The tokens that each rank holds, and each rank's host tier.
        """
        ranks, hosts = self._members.ranks, self._members.hosts
        several = ranks.keys() & runs.keys()
        columns = [column for first in several for column in ranks[first]]
        columns += [hosts[column] for column in columns if column in hosts]
        rank_runs = dict.fromkeys(columns, (0, 0))
        pages = () if prompt.pages is None else (prompt.pages, prompt.stride)
        for column, stored, expected in self._index.longest_runs(prompt.hashes, 0, 0, columns, *pages):
            rank_runs[column] = stored * prompt.unit, expected * prompt.unit
        for first in several:
            all_stored, all_expected = zip(*(rank_runs[column] for column in ranks[first]), strict=True)
            runs[first] = min(all_stored), min(all_expected)
            if host_lens and first in host_lens:
                host_lens[first] = min(
                    max(rank_runs[column][0], rank_runs[hosts[column]][0] if column in hosts else 0)
                    for column in ranks[first]
                )
        return rank_runs

    def _count(self, prompt: Prompt, best: Candidate, comparison: Comparison) -> Callable[[bool], None]:
        """Count a request at a candidate, at each of its ranks; return the function that ends it there."""
        column, hashes, uncached = best.cache, prompt.hashes, int(best.uncached)
        stride = prompt.shape.stride_tokens
        add, ranks = self._routes.add, self._members.ranks
        if column not in ranks:
            return add(column, hashes, comparison.runs[column][1] // stride, uncached)
        ends = [add(rank, hashes, comparison.rank_runs[rank][1] // stride, uncached) for rank in ranks[column]]

        def end(computed: bool) -> None:
            for end_at_rank in ends:
                end_at_rank(computed)

        return end


def _names_of_others(
    candidates: list[Candidate], best: Candidate, weight: float, by_column: Mapping[int, FleetMember]
) -> tuple[str, ...]:
    """Return the names of the other candidates, the cheapest first."""
    others = [candidate for candidate in candidates if candidate is not best]
    others.sort(key=lambda candidate: cost(candidate, weight))
    return tuple(by_column[candidate.cache].name for candidate in others)
