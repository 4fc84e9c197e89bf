"""Mamba-2 for single tokens: one pass over the state of a row, which is read, updated and written.

It is done by vectors. For 8 groups of 16 heads with states of 64 by 128 a page has 4.1 MiB, and moving it takes longer
than the operations on it.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.chips import TpuChip
from pallas_kernels.linear_attention.tpu.blocks import StateBlocks
from pallas_kernels.linear_attention.tpu.calls import call_singles
from pallas_kernels.linear_attention.tpu.tokens import LANES, ScanShape, ScanTokens
from pallas_kernels.linear_attention.visits import SingleVisits


def scan_weights(tokens: ScanTokens, shape: ScanShape) -> jax.Array:
    """Returns the taps, the bias and D of each channel, f32[K, W + 2, C]."""
    skip = jnp.repeat(tokens.skip, shape.head_size, axis=-1)
    skip = jnp.pad(skip, ((0, 0), (0, shape.channels - shape.values)))
    return jnp.concatenate([tokens.taps, tokens.bias[:, None], skip[:, None]], axis=1)


def scan_singles(
    pages: jax.Array,
    place: jax.Array | int,
    visits: SingleVisits,
    tokens: ScanTokens,
    *,
    shape: ScanShape,
    blocks: StateBlocks,
    chip: TpuChip,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Takes in the tokens of `visits`, and returns what is read after each, f32[T, K, H * P], and the pages.

    What is read for other tokens is arbitrary.
    """
    weights, channels = (x.reshape(*x.shape[:-1], -1, LANES) for x in (scan_weights(tokens, shape), tokens.channels))
    read, pages = call_singles(
        partial(_scan_single, shape=shape),
        weights,
        [channels],
        (shape.parts, LANES),
        pages,
        place,
        visits,
        numbers=[jnp.exp(tokens.g), tokens.dt],
        heads=blocks.single,
        chip=chip,
        interpret=interpret,
        name="scan_single",
    )
    return read.reshape(*read.shape[:2], -1), pages


def _scan_single(
    goes_on: jax.Array,
    weights: Any,  # [groups, W + 2, C / 128, 128]
    x: Any,  # [groups, C / 128, 128]
    left: Any,  # [groups, 1, H], in SMEM
    steps: Any,  # [groups, 1, H], in SMEM
    before: Any,  # [groups, R, 128]
    out: Any,  # [groups, H * P / 128, 128]
    after: Any,  # [groups, R, 128]
    *,
    shape: ScanShape,
) -> None:
    num_groups, num_rows = x.shape[:2]
    size, first, parts, lines = weights.shape[1] - 2, shape.rows, shape.parts, shape.lines

    def kept(state: jax.Array) -> jax.Array:
        return jnp.where(goes_on, state, 0.0)  # a page that was free may have NaN

    for group in range(num_groups):
        ages = [slice(row, row + num_rows) for row in range(first, first + (size - 1) * num_rows, num_rows)]
        seen = [kept(before[group, rows, :]) for rows in ages] + [x[group].astype(jnp.float32)]
        for rows, value in zip(ages, seen[1:], strict=True):
            after[group, rows, :] = value
        end = ages[-1].stop
        if end < after.shape[1]:
            after[group, end:, :] = jnp.zeros((after.shape[1] - end, LANES), jnp.float32)
        sums = sum((weights[group, age] * value for age, value in enumerate(seen)), weights[group, size])
        mixed = jax.nn.silu(sums)
        b, c = (mixed[row : row + lines] for row in (parts, parts + lines))
        for part in range(parts):
            values = mixed[part : part + 1]
            # Rows and columns change places as 128 by 128 numbers. A column alone would be spread over lanes, and a sum
            # over lanes be made, one register at a time: 1,039 bundles for 16 heads of 64 by 128 (v7x), and not 777.
            column = jnp.broadcast_to(values, (LANES, LANES)).T
            read = weights[group, size + 1, part : part + 1] * values
            for line in range(lines):
                products = []
                for head, own in shape.heads(part):
                    at = shape.rows_of(part, own, line)
                    incoming = column[own] * (b[line : line + 1] * steps[group, 0, head])
                    state = kept(before[group, at, :]) * left[group, 0, head] + incoming
                    after[group, at, :] = state
                    products.append(state * c[line : line + 1])
                read += jnp.sum(jnp.concatenate(products).T, axis=0, keepdims=True)
            out[group, part : part + 1] = read
