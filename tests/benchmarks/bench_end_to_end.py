"""Measure the gain from a prefix cache: time to first token and throughput, by the share of a prompt that hits.

    python -m benchmarks.bench_end_to_end [--quick]

in the tests' folder. A small Llama of random weights in this process, with KV in the cache's pool, against the same
model on its own `DynamicCache`.
"""

from __future__ import annotations

import asyncio
import sys
from statistics import median
from typing import NamedTuple

import numpy as np
from benchmarks.figures import HEADING, Figure
from numpy.typing import NDArray
from transformers import LlamaConfig

from raydix.actors import LocalPrefixCache
from raydix.actors.huggingface.worker import Generation, TransformersWorker, pool_config_for
from raydix.schemas import CacheConfig

PAGE = 16
HIT_RATES = (0.0, 0.25, 0.5, 0.75, 0.95)
MIN_SOONER = {0.0: 0.85, 0.75: 1.5, 0.95: 3.0}  # speed-up of the first token by hit rate
MIN_DECODED = 0.85  # of the speed without the cache
MODEL = LlamaConfig(
    vocab_size=4_096,
    hidden_size=512,
    intermediate_size=1_408,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=4_096,
    dtype="float32",
    eos_token_id=None,
)


class Speed(NamedTuple):
    """Medians over requests that hit the same share of their prompts."""

    hit_rate: float
    first_s: float  # time to first token
    decoded: float  # tokens a second after it, publishing included
    served: float  # prompt and generated tokens a second

    @classmethod
    def of(cls, prompt_len: int, generations: list[Generation]) -> Speed:
        """Return the medians."""
        return cls(
            median(each.prefix_len / prompt_len for each in generations),
            median(each.time_to_first_token_s for each in generations),
            median((len(each.token_ids) - 1) / (each.total_s - each.time_to_first_token_s) for each in generations),
            median((prompt_len + len(each.token_ids)) / each.total_s for each in generations),
        )


async def measure(prompt_len: int, num_new: int, num_requests: int) -> tuple[Speed, list[Speed]]:
    """Measure without the cache, and by hit rate; requests of all kinds take turns, each with a suffix of its own."""
    per_request = prompt_len + num_new + PAGE
    capacity = (len(HIT_RATES) * (num_requests + 1) + 2) * per_request // PAGE * PAGE
    config = CacheConfig(page_size=PAGE, pool=pool_config_for(MODEL, num_slots=capacity, device="cpu"))
    rng = np.random.default_rng(5)
    shared = _ids(rng, prompt_len)
    alone: list[Generation] = []
    by_rate: dict[float, list[Generation]] = {rate: [] for rate in HIT_RATES}
    async with LocalPrefixCache(config) as cache, TransformersWorker(cache, model=MODEL, device="cpu") as worker:
        await worker.generate(shared, 1)
        for _ in range(num_requests):
            alone.append(await worker.generate(_ids(rng, prompt_len), num_new, reuse=False))
            for rate, done in by_rate.items():
                num_hit = int(rate * prompt_len) // PAGE * PAGE
                prompt = np.concatenate((shared[:num_hit], _ids(rng, prompt_len - num_hit)))
                generation = await worker.generate(prompt, num_new)
                assert generation.prefix_len == num_hit, f"{generation.prefix_len} of {num_hit} tokens hit"
                done.append(generation)
    return Speed.of(prompt_len, alone), [Speed.of(prompt_len, done) for done in by_rate.values()]


def _ids(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    return rng.integers(0, MODEL.vocab_size, count)


def figures(quick: bool) -> list[Figure]:
    """Return figures by hit rate. The goals: a small cost without hits, a large gain with long ones."""
    prompt_len = 512 if quick else 1_024
    alone, speeds = asyncio.run(measure(prompt_len, num_new=8, num_requests=3 if quick else 7))
    found = []
    for rate, speed in zip(HIT_RATES, speeds, strict=True):
        what, to = f"first of {prompt_len:,} tokens, {rate:.0%} hit", "without cache"
        sooner, goal = alone.first_s / speed.first_s, MIN_SOONER.get(rate)
        found.append(Figure("end to end", what, 1e3 * speed.first_s, "ms", sooner, to, at_least=goal))
    for rate, speed in zip(HIT_RATES, speeds, strict=True):
        what, to = f"prompt and new tokens, {rate:.0%} hit", "without cache"
        found.append(Figure("end to end", what, speed.served, "1/s", speed.served / alone.served, to))
    decoded = speeds[0].decoded
    rate = decoded / alone.decoded
    found.append(Figure("end to end", "decoding", decoded, "1/s", rate, "without cache", at_least=MIN_DECODED))
    return found


def main() -> None:
    """Print the table."""
    print(HEADING)
    for figure in figures("--quick" in sys.argv):
        print(figure.line())


if __name__ == "__main__":
    main()
