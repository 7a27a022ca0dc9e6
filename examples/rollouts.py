"""Reinforcement-learning rollouts: samples share their prompt's KV, and new weights never hit the KV of old ones.

    python examples/rollouts.py --rounds 5 --prompts 16 --samples 8
    python examples/rollouts.py --one-lora-id

In each round one worker computes a prompt and draws the first tokens of its samples. Any worker then continues any
sample, from the prompt's KV in the shared cache. Each policy has a namespace, as `lora_id="policy-3"`. After a push
of new weights (random ones here) the old policy is retired: its KV cannot be matched any more, and its slots are freed.

With `--one-lora-id` all policies share one namespace, `lora_id="policy"`, and new weights replace the old ones. Then
the order is essential: stop requests, push to every worker, retire, go on. The first worker that serves a request binds
its weights, and the cache refuses workers with other weights. So a lost push cannot mix the KV of two policies.

The program ends with a table, and with exit status 1 if one of the `promises` was broken.
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
from raydix.actors.demo.run import MODEL
from raydix.actors.demo.workload import PAGE_SIZE, VOCABULARY
from raydix.actors.huggingface.worker import TransformersWorker, pool_config_for
from raydix.schemas import CacheConfig
from raydix.schemas.shown import rate

Count = Annotated[int, typer.Option(min=1)]
PROMPT_LEN, ANSWER_LEN = 256, 16  # whole pages, so that a sample computes nothing of its prompt
TINY = MODEL | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "dtype": "float32"}


class RolloutWorker(WatchedActor):
    """A policy model on the shared cache, with a method to push new weights."""

    def __init__(self, cache):
        self._cache = cache
        self._served: Any = None

    async def push(self, policy):
        """Load new weights, and open a new session with the cache."""
        if self._served is not None:
            await self._served.close()
        self._served = TransformersWorker(self._cache, model=TINY, seed=policy, device="cpu", num_threads=1)
        await self._served.open()

    async def first_tokens(self, prompt, num_samples, lora_id):
        """Compute and publish a prompt, and draw the first tokens of its samples from the policy's logits."""
        prefill = await self._served.generate(prompt, 1, lora_id=lora_id, return_logits=True)
        return torch.multinomial(prefill.logits[-1].softmax(0), num_samples).tolist(), prefill.prefix_len

    async def sample(self, prompt, lora_id, reuse=True):
        """Continue a prompt that ends with a sample's first token."""
        return await self._served.generate(prompt, ANSWER_LEN - 1, lora_id=lora_id, reuse=reuse)


@dataclass
class Round:
    """The figures of one policy."""

    policy: str
    lora_id: str
    prompt_tokens: int  # of all prefills and samples
    reused_tokens: int
    needed_tokens: int  # each prompt once, and each sample's first token
    changed_answers: int  # samples with another answer without the cache
    stored_slots: int  # at the end of the round
    matched_after: int = -1  # tokens of its prompts that still matched after `retire`
    slots_left: int = -1  # still cached after the reclaim


async def roll_out(workers, client, policy, lora_id, prompts, num_samples):
    """Run one round: each prompt once, then all samples, with the workers in turn."""
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
    """Make a policy's KV unmatchable, and wait until the background task has freed its slots."""
    await client.retire(lora_id=done.lora_id)
    done.matched_after = sum([(await client.match(prompt, lora_id=done.lora_id)).prefix_len for prompt in prompts])
    for _ in range(10_000):  # each call leaves the cache time for a slice
        done.slots_left = (await client.stats()).tree_slots
        if not done.slots_left:
            break


async def train(rounds, num_prompts, num_samples, num_workers, one_lora_id=False):
    """Alternate rollouts and weight pushes."""
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
    """Return the promises of the cache for a policy, and whether each was kept."""
    return {
        "a policy computes each prompt once": done.reused_tokens == done.prompt_tokens - done.needed_tokens,
        "answers are those without the cache": done.changed_answers == 0,
        "nothing of a retired policy is matched": done.matched_after == 0,
        "its slots come back": done.slots_left == 0,
    }


def table(history):
    """Return the table that the program prints at the end."""
    rows = table_of("policy", ">hit rate", ">answers changed", ">slots", ">matched later", ">slots later")
    for each in history:
        counts = (each.changed_answers, each.stored_slots, each.matched_after, each.slots_left)
        rows.add_row(each.policy, rate(each.reused_tokens, each.prompt_tokens), *(f"{count:,}" for count in counts))
    return rows


def main(
    rounds: Count = 3,
    prompts: Count = 8,
    samples: Count = 4,
    workers: Count = 2,
    one_lora_id: bool = False,
    as_json: AsJson = False,
):
    """Roll out a few policies, one after another, and retire each."""
    ray.init("local", num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    history = asyncio.run(train(rounds, prompts, samples, workers, one_lora_id))
    show([asdict(each) for each in history], as_json, lambda: table(history))
    if broken := {promise for each in history for promise, kept in promises(each).items() if not kept}:
        sys.exit(f"not kept: {'; '.join(sorted(broken))}")


if __name__ == "__main__":
    typer.run(main)
