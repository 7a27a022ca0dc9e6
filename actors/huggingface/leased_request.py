"""`LeasedRequest`: one request of a worker, from its lease to the last insert.

    prefix    prompt                    generated
    |·········|─────────┊──────────────┊──|────────────────┊────|
     from the  prefill   ┊ in parts, where a state is        ┊
     cache               ┊ published: ─────────────────────> ┊ the last page boundary

A pass computes at most `prefill_chunk` tokens. With a sliding window, decoding frees the KV behind the window. With
recurrent states, decoding copies its state at each page boundary, and publishes the last copy with the answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from raydix.actors.huggingface.pooled_cache import PooledCache
from raydix.cache_core.components.window_kv import kept_tail
from raydix.schemas import PoolExhausted

if TYPE_CHECKING:
    from raydix.actors.client.attached_pool import AttachedPool
    from raydix.actors.client.lease import Lease
    from raydix.actors.huggingface.causal_model import CausalModel
    from raydix.actors.huggingface.copied_cache import CopiedCache
    from raydix.actors.huggingface.generation import GreedyDecoding
    from raydix.actors.huggingface.slot_wait import SlotWait
    from raydix.schemas import CacheConfig


class _OutOfSlots(Exception):
    """Slots are short: the request gives its own back, and waits for all that it needs."""


class LeasedRequest:
    """Run the model over the tokens that the cache lacks, and publish their KV.

    Args:
        model: the model to run.
        pool: the pool of the cache.
        lease: a lease with slots for the prompt and all generated tokens but the last.
        decoding: the tokens of the request.
        prefill_chunk: the most tokens of a pass.
        branching_len: a length where the cache lacks a state that other prompts could reuse; None: no such length.
        wait: if the request takes its slots part by part: the time that it may wait for them. None: the lease has all.
    """

    def __init__(
        self,
        model: CausalModel,
        pool: AttachedPool,
        lease: Lease,
        decoding: GreedyDecoding,
        prefill_chunk: int,
        branching_len: int | None = None,
        wait: SlotWait | None = None,
    ) -> None:
        self._model = model
        self._pool = pool
        self._lease = lease
        self._decoding = decoding
        self._prefill_chunk = prefill_chunk
        self._branching_len = branching_len
        self._wait = wait
        self._page_size = pool.layout.page_size
        self._window = lease.client.config.sliding_window_size  # the model's, or a larger one
        self._state_len = lease.prefix_len  # tokens after which the last state was published
        self._boundary_len = 0  # tokens after which the state was copied to the lease's boundary slot; 0: it was not
        self._window_from = 0  # the window KV of the private tokens before this has been freed
        self._cache: PooledCache | CopiedCache

    async def run(self) -> None:
        """Prefill, publish the prompt, decode, publish the answer, and release the lease.

        If slots are short, a request that takes them part by part publishes its computed tokens, and ends its lease.
        Then `decoding` is not done, and another lease can go on.
        """
        try:
            await self._run()
        except _OutOfSlots:
            if self._decoding.num_computed > self._decoding.num_prompt and not self._model.traits.decodes_alike:
                await self._lease.release()
            else:
                await self._publish(with_state=self._at_page_end() and not self._boundary_len, release=True)

    async def _run(self) -> None:
        decoding, lease = self._decoding, self._lease
        decoding.reuse(lease.prefix_len, sum(lease.loaded))
        self._cache = await self._make_cache()
        for stop in self._state_stops():
            await self._step(stop)
            await self._publish(with_state=True)
        await self._step()
        if not self._model.traits.decodes_alike:
            await self._decode_unpublished()
            return
        if not decoding.done and self._floor(decoding.num_prompt) > lease.published_len:
            await self._publish()
        await self._decode()
        await self._publish(with_state=self._at_page_end() and not self._boundary_len, release=True)

    async def _decode(self) -> None:
        """Decode. Copy the state at each page boundary, as the answer may end before the next one.

        Without a slot for the copy, the state is published at the last boundary that the answer can reach.
        """
        decoding = self._decoding
        last_page_end = self._floor(decoding.max_computed)
        publishes = self._model.layers.has_states and self._model.traits.decodes_alike
        while not decoding.done:
            await self._step()
            await self._leave_window()
            if not publishes:
                continue
            if self._lease.boundary_slot is not None and isinstance(self._cache, PooledCache):
                if self._at_page_end():
                    await self._model.run(self._cache.copy_state, self._lease.boundary_slot)
                    self._boundary_len = decoding.num_computed
            elif decoding.num_computed == last_page_end and not decoding.done:
                await self._publish(with_state=True)

    async def _decode_unpublished(self) -> None:
        """Publish only the prompt: the next turn needs the KV of a prefill, and decoding computes another one.

        No insert follows the decoding, so the cache is asked whether the lease was open to its end.
        """
        await self._publish(with_state=self._at_page_end())
        await self._decode()
        await self._lease.confirm_open()
        await self._lease.release()

    async def _step(self, stop: int | None = None) -> None:
        """Run the known tokens without KV, at most up to `stop`, in parts."""
        decoding = self._decoding
        end = decoding.num_known if stop is None else stop
        for part in parts(decoding.num_computed, end, self._prefill_chunk, self._model.least_part):
            await self._take_slots(part)
            await self._model.advance(decoding, self._cache, None if part == decoding.num_known else part)

    # ---------------------------------------------------------------- slots, part by part

    async def _take_slots(self, end: int) -> None:
        """Extend the lease to `end` tokens, in whole pages; first free the window KV that no later token needs."""
        lease = self._lease
        if self._wait is None or len(lease) >= end:
            return
        await self._leave_window(least=1)
        page_end = min(-(-end // self._page_size) * self._page_size, self._decoding.max_computed)
        try:
            with self._wait.waiting() as left_s:
                await lease.extend(page_end - len(lease), timeout_s=left_s)
        except PoolExhausted as error:
            if not error.can_ever_fit or not self._wait.left_s:
                raise
            raise _OutOfSlots from error
        await self._repoint()

    # ---------------------------------------------------------------- states

    def _state_stops(self) -> list[int]:
        """Return the lengths of the prompt at which to publish a state: `branching_len`, and the last page boundary.

        The same prompt, or a longer one, can continue there; a request always computes the last token.
        """
        if not self._model.layers.has_states:
            return []
        least = self._model.least_part
        last = self._floor(max(0, self._decoding.num_prompt - least))
        stops, end = [], self._lease.prefix_len
        for stop in (last if self._branching_len is None else min(last, self._branching_len), last):
            if stop - end >= (least if end else 1):
                stops.append(stop)
                end = stop
        return stops

    def _at_page_end(self) -> bool:
        """Whether the tokens so far end a page, and their state is not published yet."""
        num_computed = self._decoding.num_computed
        return (
            self._model.layers.has_states
            and num_computed == self._floor(num_computed)
            and num_computed > self._state_len
        )

    # ---------------------------------------------------------------- windows

    async def _leave_window(self, least: int | None = None) -> None:
        """Free the window KV that no later token and no later request needs.

        Args:
            least: the fewest tokens to free; None: a quarter of a window.
        """
        lease, num_computed, window = self._lease, self._decoding.num_computed, self._window
        if window is None:
            return
        attended_from = max(0, num_computed - window + 1)
        freed_to = self._floor(num_computed) - kept_tail(window, self._page_size)
        least = window // 4 if least is None else least
        if freed_to - max(lease.published_len, self._window_from) >= max(self._page_size, least):
            await lease.release_window(attended_from)
            self._window_from = freed_to
            await self._repoint()

    # ---------------------------------------------------------------- the cache

    async def _make_cache(self) -> PooledCache | CopiedCache:
        pool, lease, model = self._pool, self._lease, self._model
        if pool.mapped and pool.k[0].device == model.device:
            return await model.run(
                PooledCache,
                pool,
                lease.slots,
                lease.prefix_len,
                swa_slots=None if model.layers.window is None else lease.swa_slots,
                state_slot=lease.state_slot,
                layers=model.layers,
                states=model.states,
            )
        if lease.prefix_len == 0:
            return model.copied_cache()
        prefix = await pool.read_kv(lease, lease.slots[: lease.prefix_len])
        return await model.run(model.copied_cache, *prefix)

    async def _repoint(self) -> None:
        """Update the slots on the model's thread, after the passes that run there."""
        if isinstance(self._cache, PooledCache):
            lease = self._lease
            swa_slots = None if self._model.layers.window is None else lease.swa_slots
            await self._model.run(self._cache.repoint, lease.slots, swa_slots)

    async def _publish(self, *, with_state: bool = False, release: bool = False) -> None:
        decoding, lease = self._decoding, self._lease
        stop = decoding.num_computed
        if not isinstance(self._cache, PooledCache):
            k, *others = await self._model.run(self._cache.take_computed)
            await self._pool.write_kv(lease, lease.slots[stop - k.shape[1] : stop], k, *others)
        await self._insert(with_state, release)
        if not release:
            await self._repoint()

    async def _insert(self, with_state: bool, release: bool) -> None:
        """Publish the computed tokens, with the state after them if a state slot is free, else the boundary's."""
        computed = self._decoding.computed
        if with_state:
            try:
                await self._lease.insert(computed, publish_state=True, release=release)
            except PoolExhausted:  # all state slots are in use: publish the KV without a state
                pass
            else:
                self._state_len = len(computed)
                return
        boundary_len = self._boundary_len or None if release else None
        await self._lease.insert(computed, release=release, boundary_len=boundary_len)

    def _floor(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self._page_size


def parts(start: int, end: int, part_len: int, least: int) -> Iterator[int]:
    """Yield where each part of the tokens [start, end) ends: parts of `part_len`, and the last of at least `least`."""
    while end - start >= part_len + least:
        start += part_len
        yield start
    yield end


def window_room(config: CacheConfig, num_tokens: int) -> int | None:
    """Return how many tokens a request can add to its lease at a time, whole pages; None: all, as they fit the pool.

    Besides the added tokens, the lease holds the window slots of two tails: of the published tokens, and of its own.
    """
    page, num_slots = config.page_size, config.pool.num_swa_slots or config.pool.num_slots
    if config.sliding_window_size is None or num_tokens <= num_slots - num_slots % page:
        return None
    room = num_slots - 2 * kept_tail(config.sliding_window_size, page)
    return max(page, room // page * page)
