"""`LeasedRequest`: one request of a worker, from its lease to the last insert.

    prefix    prompt                    generated
    |·········|─────────┊──────────────┊──|────────────────┊────|
     from the  prefill   ┊ in parts, where a state is        ┊
     cache               ┊ published: ─────────────────────> ┊ the last page boundary

Without recurrent states the prefill is one part. With a sliding window, what decoding has left behind is freed as it
goes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raydix.actors.huggingface.pooled_cache import PooledCache
from raydix.schemas import PoolExhausted

if TYPE_CHECKING:
    from raydix.actors.client.attached_pool import AttachedPool
    from raydix.actors.client.lease import Lease
    from raydix.actors.huggingface.causal_model import CausalModel
    from raydix.actors.huggingface.copied_cache import CopiedCache
    from raydix.actors.huggingface.generation import GreedyDecoding


class LeasedRequest:
    """Runs the model over what the lease does not hold yet, and publishes it.

    Args:
        model: what runs.
        pool: the cache's.
        lease: of the prompt and all that will be generated but the last token.
        decoding: the tokens.
        branching_len: where the cache says that a state is worth publishing, if anywhere.
    """

    def __init__(
        self,
        model: CausalModel,
        pool: AttachedPool,
        lease: Lease,
        decoding: GreedyDecoding,
        branching_len: int | None = None,
    ) -> None:
        self._model = model
        self._pool = pool
        self._lease = lease
        self._decoding = decoding
        self._branching_len = branching_len
        self._page_size = pool.layout.page_size
        self._state_len = lease.prefix_len  # tokens after which the last state was published
        self._window_from = 0  # the window KV of the private tokens before this has been freed
        self._cache: PooledCache | CopiedCache

    async def run(self) -> None:
        """Prefill, publish the prompt, decode, publish the rest; the lease is released then."""
        decoding, lease = self._decoding, self._lease
        decoding.reuse(lease.prefix_len)
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
        await self._publish(with_state=self._at_page_end(), release=True)

    async def _decode(self) -> None:
        decoding = self._decoding
        last_page_end = self._floor(decoding.max_computed)
        publishes = self._model.layers.has_states and self._model.traits.decodes_alike
        while not decoding.done:
            await self._step()
            await self._leave_window()
            if publishes and decoding.num_computed == last_page_end and not decoding.done:
                await self._publish(with_state=True)

    async def _decode_unpublished(self) -> None:
        """Publish the prompt alone: decoding leaves other KV and states than a prefill, which the next turn needs."""
        await self._publish(with_state=self._at_page_end())
        await self._decode()
        await self._lease.release()

    async def _step(self, stop: int | None = None) -> None:
        await self._model.advance(self._decoding, self._cache, stop)

    # ---------------------------------------------------------------- states

    def _state_stops(self) -> list[int]:
        """Return where in the prompt a state is published: where prompts differed, and at its last page boundary.

        The same prompt again, or a longer one, continues from there; the last token is computed in any case.
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

    async def _leave_window(self) -> None:
        """Free the window KV that no coming token attends to: now and then, a quarter of a window at least."""
        window, lease = self._model.layers.window, self._lease
        if window is None:
            return
        attended_from = max(0, self._decoding.num_computed - window + 1)
        freed_to = self._floor(attended_from) - self._page_size  # the cache keeps one page more
        if freed_to - max(lease.published_len, self._window_from) >= max(self._page_size, window // 4):
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
        k, v = await pool.read_kv(lease, lease.slots[: lease.prefix_len])
        return await model.run(model.copied_cache, k, v)

    async def _repoint(self) -> None:
        """Where the model runs, for slots are brought to its device behind all that runs there."""
        if isinstance(self._cache, PooledCache):
            lease = self._lease
            swa_slots = None if self._model.layers.window is None else lease.swa_slots
            await self._model.run(self._cache.repoint, lease.slots, swa_slots)

    async def _publish(self, *, with_state: bool = False, release: bool = False) -> None:
        decoding, lease = self._decoding, self._lease
        stop = decoding.num_computed
        if not isinstance(self._cache, PooledCache):
            k, v = await self._model.run(self._cache.take_computed)
            await self._pool.write_kv(lease, lease.slots[stop - k.shape[1] : stop], k, v)
        await self._insert(with_state, release)
        if not release:
            await self._repoint()

    async def _insert(self, with_state: bool, release: bool) -> None:
        """Publish what is computed, with the state after it if there is room for one more."""
        computed = self._decoding.computed
        if with_state:
            try:
                await self._lease.insert(computed, publish_state=True, release=release)
            except PoolExhausted:  # every state is in use: the KV is worth publishing all the same
                pass
            else:
                self._state_len = len(computed)
                return
        await self._lease.insert(computed, release=release)

    def _floor(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self._page_size
