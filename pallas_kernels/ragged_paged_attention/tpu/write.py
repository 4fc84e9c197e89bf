"""Writes new keys and values into their pages, in place.

A copy writes whole stripes of a page, so a stripe that is only partly new is merged with its old content. The pages of
a row with several queries are read again by every tile that sees them: a `Writer` writes them once, before attention
reads any. The last page of a row with one query is on its way to the matrix units anyway: a `Merger` puts the token in
there.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention.tpu.walk import Ref, RowPlace, Scalar, Walk, cdiv, div, rem

SLOTS = 3  # chunks: one on its way in, one being merged, one on its way out
MERGE_SLOTS = 2  # stripes on their way out


def stripe_tokens(page_size: int, dtype: Any) -> int:
    """Returns how many tokens are written together: the rows of a memory tile, 16 of two bytes or four, 32 of one."""
    return min(page_size, 32 if jnp.dtype(dtype).itemsize == 1 else 16)


class _NewTokens(NamedTuple):
    """New tokens of one row in an aligned run of positions that is whole pages. All zeros mean no tokens."""

    token: jax.Array  # the first one's number in the batch
    begin: jax.Array  # where it goes in the run
    end: jax.Array  # after the last one

    def first_stripe(self, stripe: int) -> jax.Array:
        return div(self.begin, stripe)

    def num_stripes(self, stripe: int) -> jax.Array:
        return cdiv(self.end, stripe) - div(self.begin, stripe)


@dataclass(frozen=True)
class Writer:
    """Copies the new keys and values of the rows of `walk` to their pages. They are all in HBM when `run` returns."""

    walk: Walk
    layer: Scalar
    new: Ref  # HBM [T, K, W]
    pages: Ref  # HBM [L, P, K, S, W]
    tokens: Ref  # VMEM [SLOTS, run, K, W]: as they come, a token's heads together
    stripe: Ref  # VMEM f32[stripe, K, W]: one head's tokens can be picked from 32 bits only
    staged: Ref  # VMEM [SLOTS, run // stripe, K, stripe, W]: as pages have them
    chunks: Ref  # SMEM i32[SLOTS, 3]: `_NewTokens` in each slot
    targets: Ref  # SMEM i32[SLOTS, run // S]: the run's pages
    fetched: Ref  # DMA semaphores [SLOTS]
    written: Ref  # DMA semaphores [SLOTS]

    @staticmethod
    def scratch(pages: Ref, run_tokens: int) -> dict[str, Any]:
        _, _, num_heads, page_size, width = pages.shape
        stripe = stripe_tokens(page_size, pages.dtype)
        return dict(
            tokens=pltpu.VMEM((SLOTS, run_tokens, num_heads, width), pages.dtype),
            stripe=pltpu.VMEM((stripe, num_heads, width), jnp.float32),
            staged=pltpu.VMEM((SLOTS, run_tokens // stripe, num_heads, stripe, width), pages.dtype),
            chunks=pltpu.SMEM((SLOTS, len(_NewTokens._fields)), jnp.int32),
            targets=pltpu.SMEM((SLOTS, run_tokens // page_size), jnp.int32),
            fetched=pltpu.SemaphoreType.DMA((SLOTS,)),
            written=pltpu.SemaphoreType.DMA((SLOTS,)),
        )

    @property
    def run_tokens(self) -> int:
        return self.tokens.shape[1]

    @property
    def stripe_size(self) -> int:
        return self.stripe.shape[0]

    def run(self) -> None:
        for slot in range(SLOTS):
            self._remember(jnp.int32(slot), _NewTokens(*[jnp.int32(0)] * 3))
        place, index = self._fetch(self.walk.start(), jnp.int32(0), jnp.int32(0))

        def step(state: tuple[RowPlace, jax.Array, jax.Array, jax.Array]) -> Any:
            place, index, number, _ = state
            slot, following = rem(number, SLOTS), rem(number + 1, SLOTS)
            self._wait_written(following)
            place, index = self._fetch(place, index, following)
            self._merge(slot)
            return place, index, number + 1, self._chunk(following).end

        # A walk ends with a chunk without tokens, which the loop's condition sees.
        _, _, number, _ = lax.while_loop(
            lambda state: state[3] > 0, step, (place, index, jnp.int32(0), self._chunk(jnp.int32(0)).end)
        )
        for back in range(1, SLOTS):

            @pl.when(number >= back)
            def _(back: int = back) -> None:
                self._wait_written(rem(number - back, SLOTS))

    def _chunk(self, slot: jax.Array) -> _NewTokens:
        return _NewTokens(*(self.chunks[slot, field] for field in range(len(_NewTokens._fields))))

    def _remember(self, slot: jax.Array, chunk: _NewTokens) -> None:
        for field, value in enumerate(chunk):
            self.chunks[slot, field] = value

    def _fetch(self, place: RowPlace, index: jax.Array, slot: jax.Array) -> tuple[RowPlace, jax.Array]:
        """Starts fetching the row's chunk `index` into `slot`. Returns the place and index of the next chunk."""
        rows = self.walk.rows
        row = jnp.minimum(place.row, rows.count - 1)
        length, kv_len = rows.query_len(row), rows.kv_lens[row]
        start = kv_len - length
        run_start = (div(start, self.run_tokens) + index) * self.run_tokens
        first, end = jnp.maximum(start, run_start), jnp.minimum(kv_len, run_start + self.run_tokens)
        exists = place.row < rows.count
        chunk = _NewTokens(rows.first_token(row) + first - start, first - run_start, end - run_start)
        self._remember(slot, _NewTokens(*(jnp.where(exists, value, 0) for value in chunk)))

        @pl.when(exists)
        def _() -> None:
            page_size = self.pages.shape[3]
            first_page = div(run_start, page_size)

            def look_up(index: jax.Array, _: None) -> None:
                self.targets[slot, index] = self.walk.page(place, first_page + index)

            lax.fori_loop(div(chunk.begin, page_size), cdiv(chunk.end, page_size), look_up, None)
            self._copy_tokens(chunk, slot).start()
            self._for_partial_stripes(chunk, lambda stripe: self._copy_old(stripe, slot).start())

        is_done = run_start + self.run_tokens >= kv_len
        return self.walk.step(place, is_done & exists), jnp.where(is_done, 0, index + 1)

    def _merge(self, slot: jax.Array) -> None:
        """Puts the chunk in `slot` into the order of pages, and starts writing it."""
        chunk = self._chunk(slot)
        self._copy_tokens(chunk, slot).wait()
        self._for_partial_stripes(chunk, lambda stripe: self._copy_old(stripe, slot).wait())
        size, num_heads, width = self.stripe.shape

        def merge_stripe(index: jax.Array, _: None) -> None:
            self.stripe[...] = self.tokens[slot, pl.ds(index * size, size)].astype(jnp.float32)
            at = index * size + lax.broadcasted_iota(jnp.int32, (size, width), 0)
            is_new = (at >= chunk.begin) & (at < chunk.end)
            for head in range(num_heads):
                old = self.staged[slot, index, head].astype(jnp.float32)
                merged = jnp.where(is_new, self.stripe[:, head, :], old)
                self.staged[slot, index, head] = merged.astype(self.staged.dtype)
            self._copy_stripe(index, slot).start()

        first = chunk.first_stripe(size)
        lax.fori_loop(first, first + chunk.num_stripes(size), merge_stripe, None)

    def _for_partial_stripes(self, chunk: _NewTokens, do: Any) -> None:
        """Calls `do` for the first and the last stripe of the chunk, if it does not fill them."""
        size = self.stripe_size
        first, last = div(chunk.begin, size), div(chunk.end - 1, size)
        begins_inside, ends_inside = rem(chunk.begin, size) > 0, rem(chunk.end, size) > 0
        pl.when(begins_inside | (ends_inside & (first == last)))(lambda: do(first))
        pl.when(ends_inside & (first != last))(lambda: do(last))

    def _copy_tokens(self, chunk: _NewTokens, slot: jax.Array) -> Any:
        length = chunk.end - chunk.begin
        return pltpu.make_async_copy(
            self.new.at[pl.ds(chunk.token, length)],
            self.tokens.at[slot, pl.ds(chunk.begin, length)],
            self.fetched.at[slot],
        )

    def _stripe_of_page(self, index: jax.Array, slot: jax.Array) -> Any:
        size, page_size = self.stripe_size, self.pages.shape[3]
        page = self.targets[slot, div(index * size, page_size)]
        offset = pl.multiple_of(rem(index * size, page_size), size)
        return self.pages.at[self.layer, page, :, pl.ds(offset, size)]

    def _copy_old(self, index: jax.Array, slot: jax.Array) -> Any:
        return pltpu.make_async_copy(
            self._stripe_of_page(index, slot), self.staged.at[slot, index], self.fetched.at[slot]
        )

    def _copy_stripe(self, index: jax.Array, slot: jax.Array) -> Any:
        return pltpu.make_async_copy(
            self.staged.at[slot, index], self._stripe_of_page(index, slot), self.written.at[slot]
        )

    def _wait_written(self, slot: jax.Array) -> None:
        """Waits for the last write from `slot`."""
        chunk = self._chunk(slot)

        @pl.when(chunk.end > 0)
        def _() -> None:
            first = chunk.first_stripe(self.stripe_size)
            end = first + chunk.num_stripes(self.stripe_size)
            lax.fori_loop(first, end, lambda index, _: self._copy_stripe(index, slot).wait(), None)


@dataclass(frozen=True)
class Merger:
    """Puts the one new token of a row into its last stripe, while that is in VMEM, and writes the stripe back."""

    new: Ref  # HBM [T, K, W]
    tokens: Ref  # VMEM [fetch slots, 1, K, W]
    token: Ref  # VMEM f32[K, W]: one head can be picked from 32 bits only
    staged: Ref  # VMEM [MERGE_SLOTS, K, stripe, W]
    busy: Ref  # SMEM i32[MERGE_SLOTS]: 1 when a stripe is on its way out
    fetched: Ref  # DMA semaphores [fetch slots]
    written: Ref  # DMA semaphores [MERGE_SLOTS]

    @staticmethod
    def scratch(pages: Ref, fetch_slots: int) -> dict[str, Any]:
        _, _, num_heads, page_size, width = pages.shape
        stripe = stripe_tokens(page_size, pages.dtype)
        return dict(
            tokens=pltpu.VMEM((fetch_slots, 1, num_heads, width), pages.dtype),
            token=pltpu.VMEM((num_heads, width), jnp.float32),
            staged=pltpu.VMEM((MERGE_SLOTS, num_heads, stripe, width), pages.dtype),
            busy=pltpu.SMEM((MERGE_SLOTS,), jnp.int32),
            fetched=pltpu.SemaphoreType.DMA((fetch_slots,)),
            written=pltpu.SemaphoreType.DMA((MERGE_SLOTS,)),
        )

    def start(self) -> None:
        for slot in range(MERGE_SLOTS):
            self.busy[slot] = 0

    def fetch(self, token: jax.Array, slot: jax.Array) -> None:
        """Starts fetching the token that will be merged from `slot`."""
        self._copy(token, slot).start()

    def merge(
        self, token: jax.Array, slot: jax.Array, number: jax.Array, stripe: Ref, at: jax.Array, target: Ref
    ) -> None:
        """Puts the token of `slot` at index `at` of `stripe` [K, stripe, W], and starts writing it to `target`.

        This is the `number`-th write. Tokens after this one stay in `target`, and are zero here.
        """
        self._copy(token, slot).wait()
        out = rem(number, MERGE_SLOTS)
        self._wait_written(out, target)
        self.token[...] = self.tokens[slot, 0].astype(jnp.float32)
        num_heads, size, width = stripe.shape
        index = lax.broadcasted_iota(jnp.int32, (size, width), 0)
        for head in range(num_heads):
            merged = jnp.where(index == at, self.token[pl.ds(head, 1), :], stripe[head].astype(jnp.float32))
            self.staged[out, head] = merged.astype(self.staged.dtype)
            stripe[head] = jnp.where(index <= at, merged, 0).astype(stripe.dtype)
        self.busy[out] = 1
        self._copy_out(out, target).start()

    def finish(self, target: Ref) -> None:
        """Waits until all is written. `target` is any stripe in HBM, because only its size matters."""
        for slot in range(MERGE_SLOTS):
            self._wait_written(jnp.int32(slot), target)

    def _copy(self, token: jax.Array, slot: jax.Array) -> Any:
        return pltpu.make_async_copy(self.new.at[pl.ds(token, 1)], self.tokens.at[slot], self.fetched.at[slot])

    def _copy_out(self, slot: jax.Array, target: Ref) -> Any:
        return pltpu.make_async_copy(self.staged.at[slot], target, self.written.at[slot])

    def _wait_written(self, slot: jax.Array, target: Ref) -> None:
        @pl.when(self.busy[slot] == 1)
        def _() -> None:
            self._copy_out(slot, target).wait()
            self.busy[slot] = 0
