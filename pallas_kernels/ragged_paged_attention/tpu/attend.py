"""Attends rows to their pages, with a stream of fetches that runs ahead of the matrix units, across tiles and rows."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention.tpu.blocks import LANES, Blocks, Problem
from pallas_kernels.ragged_paged_attention.tpu.walk import Ref, RowPlace, Scalar, Walk, cdiv, div, rem
from pallas_kernels.ragged_paged_attention.tpu.write import Merger, stripe_tokens

MASKED = -1e30  # finite: results of a block without keys for a query vanish with the query's first real logit
LOG2_E = math.log2(math.e)  # the softmax is in powers of two, which the hardware has
OUT_SLOTS = 2
FOLD = 16  # queries folded together: whole registers of 16 bits


class _Fetch(NamedTuple):
    """One fetch: consecutive pages of a row and the tile of its queries that reads them. All zeros mean no fetch."""

    num_queries: jax.Array
    token: jax.Array  # the first query's number in the batch
    head: jax.Array  # the first head
    position: jax.Array  # of the first query
    kv_len: jax.Array  # of the row
    first_key: jax.Array  # the position that the first page begins at
    num_pages: jax.Array
    last_page: jax.Array  # where the last of them is in HBM
    tile: jax.Array  # tiles before this one, of all rows
    is_first: jax.Array  # of its tile
    is_last: jax.Array


class _Cursor(NamedTuple):
    """The position of the next fetch."""

    place: RowPlace
    tile: jax.Array  # of the row; a part of the heads of the same queries is a tile of its own
    fetch: jax.Array  # of the tile
    tiles: jax.Array  # before this one, of all rows


@dataclass(frozen=True)
class Attender:
    """Attends the queries of the rows of `walk` to their pages. All outputs are in HBM when `run` returns.

    Without a `merger`, this step's keys and values are in the pages already. With a `merger`, rows have one query.
    """

    problem: Problem  # of one part of the heads
    blocks: Blocks
    scale: float
    soft_cap: float | None
    walk: Walk
    merger: Merger | None
    layer: Scalar
    window: Scalar
    sinks: Ref | None  # SMEM f32[H]
    slopes: Ref | None  # SMEM f32[H]
    tokens: Ref  # HBM [T, H', D]: queries, replaced by their outputs
    pages: Ref  # HBM [L, P, K, S, W]
    scales: Ref | None  # HBM f32[L, P, rows, 128], where tokens have scales of their own
    kv: Ref  # VMEM [slots, pages, K, S, W]
    queries: Ref  # VMEM [slots, tile, H' / parts, D]
    outputs: Ref  # VMEM [OUT_SLOTS, tile, H' / parts, D]
    folded: Ref  # VMEM [K, M, D to full lanes]: each KV head's queries, head by head
    peak: Ref  # VMEM f32[K, M, 128]: the largest logit so far, the same in every lane
    total: Ref  # VMEM f32[K, M, 128]: the softmax's denominator
    values: Ref  # VMEM f32[K, M, V]: weighted values in the last columns
    fetches: Ref  # SMEM i32[slots, fields of _Fetch]
    sent: Ref  # SMEM i32[OUT_SLOTS]: queries whose outputs are on their way
    fetched: Ref  # DMA semaphores [slots]
    written: Ref  # DMA semaphores [OUT_SLOTS]
    kv_scales: Ref | None = None  # VMEM f32[slots, pages, rows, 128]
    step_scales: Ref | None = None  # VMEM f32[K or 2 K, tokens of a step]: see `_line_up_scales`

    @staticmethod
    def scratch(problem: Problem, blocks: Blocks, pages: Ref, tokens: Ref, scales: Ref | None) -> dict[str, Any]:
        _, _, num_kv_heads, page_size, width = pages.shape
        _, num_heads, head_size = tokens.shape
        num_heads //= blocks.head_parts
        rows, tile, slots = blocks.tile_rows(problem), blocks.tile_queries, blocks.slots
        # The heads of a single query are rows of their own, and rows of two bytes cannot be written one by one.
        folded_dtype = jnp.float32 if tile == 1 else tokens.dtype
        of_tokens = {}
        if scales is not None:
            num_rows = num_kv_heads * problem.num_scales
            of_tokens = dict(
                kv_scales=pltpu.VMEM((slots, blocks.fetch_pages, *scales.shape[2:]), jnp.float32),
                step_scales=pltpu.VMEM((num_rows, blocks.step_pages * page_size), jnp.float32),
            )
        return dict(
            **of_tokens,
            kv=pltpu.VMEM((slots, blocks.fetch_pages, num_kv_heads, page_size, width), pages.dtype),
            queries=pltpu.VMEM((slots, tile, num_heads, head_size), tokens.dtype),
            outputs=pltpu.VMEM((OUT_SLOTS, tile, num_heads, head_size), tokens.dtype),
            folded=pltpu.VMEM((num_kv_heads, rows, problem.key_columns), folded_dtype),
            peak=pltpu.VMEM((num_kv_heads, rows, LANES), jnp.float32),
            total=pltpu.VMEM((num_kv_heads, rows, LANES), jnp.float32),
            values=pltpu.VMEM((num_kv_heads, rows, problem.value_columns), jnp.float32),
            fetches=pltpu.SMEM((slots, len(_Fetch._fields)), jnp.int32),
            sent=pltpu.SMEM((OUT_SLOTS,), jnp.int32),
            fetched=pltpu.SemaphoreType.DMA((slots,)),
            written=pltpu.SemaphoreType.DMA((OUT_SLOTS,)),
        )

    def run(self) -> None:
        slots = self.blocks.slots
        # Rows and columns that no query fills are multiplied too, so they must be finite.
        self.folded[...] = jnp.zeros(self.folded.shape, self.folded.dtype)
        for slot in range(OUT_SLOTS):
            self.sent[slot] = 0
        if self.merger is not None:
            self.merger.start()
        cursor = _Cursor(self.walk.start(), *[jnp.int32(0)] * 3)
        for ahead in range(slots - 1):
            cursor = self._fetch(cursor, jnp.int32(ahead))

        def step(state: tuple[_Cursor, jax.Array, jax.Array]) -> Any:
            cursor, number, _ = state
            cursor = self._fetch(cursor, rem(number + slots - 1, slots))
            self._attend(rem(number, slots))
            return cursor, number + 1, self.fetches[rem(number + 1, slots), 0]

        lax.while_loop(lambda state: state[2] > 0, step, (cursor, jnp.int32(0), self.fetches[0, 0]))
        for slot in range(OUT_SLOTS):
            self._wait_sent(jnp.int32(slot))
        if self.merger is not None:
            self.merger.finish(self.pages.at[0, 0, :, pl.ds(0, self.merger.staged.shape[2])])

    # Fetching.

    def _fetch(self, cursor: _Cursor, slot: jax.Array) -> _Cursor:
        """Starts the copies of the fetch at the cursor. Returns the cursor after it."""
        rows, page_size, tile = self.walk.rows, self.problem.page_size, self.blocks.tile_queries
        place = cursor.place
        row = jnp.minimum(place.row, rows.count - 1)
        length, kv_len = rows.query_len(row), rows.kv_lens[row]
        parts = self.blocks.head_parts
        before, part = div(cursor.tile, parts) * tile, rem(cursor.tile, parts)
        num_queries = jnp.minimum(length - before, tile)
        position = kv_len - length + before
        # The pages reach from the begin of the first query's window to the last query.
        first = div(jnp.maximum(position + 1 - self.window, 0), page_size) + cursor.fetch * self.blocks.fetch_pages
        end = div(position + num_queries - 1, page_size) + 1
        num_pages = jnp.minimum(end - first, self.blocks.fetch_pages)
        is_last = first + num_pages >= end
        exists = place.row < rows.count

        @pl.when(exists)
        def _() -> None:
            fetch = _Fetch(
                num_queries, rows.first_token(row) + before, part * self.problem.num_heads, position, kv_len,
                first * page_size, num_pages, self.walk.page(place, first + num_pages - 1), cursor.tiles,
                cursor.fetch == 0, is_last,
            )  # fmt: skip
            for field, value in enumerate(fetch):
                self.fetches[slot, field] = jnp.int32(value)

            def start_page(index: jax.Array, _: None) -> None:
                page = self.walk.page(place, first + index)
                for source, target in self._paged:
                    copy = pltpu.make_async_copy(
                        source.at[self.layer, page], target.at[slot, index], self.fetched.at[slot]
                    )
                    copy.start()

            lax.fori_loop(0, num_pages, start_page, None)

            @pl.when(cursor.fetch == 0)
            def _() -> None:
                self._copy_queries(fetch, slot).start()

            if self.merger is not None:
                pl.when(is_last)(partial(self.merger.fetch, fetch.token, slot))

        @pl.when(~exists)
        def _() -> None:
            self.fetches[slot, 0] = jnp.int32(0)

        row_is_done = is_last & (before + num_queries >= length) & (part == parts - 1)
        tiles_done = is_last.astype(jnp.int32)
        return _Cursor(
            self.walk.step(place, row_is_done & exists),
            jnp.where(row_is_done, 0, cursor.tile + tiles_done),
            jnp.where(is_last, 0, cursor.fetch + 1),
            cursor.tiles + tiles_done,
        )

    @property
    def _paged(self) -> list[tuple[Ref, Ref]]:
        """The arrays of which each page is fetched, in HBM, and the slots for them in VMEM."""
        return [(self.pages, self.kv)] + ([] if self.scales is None else [(self.scales, self.kv_scales)])

    def _copy_queries(self, fetch: _Fetch, slot: jax.Array) -> Any:
        """Returns the copy of the tile's queries to the slot of its first fetch."""
        target = self.queries.at[slot, pl.ds(0, fetch.num_queries)]
        source = self._tile_tokens(fetch.token, fetch.num_queries, fetch.head)
        return pltpu.make_async_copy(source, target, self.fetched.at[slot])

    def _tile_tokens(self, token: Scalar, num_queries: jax.Array, head: Scalar) -> Ref:
        """Returns where a tile's queries are in HBM, and later its outputs."""
        queries, num_heads = pl.ds(token, num_queries), self.problem.num_heads
        if self.blocks.head_parts == 1:
            return self.tokens.at[queries]
        return self.tokens.at[queries, pl.ds(pl.multiple_of(jnp.int32(head), num_heads), num_heads)]

    # Attending.

    def _attend(self, slot: jax.Array) -> None:
        """Waits for the fetch in `slot` and folds it into the softmax of its tile."""
        fetch = _Fetch(*(self.fetches[slot, field] for field in range(len(_Fetch._fields))))
        # Semaphores count bytes, so one wait serves all pages.
        for _source, target in self._paged:
            pages = target.at[slot, pl.ds(0, fetch.num_pages)]
            pltpu.make_async_copy(pages, pages, self.fetched.at[slot]).wait()

        @pl.when(fetch.is_first == 1)
        def _() -> None:
            self._copy_queries(fetch, slot).wait()
            self._begin_tile(fetch, slot)

        @pl.when(fetch.is_last == 1)
        def _() -> None:
            self._seal(fetch, slot)

        def attend_step(index: jax.Array, _: None) -> None:
            page = index * self.blocks.step_pages
            first_key = fetch.first_key + page * self.problem.page_size
            last_key = first_key + self.blocks.step_pages * self.problem.page_size - 1
            last_position = fetch.position + fetch.num_queries - 1
            all_seen = (last_key <= fetch.position) & (first_key > last_position - self.window)
            self._line_up_scales(slot, page)
            pl.when(all_seen)(lambda: self._attend_pages(fetch, slot, page, first_key, masks=False))
            pl.when(~all_seen)(lambda: self._attend_pages(fetch, slot, page, first_key, masks=True))

        lax.fori_loop(0, cdiv(fetch.num_pages, self.blocks.step_pages), attend_step, None)

        @pl.when(fetch.is_last == 1)
        def _() -> None:
            self._end_tile(fetch)

    def _begin_tile(self, fetch: _Fetch, slot: jax.Array) -> None:
        """Folds the queries of each KV head into the rows of one matrix, and starts their softmax."""
        problem, tile = self.problem, self.blocks.tile_queries
        head_size = self.queries.shape[3]
        columns = pl.ds(0, head_size)
        if tile == 1:
            queries = self.queries[slot, 0].astype(jnp.float32)
            for kv_head in range(problem.num_kv_heads):
                first = kv_head * problem.group
                self.folded[kv_head, pl.ds(0, problem.group), columns] = queries[first : first + problem.group]
        else:

            def fold(index: jax.Array, _: None) -> None:
                tokens = pl.ds(pl.multiple_of(index * FOLD, FOLD), FOLD)
                queries = jnp.transpose(self.queries[slot, tokens], (1, 0, 2))
                for head, kv_head, rows in self._folded_rows(index):
                    self.folded[kv_head, rows, columns] = queries[head]

            lax.fori_loop(0, tile // FOLD, fold, None)
        self.peak[...] = jnp.full(self.peak.shape, MASKED)
        self.total[...] = jnp.full(self.total.shape, 0.0 if self.sinks is None else 1.0)
        self.values[...] = jnp.zeros(self.values.shape)
        if self.sinks is not None:
            for head in range(problem.num_heads):
                kv_head, member = divmod(head, problem.group)
                sink = self.sinks[fetch.head + head] * LOG2_E
                self.peak[kv_head, pl.ds(member * tile, tile)] = jnp.full((tile, LANES), sink)

    def _end_tile(self, fetch: _Fetch) -> None:
        """Divides by the softmax's denominator and starts writing the outputs."""
        problem, tile = self.problem, self.blocks.tile_queries
        slot = rem(fetch.tile, OUT_SLOTS)
        self._wait_sent(slot)
        _, _, num_heads, head_size = self.outputs.shape

        def divided(kv_head: int, rows: Any) -> jax.Array:
            values, total = self.values[kv_head, rows], self.total[kv_head, rows]
            value = (values * _lanes(1 / total, problem.value_columns))[:, -problem.value_size :]
            # Outputs replace queries, so the values of latents have zeros in front.
            return jnp.pad(value, ((0, 0), (head_size - problem.value_size, 0)))

        if tile == 1:
            members = pl.ds(0, problem.group)
            outputs = jnp.concatenate([divided(kv_head, members) for kv_head in range(problem.num_kv_heads)])
            outputs = jnp.pad(outputs, ((0, num_heads - problem.num_heads), (0, 0)))
            self.outputs[slot, 0] = outputs.astype(self.outputs.dtype)
        else:

            def unfold(index: jax.Array, _: None) -> None:
                outputs = jnp.stack([divided(kv_head, rows) for _, kv_head, rows in self._folded_rows(index)])
                outputs = jnp.pad(outputs, ((0, num_heads - problem.num_heads), (0, 0), (0, 0)))
                tokens = pl.ds(pl.multiple_of(index * FOLD, FOLD), FOLD)
                self.outputs[slot, tokens] = jnp.transpose(outputs.astype(self.outputs.dtype), (1, 0, 2))

            lax.fori_loop(0, tile // FOLD, unfold, None)
        self.sent[slot] = fetch.num_queries
        self._copy_outputs(fetch.token, fetch.num_queries, fetch.head, slot).start()

    def _folded_rows(self, index: jax.Array) -> Iterator[tuple[int, int, Any]]:
        """Yields each query head, its KV head, and the rows of the `index`-th `FOLD` queries in that head's matrix."""
        for head in range(self.problem.num_heads):
            kv_head, member = divmod(head, self.problem.group)
            first = member * self.blocks.tile_queries + index * FOLD
            yield head, kv_head, pl.ds(pl.multiple_of(first, FOLD), FOLD)

    def _copy_outputs(self, token: Scalar, num_queries: jax.Array, head: Scalar, slot: jax.Array) -> Any:
        source, target = self.outputs.at[slot, pl.ds(0, num_queries)], self._tile_tokens(token, num_queries, head)
        return pltpu.make_async_copy(source, target, self.written.at[slot])

    def _wait_sent(self, slot: jax.Array) -> None:
        """Waits until the outputs that were sent from the slot are in HBM."""
        num_queries = self.sent[slot]

        @pl.when(num_queries > 0)
        def _() -> None:
            # To wait, only the number of tokens matters.
            self._copy_outputs(0, num_queries, 0, slot).wait()
            self.sent[slot] = 0

    def _for_kv_heads(self, do: Callable[[jax.Array, None], None]) -> None:
        # One query is little work for each head, which overlaps only with the work of other heads.
        lax.fori_loop(0, self.problem.num_kv_heads, do, None, unroll=self.blocks.tile_queries == 1)

    def _seal(self, fetch: _Fetch, slot: jax.Array) -> None:
        """Makes everything finite that the tile's last step multiplies, and puts in the new token.

        Positions beyond the row are masked, but a weight of zero times NaN would be NaN.
        """
        problem, step = self.problem, self.blocks.step_pages
        size = stripe_tokens(problem.page_size, self.kv.dtype)
        index = fetch.num_pages - 1
        page = self.kv.at[slot, index]
        last = fetch.kv_len - 1 - (fetch.first_key + index * problem.page_size)  # the row's last token, in this page
        # A tile in the middle of its row ends in a page that the row fills.
        ends_inside = last < (problem.page_size if self.merger is not None else problem.page_size - 1)

        @pl.when(ends_inside)
        def _() -> None:
            stripe = pl.ds(pl.multiple_of(div(last, size) * size, size), size)
            at = rem(last, size)
            if self.merger is not None:
                target = self.pages.at[self.layer, fetch.last_page, :, stripe]
                self.merger.merge(fetch.token, slot, fetch.tile, page.at[:, stripe], at, target)
            else:
                keep = lax.broadcasted_iota(jnp.int32, (size, page.shape[2]), 0) <= at

                def cut(head: jax.Array, _: None) -> None:
                    tokens = page[head, stripe].astype(jnp.float32)
                    page[head, stripe] = jnp.where(keep, tokens, 0).astype(page.dtype)

                self._for_kv_heads(cut)

            def clear_stripe(index: jax.Array, _: None) -> None:
                stripe = pl.ds(pl.multiple_of(index * size, size), size)
                page[:, stripe] = jnp.zeros((page.shape[0], size, page.shape[2]), page.dtype)

            lax.fori_loop(div(last, size) + 1, problem.page_size // size, clear_stripe, None)

        def clear_page(index: jax.Array, _: None) -> None:
            self.kv[slot, index] = jnp.zeros(page.shape, page.dtype)

        lax.fori_loop(fetch.num_pages, cdiv(fetch.num_pages, step) * step, clear_page, None)

    def _line_up_scales(self, slot: jax.Array, page: jax.Array) -> None:
        """Puts the scales of the tokens of a step, whose first page is `page`, into lanes as its logits have them.

        The scales of values follow those of the same head's keys where a page's fill 128 lanes, and else those of the
        keys of all heads.
        """
        if self.step_scales is None:
            return
        assert self.kv_scales is not None
        size = self.problem.page_size
        pages = [self.kv_scales[slot, page + index] for index in range(self.blocks.step_pages)]
        for number in range(1 if size == LANES else self.problem.num_scales):
            lanes = slice(number * size, (number + 1) * size)
            rows = pl.ds(number * self.problem.num_kv_heads, pages[0].shape[0])
            self.step_scales[rows] = jnp.concatenate([of_page[:, lanes] for of_page in pages], axis=1)

    def _scales_of(self, head: jax.Array, number: int) -> jax.Array:
        """Returns the scales f32[1, tokens of a step] of a KV head's keys, which are number 0, or of its values."""
        problem = self.problem
        assert self.step_scales is not None
        number = min(number, problem.num_scales - 1)  # the value of a latent is a part of its key
        if problem.page_size == LANES:
            return self.step_scales[pl.ds(head * problem.num_scales + number, 1)]
        return self.step_scales[pl.ds(head + number * problem.num_kv_heads, 1)]

    def _attend_pages(
        self, fetch: _Fetch, slot: jax.Array, page: jax.Array, first_key: jax.Array, *, masks: bool
    ) -> None:
        """Takes one step of the online softmax (arXiv 2205.14135) for all heads: `step_pages` pages from `page` on.

        `first_key` is the position of their first key. Without `masks` every query sees every key.
        """
        problem, blocks = self.problem, self.blocks
        tokens, rows = blocks.step_pages * problem.page_size, self.folded.shape[1]
        dtype = self.tokens.dtype
        precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
        if masks or self.slopes is not None:
            # The rows are the tile's queries, once for each head of the group.
            query = lax.broadcasted_iota(jnp.int32, (rows, tokens), 0) & (blocks.tile_queries - 1)
            key = lax.broadcasted_iota(jnp.int32, (rows, tokens), 1)
            distance = query - key + (fetch.position - first_key)

        def attend_head(head: jax.Array, _: None) -> None:
            kv = self.kv[slot, pl.ds(page, blocks.step_pages), head].astype(dtype).reshape(tokens, -1)
            queries = self.folded[head].astype(dtype)
            keys, values = kv[:, : problem.key_columns], kv[:, -problem.value_columns :]
            logits = lax.dot_general(
                queries, keys, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
            )
            if self.step_scales is not None:
                logits = logits * self._scales_of(head, 0)
            if self.soft_cap is None:
                logits = logits * (self.scale * LOG2_E)
            else:
                logits = jnp.tanh(logits * (self.scale / self.soft_cap)) * (self.soft_cap * LOG2_E)
            if self.slopes is not None:
                logits = logits - _lanes(self._slopes_of(fetch.head, head), tokens) * distance.astype(jnp.float32)
            if masks:
                seen = (distance >= 0) & (distance < self.window)
                logits = jnp.where(seen, logits, MASKED)
            old_peak = self.peak[head]
            peak = jnp.maximum(old_peak, jnp.max(logits, axis=1, keepdims=True))
            weights = jnp.exp2(logits - _lanes(peak, tokens))
            decay = jnp.exp2(old_peak - peak)
            self.peak[head] = peak
            self.total[head] = self.total[head] * decay + jnp.sum(weights, axis=1, keepdims=True)
            if self.step_scales is not None:
                weights = weights * self._scales_of(head, 1)
                # Where nobody owns a position, its scale may be NaN.
                weights = jnp.where(seen, weights, 0) if masks else weights
            weighted = lax.dot_general(
                weights.astype(dtype), values, (((1,), (0,)), ((), ())), precision=precision,
                preferred_element_type=jnp.float32,
            )  # fmt: skip
            self.values[head] = self.values[head] * _lanes(decay, problem.value_columns) + weighted

        self._for_kv_heads(attend_head)

    def _slopes_of(self, first_head: jax.Array, kv_head: jax.Array) -> jax.Array:
        """Returns the slopes of the rows of a KV head's matrix, f32[M, 128], for logits in units of log 2."""
        assert self.slopes is not None
        group, shape = self.problem.group, self.peak.shape[1:]
        row, first = lax.broadcasted_iota(jnp.int32, shape, 0), first_head + kv_head * group
        slopes = jnp.full(shape, self.slopes[first] * LOG2_E)
        for member in range(1, group):
            slope = self.slopes[first + member] * LOG2_E
            slopes = jnp.where(row >= member * self.blocks.tile_queries, slope, slopes)
        return slopes


def _lanes(x: jax.Array, columns: int) -> jax.Array:
    """Turns x f[M, 128], the same in every lane, into f[M, columns]."""
    return jnp.concatenate([x] * (columns // LANES), axis=1)
