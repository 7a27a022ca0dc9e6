"""The requests of the survey: cuts, decoding over the window, second turns, repeated tokens, pads and evictions.

Two workers share a cache, and one writes the KV that the other one reads. Every answer is compared row by row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from support.models.survey_references import Passes, difference, is_dynamic, make_model, run_own_cache
from transformers import PreTrainedConfig

from raydix.actors import LocalPrefixCache
from raydix.actors.huggingface.forward_pass import pad_token_id
from raydix.actors.huggingface.layer_mapping import ModelLayers
from raydix.actors.huggingface.worker import Generation, TransformersWorker, cache_config_for
from raydix.schemas import CacheConfig, CacheStats, EvictionConfig

__all__ = ["TOLERANCE", "Prompts", "ServedModel", "Tally", "config_of", "counted"]

TOLERANCE = 5e-3
"""In standard deviations of the logits. Float32 was 2e-4 off on most processors, and a twin 1.3e-3 on one."""

SHORT, LONG = 24, 40  # tokens of a prompt, both longer than the windows
VOLATILE = (
    *("uptime_s", "oldest_lease_s", "loop_lag_ms", "batch_size", "batches", "requests", "eviction_task"),
    *("acquire_latency", "lock_latency", "insert_latency"),
)


def config_of(config: PreTrainedConfig, page_size: int, dtype: torch.dtype, **sizes: int) -> CacheConfig:
    """The cache that serves a model; `sizes` are those of its pool.

    Raises:
        ConfigMismatch: the model is refused.
    """
    layers = ModelLayers.of(config)
    sizes = {"num_slots": 8192} | sizes
    if layers.has_states:
        sizes = {"num_state_slots": 256} | sizes
    else:
        sizes.pop("num_state_slots", None)
    if layers.window is None:
        sizes.pop("num_swa_slots", None)
    return cache_config_for(
        deepcopy(config),
        **sizes,
        dtype=dtype,
        device="cpu",
        page_size=page_size,
        eviction=EvictionConfig(high_watermark=1.0),  # nothing is evicted but in need
        validate=True,
    )


def counted(stats: CacheStats) -> dict[str, Any]:
    """The state that a refused worker must not change."""
    return stats.model_dump(exclude=set(VOLATILE))


class Prompts:
    """Random prompts of a vocabulary; the pad id is in none of them but those that ask for it.

    Attributes:
        pad: the pad id, if there is one.
        may_pad: whether a prompt with pads has a right answer. The embedding of a pad is 0, so an indexer gives all
            tokens the same score; which of them it attends to changes with the tokens after it, in one pass as well.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        text = config.get_text_config(decoder=True)
        self._vocab_size: int = text.vocab_size
        self.pad = pad_token_id(config)
        self.may_pad = self.pad is not None and not hasattr(text, "index_topk")

    def random(self, num_tokens: int, seed: int = 0) -> list[int]:
        """Return random ids."""
        ids = np.random.default_rng(seed).integers(0, self._vocab_size, num_tokens)
        ids[ids == self.pad] = 5 if self.pad != 5 else 6
        return [int(token) for token in ids]

    def other(self, token: int) -> int:
        """Return an id that is neither this one nor the pad."""
        return next(each for each in range(11, self._vocab_size) if each not in (token, self.pad))

    def repeating(self) -> list[int]:
        """Return a prompt of one token again and again, then of two in turn."""
        one, first, second = 17, 21, 23
        return [one] * 14 + [first, second] * 8 + self.random(LONG - 30, seed=3)

    def padded(self) -> list[int]:
        """Return a prompt with pads inside, on both sides of page boundaries."""
        assert self.pad is not None, "the model has no pad"
        prompt = self.random(LONG, seed=4)
        for index in (3, 15, 16, 17, 25, 36):
            prompt[index] = self.pad
        return prompt


@dataclass
class Tally:
    """The results: the largest difference of each case, near ties, and faults.

    Attributes:
        worst: in standard deviations of the logits, by case.
        near_ties: generated tokens that are not the likeliest ones, but as likely within the difference allowed.
        faults: descriptions of wrong results.
        num_hits: requests with a hit.
        num_rows: logits compared.
    """

    worst: dict[str, float] = field(default_factory=dict)
    near_ties: int = 0
    faults: list[str] = field(default_factory=list)
    num_hits: int = 0
    num_rows: int = 0

    @property
    def largest(self) -> float:
        return max(self.worst.values(), default=math.nan)

    def compare(self, case: str, found: Generation, expected: torch.Tensor, num_prompt: int) -> None:
        """Compare an answer with the logits of its whole sequence, `[n, vocabulary]`."""
        assert found.logits is not None, "the logits were asked for"
        self.num_hits += found.prefix_len > 0
        self.num_rows += len(found.logits)
        if len(found.logits) != len(expected) - found.prefix_len:
            self.faults.append(f"{case}: {len(found.logits)} logits, not {len(expected) - found.prefix_len}")
            return
        off = difference(found.logits, expected[found.prefix_len :])
        self.worst[case] = max(off, self.worst.get(case, 0.0))
        if off > TOLERANCE:
            self.faults.append(f"{case}: {off:.2g} standard deviations off")
        rows = expected[num_prompt - 1 :]
        gaps = (rows.max(-1).values - rows[range(len(rows)), list(found.token_ids)]) / expected.double().std()
        self.near_ties += sum(0 < gap <= 2 * TOLERANCE for gap in gaps.tolist())
        if wrong := [index for index, gap in enumerate(gaps.tolist()) if gap > 2 * TOLERANCE]:
            self.faults.append(f"{case}: generated tokens {wrong} are not the likeliest ones")

    def check(self, case: str, good: bool) -> None:
        """Count a fault unless something holds."""
        if not good:
            self.faults.append(case)


class ServedModel:
    """A model, two workers and their cache; most methods are one case each.

    Args:
        config: a tiny one.
        page_size: of the cache.
        dtype: of the model.
        tally: gets what is found.
        cuts: lengths of prefixes that are reused, of those at page boundaries. None: all.

    Raises:
        ConfigMismatch: the model is refused.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        page_size: int,
        dtype: torch.dtype,
        tally: Tally,
        cuts: Iterable[int] | None = None,
    ) -> None:
        self._config = config
        self._page_size = page_size
        self._dtype = dtype
        self._tally = tally
        self._cuts = None if cuts is None else set(cuts)
        self._prompts = Prompts(config)
        self._is_dynamic = is_dynamic(config)
        self.cache_config = config_of(config, page_size, dtype)
        self.cache = LocalPrefixCache(self.cache_config)
        self.workers = self._make_workers(self.cache)
        self._passes = Passes(config, dtype)
        self._model = make_model(config, dtype)

    def _make_workers(self, cache: LocalPrefixCache) -> list[TransformersWorker]:
        return [
            TransformersWorker(cache, model=deepcopy(self._config), dtype=self._dtype, device="cpu") for _ in range(2)
        ]

    async def open(self) -> None:
        """Open the workers, and learn how they run the model."""
        await self.cache.open()
        for worker in self.workers:
            await worker.open()
        self.traits = self.workers[0]._model.traits
        self._has_states = self.workers[0]._model.layers.has_states
        self._least = self.workers[0]._model.least_part

    async def close(self) -> None:
        """Close the workers and the cache, which must hold nothing for them any more."""
        await self._close(self.workers, self.cache)

    async def _close(self, workers: list[TransformersWorker], cache: LocalPrefixCache) -> None:
        stats = await cache.stats()
        self._tally.check("a lease is left open", (stats.open_leases, stats.private_slots) == (0, 0))
        for worker in workers:
            await worker.close()
        await cache.check_invariants()
        await cache.close()

    # ---------------------------------------------------------------- references

    def _ends(self, num_prompt: int, num_all: int, start: int) -> list[int]:
        """Where a worker cuts a sequence of which it reuses `start` tokens: at a state, and at each generated token."""
        last = (num_prompt - self._least) // self._page_size * self._page_size
        states = [last] if self._has_states and (last - start >= self._least or not start) else []
        return [start, *states, *range(num_prompt, num_all)]

    def _expected(self, prompt: Sequence[int], found: Generation) -> torch.Tensor:
        """The logits of a whole sequence in one pass; those of decoding by the model's own cache, if they differ."""
        tokens = [*prompt, *found.token_ids[:-1]]
        in_one = self._passes.logits(tokens, len(prompt))
        if self.traits.decodes_alike:
            return in_one
        own = run_own_cache(
            self._model, tokens, self._ends(len(prompt), len(tokens), found.prefix_len), self.traits.positions
        )
        return torch.cat([in_one[: len(prompt)], own[len(prompt) :]])

    async def _ask(self, case: str, worker: TransformersWorker, prompt: list[int], new: int, **how: Any) -> Generation:
        found = await worker.generate(prompt, new, return_logits=True, eos_token_id=(), **how)
        self._tally.compare(case, found, self._expected(prompt, found), len(prompt))
        return found

    def _cuts_of(self, prompt: list[int]) -> list[int]:
        cuts = range(self._page_size, len(prompt) - self._least + 1, self._page_size)
        return [cut for cut in cuts if self._cuts is None or cut in self._cuts]

    # ---------------------------------------------------------------- cases in float32

    async def ask_at_cuts(self) -> None:
        """A prompt that the other worker has computed up to each page boundary."""
        for num_tokens in (SHORT, LONG) if self._is_dynamic else (LONG,):
            await self._ask_at_cuts("cuts", self._prompts.random(num_tokens), 3)

    async def _ask_at_cuts(self, case: str, prompt: list[int], num_new: int, every: int = 1) -> None:
        writer, reader = self.workers
        for cut in self._cuts_of(prompt)[::every]:
            key = f"{case} {len(prompt)} {cut}"
            other = [self._prompts.other(prompt[cut])] * self._least
            await writer.generate(prompt[:cut] + other, 1, extra_key=key, eos_token_id=())
            found = await self._ask(case, reader, prompt, num_new, extra_key=key)
            hit = found.prefix_len == cut or (self._is_dynamic and not found.prefix_len)
            self._tally.check(f"{case}: {found.prefix_len} tokens reused, not {cut}", hit)

    async def decode_over_the_window(self) -> None:
        """A prompt shorter than the windows, decoded over them; then a second and a third turn over that."""
        prompt = self._prompts.random(5, seed=1)
        num_new = LONG if self._cuts is None or self._is_dynamic else SHORT
        await self._continue(prompt, await self._ask("decoding", self.workers[0], prompt, num_new))

    async def take_turns(self) -> None:
        """Turns over a long prompt, by the other worker each time."""
        for num_new in (9, 11):  # the tokens computed end a page of four, or not
            prompt = self._prompts.random(LONG, seed=10 + num_new)
            await self._continue(prompt, await self._ask("decoding", self.workers[0], prompt, num_new))

    async def _continue(self, prompt: list[int], found: Generation) -> None:
        for seed, worker in ((7, self.workers[1]), (8, self.workers[0])):
            computed = len(prompt) + len(found.token_ids) - 1
            kept = computed if self.traits.decodes_alike else len(prompt) - self._least
            prompt = [*prompt, *found.token_ids, *self._prompts.random(7, seed=seed)]
            found = await self._ask("turns", worker, prompt, 6)
            least = 0 if self._is_dynamic else kept // self._page_size * self._page_size
            self._tally.check(f"turns: {found.prefix_len} tokens reused, not {least}", found.prefix_len >= least)

    async def repeat_tokens(self) -> None:
        """A prompt of repeated tokens."""
        await self._ask_at_cuts("repeats", self._prompts.repeating(), 4, every=max(1, 4 // self._page_size))

    async def ask_with_pads(self) -> None:
        """A prompt with pads inside, if the model has one."""
        if self._prompts.may_pad:
            await self._ask_at_cuts("pads", self._prompts.padded(), 4, every=max(1, 3 // self._page_size))

    async def ask_alone(self) -> None:
        """Requests that reuse nothing; the cache stays as it is."""
        before = counted(await self.cache.stats())
        for prompt in (self._prompts.random(5, seed=1), self._prompts.random(LONG)):
            await self._ask("reuse=False", self.workers[1], prompt, 14, reuse=False)
        self._tally.check("reuse=False changes the cache", counted(await self.cache.stats()) == before)

    async def ask_under_pressure(self) -> None:
        """Prompts of which a small cache holds one and a bit: it evicts, and serves what is left."""
        longest = math.ceil(((SHORT if self._is_dynamic else LONG) + 4) / self._page_size) * self._page_size
        cache = LocalPrefixCache(
            config_of(
                self._config,
                self._page_size,
                self._dtype,
                num_slots=longest + 16,
                num_swa_slots=longest + 16,
                num_state_slots=4,
            )
        )
        await cache.open()
        workers = self._make_workers(cache)
        shared = self._prompts.random(17, seed=30)
        prompts = [(shared if i % 2 else []) + self._prompts.random(LONG, seed=40 + i) for i in range(4)]
        hits = self._tally.num_hits
        for i in (0, 1, 2, 3, 1) if self._cuts else (0, 1, 2, 3, 1, 0, 2, 3):
            for worker in workers:
                await self._ask("evictions", worker, prompts[i][: SHORT if self._is_dynamic else LONG], 4)
        stats = await cache.stats()
        self._tally.check("evictions: none", stats.tokens_evicted > 0)
        self._tally.check("evictions: no hit", self._tally.num_hits > hits)
        await self._close(workers, cache)

    # ---------------------------------------------------------------- bfloat16

    async def compare_bits(self) -> None:
        """Each cut and a second turn, with the model's own cache cut at the same places."""
        writer, reader = self.workers
        prompt = self._prompts.random(SHORT if self._is_dynamic else LONG)
        for cut in self._cuts_of(prompt):
            other = [self._prompts.other(prompt[cut])] * self._least if self._has_states else []
            await writer.generate(prompt[:cut] + other, 1, extra_key=f"{cut}", eos_token_id=())
            found = await self._ask_bits("cuts", reader, prompt, 4, [cut], extra_key=f"{cut}")
            self._tally.check(f"cuts: {found.prefix_len} tokens reused, not {cut}", found.prefix_len == cut)

    async def _ask_bits(
        self, case: str, worker: TransformersWorker, prompt: list[int], num_new: int, cuts: list[int], **how: Any
    ) -> Generation:
        found = await worker.generate(prompt, num_new, return_logits=True, eos_token_id=(), **how)
        tokens = [*prompt, *found.token_ids[:-1]]
        ends = [*cuts, *self._ends(len(prompt), len(tokens), found.prefix_len)]
        self._tally.compare(case, found, run_own_cache(self._model, tokens, ends, self.traits.positions), len(prompt))
        return found
