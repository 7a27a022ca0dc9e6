"""A router in front of several caches, against round robin: hit rate, computed tokens and time to first token.

    python examples/fleet.py
    python examples/fleet.py --caches 6 --conversations 40

It starts a Ray cluster of three nodes on this machine, with several caches, each with a model worker on its node. The
conversations of the demo (`raydix.actors.demo.run`) are served twice, from empty caches. At first the requests go to
the caches in turn, then each goes where the router sends it. The pools are so small that no cache keeps all system
prompts.

The time to first token begins when a request arrives, and includes the wait for the worker. The program ends with a
table, and with exit status 1 if one of the `promises` was broken.
"""

import asyncio
import itertools
import logging
import sys
import time
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import ray
import typer
from ray.actor import ActorMethod
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raydix.actors import PrefixCacheClient, beside, connect_fleet, start_cache_async
from raydix.actors.cli.output import AsJson, console, show, table_of
from raydix.actors.demo.run import MODEL, progress_on, serve
from raydix.actors.demo.workload import PAGE_SIZE, Workload, draw_conversations
from raydix.actors.huggingface.worker import TransformersWorker, pool_config_for
from raydix.schemas import CacheConfig
from raydix.schemas.shown import percent, rate

Count = Annotated[int, typer.Option(min=1)]
NUM_NODES = 3
STRIDE_TOKENS = 64  # a turn adds as many tokens, so the caches' events tell one turn from the next
NODE: dict[str, Any] = {"num_cpus": 0, "object_store_memory": 100 * 2**20}


@contextmanager
def local_cluster():
    """Run a Ray cluster of several nodes on this machine."""
    cluster = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})
    nodes = [cluster.head_node, *(cluster.add_node(**NODE) for _ in range(NUM_NODES - 1))]
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield [node.node_id for node in nodes]
    finally:
        ray.shutdown()
        cluster.shutdown()


class Server:
    """A cache and the model worker on its node, which serves one request after another. Others wait in its queue."""

    def __init__(self, name: str, load: Workload) -> None:
        self.client = PrefixCacheClient(name)
        start: Any = ray.remote(TransformersWorker).options(num_cpus=0, scheduling_strategy=beside(name))
        options = {"model": MODEL, "seed": load.seed, "dtype": "float32", "device": "cpu", "num_threads": 1}
        self.worker = start.remote(name, owner=f"worker of {name}", **options)
        self._line = asyncio.Semaphore(1)
        self._answer_len = load.answer_len

    async def open(self):
        """Load the model, and run it once."""
        await self.worker.generate.remote([1, 2, 3], 2, reuse=False)

    async def generate(self, prompt):
        """Continue a prompt; the time to first token includes the wait for the worker."""
        arrived = time.perf_counter()
        async with self._line:
            waited_s = time.perf_counter() - arrived
            answer = await self.worker.generate.remote(prompt, self._answer_len)
        return answer.model_copy(update={"time_to_first_token_s": answer.time_to_first_token_s + waited_s})


class Routes:
    """The routes of a router, with the time that each took, and the calls of actors in this time."""

    def __init__(self, fleet, servers: dict[str, Server]) -> None:
        self._fleet = fleet
        self._servers = servers
        self.took_s: list[float] = []
        self.num_calls = 0

    async def generate(self, worker, prompt):
        """Continue a prompt at the cache that the router chooses. The worker's number has no meaning here."""
        call = ActorMethod._remote

        def count(*args, **options):
            self.num_calls += 1
            return call(*args, **options)

        with patch.object(
            ActorMethod, "_remote", count
        ):  # no other coroutine runs meanwhile: a route waits for nothing
            started = time.perf_counter()
            route = await self._fleet.route(prompt)
            self.took_s.append(time.perf_counter() - started)
        async with route:  # it counts as pending until the answer is there
            return await self._servers[route.cache].generate(prompt)


async def start(names, node_ids, load):
    """Start the caches, the nodes in turn, and the workers."""
    pool = pool_config_for(MODEL, load.pool_tokens, dtype="float32", device="cpu")
    config = CacheConfig(page_size=PAGE_SIZE, pool=pool, events="slim", events_stride_tokens=STRIDE_TOKENS)
    places = [NodeAffinitySchedulingStrategy(node_id, soft=False) for node_id in node_ids]
    starting = [
        start_cache_async(config, name=name, lifetime="detached", scheduling_strategy=place, timeout_s=300)
        for name, place in zip(names, itertools.cycle(places), strict=False)
    ]
    await asyncio.gather(*starting)
    servers = await asyncio.to_thread(lambda: {name: Server(name, load) for name in names})
    await asyncio.gather(*(server.open() for server in servers.values()))
    return servers


async def compare(names, node_ids, load):
    """Serve the conversations in turn and routed, and return both runs and the routes."""
    conversations = draw_conversations(load)
    with progress_on(console(stderr=True)) as progress:
        loading = progress.add_task("caches and workers start", total=None)
        servers = await start(names, node_ids, load)
        progress.remove_task(loading)
        clients = [server.client for server in servers.values()]
        turns = itertools.cycle(servers.values())

        async def in_turn(worker, prompt):
            return await next(turns).generate(prompt)

        async def note(run):
            for client in clients:
                run.note_pool(await client.stats())

        robin = await serve(conversations, in_turn, note, progress, "in turn")
        for client in clients:
            await client.check_invariants()
            await client.reset()
        async with await connect_fleet("chat-*") as fleet:
            routes = Routes(fleet, servers)
            routed = await serve(conversations, routes.generate, note, progress, "routed")
            counts = {each.cache: each.routes for each in fleet.stats().caches}
        for client in clients:
            await client.check_invariants()
            await client.close()
    return robin, routed, routes, counts


def figures_of(run):
    """Return the figures of a run."""
    first_ms = 1000 * np.array([turn.answer.time_to_first_token_s for turn in run.turns.values()])
    return {
        "prompt_tokens": run.prompt_tokens(),
        "hit_rate": run.hit_rate(),
        "computed_tokens": run.prompt_tokens() - run.reused_tokens(),
        "first_token_ms_mean": float(first_ms.mean()),
        "first_token_ms_p50": float(np.percentile(first_ms, 50)),
        "first_token_ms_p95": float(np.percentile(first_ms, 95)),
        "seconds": run.seconds,
    }


def summary(robin, routed, routes, counts):
    """Return the figures of both runs, and of the routes."""
    same = [robin.turns[key].answer.token_ids == routed.turns[key].answer.token_ids for key in robin.turns]
    return {
        "turns": len(same),
        "identical_turns": sum(same),
        "in_turn": figures_of(robin),
        "routed": figures_of(routed),
        "routes": counts,
        "route_ms_p50": 1000 * float(np.median(routes.took_s)),
        "route_actor_calls": routes.num_calls,
    }


def promises(f):
    """Return the promises of the router, and whether each was kept."""
    return {
        "answers are the same": f["identical_turns"] == f["turns"],
        "the router computes fewer tokens": f["routed"]["computed_tokens"] < f["in_turn"]["computed_tokens"],
        "a route calls no actor": f["route_actor_calls"] == 0,
    }


def table(f):
    """Return the table that the program prints at the end."""
    rows = table_of("", ">in turn", ">routed")
    sides = f["in_turn"], f["routed"]
    rows.add_row("prompt tokens hit", *(percent(each["hit_rate"]) for each in sides))
    rows.add_row("prompt tokens computed", *(f"{each['computed_tokens']:,}" for each in sides))
    for key, name in (("mean", "mean"), ("p50", "median"), ("p95", "95th percentile")):
        rows.add_row(f"time to first token, {name}", *(f"{each[f'first_token_ms_{key}']:,.0f} ms" for each in sides))
    rows.add_row("time for all turns", *(f"{each['seconds']:.1f} s" for each in sides))
    rows.add_row("requests of each cache", "", ", ".join(str(count) for count in f["routes"].values()))
    rows.add_row("a route, median", "", f"{f['route_ms_p50']:.2f} ms, {f['route_actor_calls']} actor calls")
    rows.caption = f"{rate(f['identical_turns'], f['turns'])} of {f['turns']} answers are the same"
    return rows


def main(
    caches: Count = 4,
    conversations: Count = 28,
    turns: Count = 4,
    system_prompts: Count = 8,
    system_prompt_len: Count = 1000,
    pool_tokens: Annotated[int, typer.Option(min=1, help="Of each cache, whole pages of 16.")] = 4096,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    as_json: AsJson = False,
):
    """Serve conversations on several caches, in turn and routed."""
    load = Workload(
        conversations=conversations,
        turns=turns,
        system_prompts=system_prompts,
        system_prompt_len=system_prompt_len,
        pool_tokens=pool_tokens,
        seed=seed,
    )
    with local_cluster() as node_ids:
        names = [f"chat-{number}" for number in range(caches)]
        figures = summary(*asyncio.run(compare(names, node_ids, load)))
    show(figures, as_json, partial(table, figures))
    if broken := [promise for promise, kept in promises(figures).items() if not kept]:
        sys.exit(f"not kept: {'; '.join(broken)}")


if __name__ == "__main__":
    typer.run(main)
