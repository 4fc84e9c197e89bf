"""Writes the scales of new tokens into the pages of scales, in place, by a small kernel of its own.

Where a page has less than eight rows of scales, XLA:TPU scatters into an array of another order, and copies all pages
into it and back in each layer (decode of latents on v6e: 12.6 MiB each way, of all the scales there are). The kernel
reads each page with a new token, merges, and writes it back as a whole, many pages at a time.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention.rows import RaggedRows
from pallas_kernels.ragged_paged_attention.tpu.walk import LANES, Ref, cdiv

PAGES = 32  # on their way together: 16 KiB each with eight heads of pages of 128 tokens


def write_scales(
    new: jax.Array, scales: jax.Array, layer: jax.Array | int, rows: RaggedRows, page_size: int, *, interpret: bool
) -> jax.Array:
    """Writes the scales `new` f32[T, K, N] of the tokens of `rows` into `scales` f32[L, P, K, .., 128].

    A page and head has the scales of its S keys, and after them those of its S values, if N is two.
    """
    parts, starts = rows.parts(page_size), rows.starts()
    row = parts.rows
    # Padding gets no page.
    pages = jnp.where(parts.is_real, rows.page_table[row, jnp.where(parts.is_real, parts.numbers, 0)], 0)
    first = parts.numbers * page_size
    begins = jnp.maximum(starts[row] - first, 0)
    ends = jnp.minimum(starts[row] + rows.query_lens()[row] - first, page_size)
    ahead = first[:, None] + jnp.arange(page_size, dtype=jnp.int32) - starts[row][:, None]
    tokens = jnp.clip(rows.query_starts[row][:, None] + ahead, 0, len(new) - 1)
    # [pages, S, K, N] -> [pages, rows of K heads, 128]
    count, shape = len(row), scales.shape
    filled = new[tokens].transpose(0, 2, 3, 1).reshape(count, shape[2], -1)
    filled = jnp.pad(filled, ((0, 0), (0, 0), (0, shape[3] * LANES - filled.shape[2]))).reshape(count, -1, LANES)
    by_page = scales.reshape(*shape[:2], -1, LANES)
    in_hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    scalars = pages, begins, ends, jnp.int32(layer)[None]
    buffer = pltpu.VMEM((PAGES, *by_page.shape[2:]), jnp.float32)
    written: jax.Array = pl.pallas_call(
        partial(_kernel, page_size=page_size, num_lanes=new.shape[2] * page_size),
        out_shape=jax.ShapeDtypeStruct(by_page.shape, by_page.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[in_hbm, in_hbm],
            out_specs=in_hbm,
            scratch_shapes=[buffer, buffer, pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.DMA],
        ),
        input_output_aliases={len(scalars) + 1: 0},
        interpret=pltpu.InterpretParams(detect_races=True) if interpret else False,
        name="write_scales",
    )(*scalars, filled, by_page)
    return written.reshape(shape)


def _kernel(
    pages: Ref,
    begins: Ref,
    ends: Ref,
    layer: Ref,
    new: Ref,
    _: Ref,
    scales: Ref,
    old_pages: Ref,
    new_pages: Ref,
    fetched: Ref,
    written: Ref,
    *,
    page_size: int,
    num_lanes: int,
) -> None:
    """Merges the pages, `PAGES` at a time. The aliased scales are read and written through the output."""
    count = pages.shape[0]
    lane = lax.broadcasted_iota(jnp.int32, old_pages.shape[1:], 1)
    token = jnp.where(lane < num_lanes, lane & (page_size - 1), -1)

    def some(first: jax.Array, _: None) -> None:
        first = first * PAGES

        def each(do: Callable[[jax.Array, jax.Array], None]) -> None:
            def visit(place: jax.Array, _: None) -> None:
                number = jnp.minimum(first + place, count - 1)
                is_here = (first + place < count) & (pages[number] > 0)
                pl.when(is_here)(partial(do, place, number))

            lax.fori_loop(0, PAGES, visit, None)

        def fetch(place: jax.Array, number: jax.Array) -> list[Any]:
            target = scales.at[layer[0], pages[number]]
            return [
                pltpu.make_async_copy(target, old_pages.at[place], fetched),
                pltpu.make_async_copy(new.at[number], new_pages.at[place], fetched),
            ]

        def write(place: jax.Array, number: jax.Array) -> Any:
            return pltpu.make_async_copy(old_pages.at[place], scales.at[layer[0], pages[number]], written)

        def start(place: jax.Array, number: jax.Array) -> None:
            for copy in fetch(place, number):
                copy.start()

        def wait(place: jax.Array, number: jax.Array) -> None:
            for copy in fetch(place, number):
                copy.wait()

        def merge(place: jax.Array, number: jax.Array) -> None:
            is_new = (token >= begins[number]) & (token < ends[number])
            old_pages[place] = jnp.where(is_new, new_pages[place], old_pages[place])
            write(place, number).start()

        each(start)
        each(wait)
        each(merge)
        each(lambda place, number: write(place, number).wait())

    lax.fori_loop(0, cdiv(count, PAGES), some, None)
