"""A router's knowledge as reports: `explain_route` of one prompt, `fleet_stats` of all caches."""

from __future__ import annotations

from raydix.actors.fleet.cost import cost
from raydix.actors.fleet.fleet_member import FleetMember
from raydix.actors.fleet.members import FleetMembers
from raydix.actors.fleet.route_chooser import Prompt, RouteChooser
from raydix.schemas import FleetCacheStats, FleetStats, RouteCandidate, RouteExplanation
from raydix.schemas.requests import HOST


def explain_route(members: FleetMembers, chooser: RouteChooser, prompt: Prompt) -> RouteExplanation:
    """Return the members that a route of a prompt would compare now, the cheapest first. Nothing is counted."""
    members.routes.expire()
    comparison = chooser.compare(prompt, members.columns)
    weight = chooser.config.weight
    rows = []
    for candidate in comparison.candidates:
        stored, expected = comparison.runs[candidate.cache]
        loading = comparison.loading(candidate.cache)
        row = RouteCandidate(
            cache=members.by_column[candidate.cache].name,
            prefix_len=stored,
            promised_len=expected,
            host_len=comparison.host_lens.get(candidate.cache, 0),
            loading_tokens=loading,
            uncached_tokens=max(0, prompt.num_tokens - expected - loading),
            pending_tokens=int(candidate.pending),
            cost=cost(candidate, weight),
        )
        rows.append(row)
    rows.sort(key=lambda row: (row.cost, row.cache))
    return RouteExplanation(
        num_tokens=prompt.num_tokens,
        stride_tokens=prompt.shape.stride_tokens,
        weight=weight,
        tier_cost=chooser.config.tier_cost,
        candidates=tuple(rows),
    )


def fleet_stats(members: FleetMembers, chooser: RouteChooser) -> FleetStats:
    """Return the router's knowledge of each member, and the members that are left out."""
    members.routes.expire()
    rows = [_row_of(members, chooser, column, member) for column, member in members.by_column.items()]
    return FleetStats(
        page_size=None if members.shape is None else members.shape.page_size,
        stride_tokens=None if members.shape is None else members.shape.stride_tokens,
        caches=tuple(sorted(rows, key=lambda row: row.cache)),
        left_out=members.left_out(),
        routes=chooser.num_routes,
        open_routes=sum(row.open_routes for row in rows),
        indexed_pages=members.index.num_pages(),
        index_bytes=members.index.num_bytes,
    )


def _row_of(members: FleetMembers, chooser: RouteChooser, column: int, member: FleetMember) -> FleetCacheStats:
    """Return the row of a member that gets requests. Its load is the load of its first rank."""
    index, routes, feeds = members.index, members.routes, member.feeds
    load = routes.load(column)
    return FleetCacheStats(
        cache=member.name,
        ranks=len(feeds),
        epoch=index.position(column)[0] or "",
        pages=min(map(index.num_pages, member.columns)),
        host_pages=min(index.num_pages(feed.columns[HOST]) if HOST in feed.columns else 0 for feed in feeds),
        pending_tokens=chooser.pending(column),
        open_routes=routes.num_pending(column),
        routes=member.num_routes,
        refused=member.num_refused,
        missed_tokens=member.missed_tokens,
        waiting_tokens=load.waiting_tokens,
        leased_tokens=load.leased_tokens,
        unpublished_tokens=load.unpublished_tokens,
        private_slots=load.private_slots,
        loading_tokens=load.loading_tokens,
        batches=sum(feed.num_batches for feed in feeds),
        snapshots=sum(feed.num_snapshots for feed in feeds),
        silent_s=members.loop.time() - min(feed.heard_at for feed in feeds),
    )
