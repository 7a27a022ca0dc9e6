"""Reinforcement-learning rollouts: several samples share their prompt's KV, and new weights never meet the old ones'.

    python examples/rollouts.py --rounds 5 --prompts 16 --samples 8
    python examples/rollouts.py --one-lora-id

Each round one worker computes a prompt and draws the first tokens of its samples; then any worker continues any of
them, from the prompt's KV in the shared cache. A policy is a namespace, `lora_id="policy-3"`. When new weights (here
random ones) are pushed, the old policy is retired: nothing of it is matched from then on, and its slots come back.

With `--one-lora-id` all policies have one namespace, `lora_id="policy"`, where new weights replace the old ones. Then
the order counts: stop requests, push to every worker, retire, go on. The first worker that serves a request binds its
weights; the cache refuses one that has others, and so would not mix the KV of two policies if a push was lost.

Ends with a table, and with exit status 1 if one of the `promises` was not kept.
"""

import asyncio
import itertools
import logging
import sys
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np
import ray
import torch
import typer

from raydix.actors import PrefixCacheClient, WatchedActor, shutdown_cache, start_cache_async
from raydix.actors.cli.output import AsJson, show, table_of
from raydix.actors.demo import MODEL
from raydix.actors.demo_workload import PAGE_SIZE, VOCABULARY
from raydix.actors.transformers_worker import TransformersWorker, pool_config_for
from raydix.schemas import CacheConfig

Count = Annotated[int, typer.Option(min=1)]
PROMPT_LEN, ANSWER_LEN = 256, 16  # whole pages, so that a sample computes nothing of its prompt
TINY = MODEL | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "dtype": "float32"}


class RolloutWorker(WatchedActor):
    """A policy model on the shared cache, whose weights can be pushed."""

    def __init__(self, cache):
        self._cache = cache
        self._served: Any = None

    async def push(self, policy):
        """Take new weights. A new session with the cache comes with them."""
        if self._served is not None:
            await self._served.close()
        self._served = TransformersWorker(self._cache, model=TINY, seed=policy, device="cpu", num_threads=1)
        await self._served.open()

    async def first_tokens(self, prompt, num_samples, lora_id):
        """Compute a prompt, publish it, and draw how its samples begin, from what the policy says after it."""
        prefill = await self._served.generate(prompt, 1, lora_id=lora_id, return_logits=True)
        return torch.multinomial(prefill.logits[-1].softmax(0), num_samples).tolist(), prefill.prefix_len

    async def sample(self, prompt, lora_id, reuse=True):
        """Continue a prompt that ends with a sample's first token."""
        return await self._served.generate(prompt, ANSWER_LEN - 1, lora_id=lora_id, reuse=reuse)


@dataclass
class Round:
    """What came of one policy."""

    policy: str
    lora_id: str
    prompt_tokens: int  # asked for, by prefills and samples
    reused_tokens: int
    needed_tokens: int  # each prompt once, and each sample's first token
    changed_answers: int  # samples whose answer is another one without the cache
    stored_slots: int  # when its weights were replaced
    matched_after: int = -1  # tokens of its prompts that could still be matched once it was retired
    slots_left: int = -1  # cached when all should have been reclaimed


async def roll_out(workers, client, policy, lora_id, prompts, num_samples):
    """One round: every prompt once, then all of its samples, wherever there is a worker."""
    turns = itertools.cycle(workers)
    prefills = [next(turns).first_tokens.remote(tokens, num_samples, lora_id) for tokens in prompts]
    first = await asyncio.gather(*prefills)
    begun = [np.append(prompt, token) for prompt, (drawn, _) in zip(prompts, first, strict=True) for token in drawn]
    samples = await asyncio.gather(*(next(turns).sample.remote(tokens, lora_id) for tokens in begun))
    alone = await asyncio.gather(*(next(turns).sample.remote(tokens, lora_id, reuse=False) for tokens in begun))
    return Round(
        policy=policy,
        lora_id=lora_id,
        prompt_tokens=sum(map(len, prompts)) + sum(map(len, begun)),
        reused_tokens=sum(prefix_len for _, prefix_len in first) + sum(each.prefix_len for each in samples),
        needed_tokens=sum(map(len, prompts)) + len(begun),
        changed_answers=sum(one.token_ids != other.token_ids for one, other in zip(samples, alone, strict=True)),
        stored_slots=(await client.stats()).tree_slots,
    )


async def retire(client, done, prompts):
    """Make a policy's KV unmatchable, and see its slots come back: in slices, between the requests of others."""
    await client.retire(lora_id=done.lora_id)
    done.matched_after = sum([(await client.match(prompt, lora_id=done.lora_id)).prefix_len for prompt in prompts])
    for _ in range(10_000):  # looks; each is a call, and so leaves the cache time
        done.slots_left = (await client.stats()).tree_slots
        if not done.slots_left:
            break


async def train(rounds, num_prompts, num_samples, num_workers, one_lora_id=False):
    """Rollouts and weight pushes in turn."""
    num_slots = PAGE_SIZE * num_prompts * (PROMPT_LEN // PAGE_SIZE + (num_samples + 2) * 2)
    pool = pool_config_for(TINY, num_slots, dtype="float32", device="cpu")
    cache = await start_cache_async(CacheConfig(page_size=PAGE_SIZE, pool=pool))
    start: Any = ray.remote(RolloutWorker).options(num_cpus=1)
    workers = [start.remote(cache) for _ in range(num_workers)]
    prompts = list(np.random.default_rng(0).integers(0, VOCABULARY, (num_prompts, PROMPT_LEN)))
    history: list[Any] = []
    async with PrefixCacheClient(cache, owner="trainer") as client:
        for number in range(rounds):
            policy = f"policy-{number}"
            await asyncio.gather(*(worker.push.remote(number) for worker in workers))  # no request runs now
            if one_lora_id and history:
                await retire(client, history[-1], prompts)
            lora_id = "policy" if one_lora_id else policy
            history.append(await roll_out(workers, client, policy, lora_id, prompts, num_samples))
            if not one_lora_id or number == rounds - 1:
                await retire(client, history[-1], prompts)
        await client.check_invariants()
    await asyncio.to_thread(shutdown_cache, cache)
    return history


def promises(done):
    """What the cache should have done for a policy, and whether it did."""
    return {
        "a policy computes each prompt once": done.reused_tokens == done.prompt_tokens - done.needed_tokens,
        "answers are those without the cache": done.changed_answers == 0,
        "nothing of a retired policy is matched": done.matched_after == 0,
        "its slots come back": done.slots_left == 0,
    }


def table(history):
    """The closing table."""
    rows = table_of("policy", ">hit rate", ">answers changed", ">slots", ">matched later", ">slots later")
    for each in history:
        counts = (each.changed_answers, each.stored_slots, each.matched_after, each.slots_left)
        rows.add_row(each.policy, f"{each.reused_tokens / each.prompt_tokens:.1%}", *(f"{count:,}" for count in counts))
    return rows


def main(
    rounds: Count = 3,
    prompts: Count = 8,
    samples: Count = 4,
    workers: Count = 2,
    one_lora_id: bool = False,
    as_json: AsJson = False,
):
    """Roll out a few policies, one after the other, and retire each."""
    ray.init("local", num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    history = asyncio.run(train(rounds, prompts, samples, workers, one_lora_id))
    show([asdict(each) for each in history], as_json, lambda: table(history))
    if broken := {promise for each in history for promise, kept in promises(each).items() if not kept}:
        sys.exit(f"not kept: {'; '.join(sorted(broken))}")


if __name__ == "__main__":
    typer.run(main)
