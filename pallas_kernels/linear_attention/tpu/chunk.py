"""The delta rule for the tokens of a tile that belong to one row: products of matrices (section 3 of arXiv 2412.06464).

What a token corrects depends on those before it, by a triangular system. Its inverse is put together from the inverses
of parts, from blocks of 16 tokens to the whole tile: no power of the system is computed, which would grow beyond
float32 where keys repeat.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.chips import TpuChip
from pallas_kernels.linear_attention.length import of_length_one
from pallas_kernels.linear_attention.tpu.blocks import (
    LANES,
    SIZE,
    SUBLANES,
    DeltaBlocks,
    DeltaTokens,
    compiler_params,
    interpreter,
)
from pallas_kernels.linear_attention.visits import TILE, ChunkVisits

BLOCK = 16  # tokens among which sums go one by one, and not by products of matrices


def take_chunks(
    pages: jax.Array,
    place: jax.Array | int,
    visits: ChunkVisits,
    tokens: DeltaTokens,
    *,
    blocks: DeltaBlocks,
    chip: TpuChip,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Takes in the tokens of rows with several, and returns the same as `take_singles`."""
    taps, channels, g, beta = tokens
    num_tokens, num_heads, num_channels = channels.shape
    *_, num_rows, width = pages.shape
    r, heads, tile = beta.shape[-1], blocks.chunk, min(TILE, num_tokens)
    page = pl.BlockSpec(
        (None, None, heads, num_rows, width),
        lambda block, visit, place, tiles, lows, highs, sources, *_: (place[0], sources[visit], block, 0, 0),
    )

    def of_tile(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((tile, heads * size), lambda block, visit, place, tiles, *_: (tiles[visit], block))

    # For each block of heads, g of all its matrices, and then their beta, in whole registers.
    gates = jnp.concatenate([x.reshape(num_tokens, num_heads // heads, -1) for x in (g, beta)], axis=-1).swapaxes(0, 1)
    gates = jnp.pad(gates, ((0, 0), (0, 0), (0, -gates.shape[-1] % LANES)))
    scalars = (
        jnp.reshape(place, 1).astype(jnp.int32),
        visits.tiles,
        visits.lows,
        visits.highs,
        visits.sources,
        visits.targets,
        visits.firsts,
        visits.begins,
    )
    call = pl.pallas_call(
        partial(_chunk, values_per_key=r, decays=g.shape[-1]),
        out_shape=(
            jax.ShapeDtypeStruct((num_tokens, num_heads * r * SIZE), jnp.float32),
            jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(num_heads // heads, visits.count),
            in_specs=[
                pl.BlockSpec((heads, *taps.shape[1:]), lambda block, visit, *_: (block, 0, 0)),
                of_tile(num_channels),
                pl.BlockSpec(
                    (None, tile, gates.shape[-1]), lambda block, visit, place, tiles, *_: (block, tiles[visit], 0)
                ),
                page,
            ],
            out_specs=[
                of_tile(r * SIZE),
                pl.BlockSpec(
                    page.block_shape,
                    lambda block, visit, place, tiles, lows, highs, sources, targets, *_: (
                        place[0],
                        targets[visit],
                        block,
                        0,
                        0,
                    ),
                ),
            ],
            scratch_shapes=[
                pltpu.VMEM((heads, num_rows, width), jnp.float32),
            ],
        ),
        input_output_aliases={len(scalars) + 3: 1},
        compiler_params=compiler_params(chip),
        interpret=interpreter(chip, interpret),
        name="delta_rule_chunk",
    )
    out, pages = call(*scalars, taps, channels.reshape(num_tokens, -1), gates, pages)
    return out.reshape(num_tokens, num_heads, -1), pages


def _chunk(
    place: Any,
    tiles: Any,
    lows: Any,
    highs: Any,
    sources: Any,
    targets: Any,
    firsts: Any,
    begins: Any,
    taps: Any,  # [heads, W, C]
    x: Any,  # [N, heads * C]
    gates: Any,  # [N, heads * r * G + heads * r, and more]
    before: Any,  # [heads, S, 128]
    out: Any,  # [N, heads * r * 128]
    after: Any,  # [heads, S, 128]
    state: Any,  # [heads, S, 128]: what the row's tokens have left
    *,
    values_per_key: int,
    decays: int,
) -> None:
    heads, num_tokens, r = taps.shape[0], x.shape[0], values_per_key
    visit, parts, betas = pl.program_id(1), taps.shape[2] // SIZE, heads * r * decays
    low, high = lows[visit], highs[visit]

    @pl.when(firsts[visit] == 1)
    def _() -> None:
        state[...] = jnp.where(begins[visit] == 0, before[...], 0.0)  # a page that was free may have NaN

    @pl.when((visit == 0) | (tiles[jnp.maximum(visit - 1, 0)] != tiles[visit]))
    def _() -> None:
        out[...] = jnp.zeros(out.shape, out.dtype)

    number = jax.lax.broadcasted_iota(jnp.int32, (num_tokens, 1), 0)
    is_real = (number >= low) & (number < high)
    i, j = (jax.lax.broadcasted_iota(jnp.int32, (num_tokens, num_tokens), axis) for axis in (0, 1))
    gate = jnp.where(is_real, gates[...], 0.0)
    total = _product((i >= j).astype(jnp.float32), gate)  # of the logarithms g, until each token
    total_rows = total.T
    for head in range(heads):
        q, k, *v = (
            jnp.where(is_real, _mixed(taps, x, state, head, part, parts, r * SIZE, low, high), 0.0)
            for part in range(parts)  # tokens that are not real are another row's, or anything
        )
        q, k = of_length_one(q) * SIZE**-0.5, of_length_one(k)
        qk = jnp.concatenate([q, k])
        products = _product(qk, k, contracted=(1, 1)) if decays == 1 else None
        for value in range(r):
            at = head * r + value
            own, beta = slice(at * decays, (at + 1) * decays), gate[:, betas + at : betas + at + 1]
            until, rows = total[:, own], slice(value * SIZE, (value + 1) * SIZE)
            if products is None:
                weights = _by_channel(q, k, until)
            else:
                since = jnp.exp(jnp.where(i >= j, until - total_rows[own, :], -jnp.inf))
                weights = products * jnp.concatenate([since, since])
            matrix, left = state[head, rows, :], jnp.exp(until)
            told = _product(qk * jnp.concatenate([left, left]), matrix)
            system = jnp.where(i > j, weights[num_tokens:] * beta, 0.0)
            error = _product(_inverse(system, i, j), beta * (v[value] - told[num_tokens:]))
            read = told[:num_tokens] + _product(jnp.where(i >= j, weights[:num_tokens], 0.0), error)
            lanes = slice(at * SIZE, (at + 1) * SIZE)
            out[:, lanes] = jnp.where(is_real, read, out[:, lanes])
            # Tokens after the last one of the visit leave everything.
            added = _product(k * jnp.exp(until[num_tokens - 1 :] - until), error, contracted=(0, 0))
            state[head, rows, :] = matrix * jnp.exp(total_rows[own, num_tokens - 1 :]) + added
    after[...] = state[...]


def _mixed(
    taps: Any, x: Any, state: Any, head: int, part: int, parts: int, first: int, low: jax.Array, high: jax.Array
) -> jax.Array:
    """Returns what the convolution makes of a part of the channels [N, 128], and moves its window on.

    The tokens are `low` to `high`. The window is in rows `first` and after of the state, an age and then a part
    after the other.
    """
    size, num_tokens = taps.shape[1], x.shape[0]
    lanes = slice(part * SIZE, (part + 1) * SIZE)
    channels = x[:, (head * parts + part) * SIZE : (head * parts + part + 1) * SIZE].astype(jnp.float32)
    ages = [state[head, row : row + 1, :] for row in range(first + part, first + (size - 1) * parts, parts)]
    unused = jnp.zeros((SUBLANES + 1 - size, SIZE), jnp.float32)
    # The window stands just before the first token.
    window = jnp.concatenate([unused, *ages, jnp.zeros((num_tokens, SIZE), jnp.float32)])
    seen = jnp.concatenate([jnp.zeros((SUBLANES, SIZE), jnp.float32), channels])
    number = jax.lax.broadcasted_iota(jnp.int32, (len(seen), 1), 0)
    seen = jnp.where(number >= SUBLANES + low, seen, pltpu.roll(window, low, 0))
    begins = range(SUBLANES + 1 - size, SUBLANES + 1)
    mixed = sum(taps[head, age : age + 1, lanes] * seen[begin : begin + num_tokens] for age, begin in enumerate(begins))
    after = pltpu.roll(seen, len(seen) - high, 0)
    for age, begin in enumerate(begins[:-1]):
        row = first + age * parts + part
        state[head, row : row + 1, :] = after[begin : begin + 1]
    return jax.nn.silu(mixed)


def _by_channel(q: jax.Array, k: jax.Array, until: jax.Array) -> jax.Array:
    """Returns the products of q and k [N, 128] with k, [2 N, N], where each channel has forgotten by itself.

    until  # f32[N, 128]: the sums of the logarithms g

    What is left of token j at token i is exp(until_i - until_j) in each channel. Between tokens of two blocks it is
    divided at the end of what is before the block of i, so that neither factor is above 1. Within a block it stands in
    the sum over channels. For j after i the result is finite.
    """
    blocks = []
    for begin in range(0, len(k), BLOCK):
        rows = slice(begin, min(begin + BLOCK, len(k)))
        here, until_here = [x[rows] for x in (q, k)], until[rows]
        places = jax.lax.broadcasted_iota(jnp.int32, (len(until_here), len(k)), 1)
        found = [jnp.zeros(places.shape, jnp.float32)] * 2
        if begin:
            border = until[begin - 1 : begin]
            is_before = jax.lax.broadcasted_iota(jnp.int32, (len(k), 1), 0) < begin
            earlier = jnp.where(is_before, k * jnp.exp(border - until), 0.0)
            found = [_product(x * jnp.exp(until_here - border), earlier, contracted=(1, 1)) for x in here]
        for token in range(rows.start, rows.stop):
            left = k[token : token + 1] * jnp.exp(jnp.minimum(until_here - until[token : token + 1], 0.0))
            found = [
                jnp.where(places == token, jnp.sum(x * left, axis=1, keepdims=True), all_)
                for x, all_ in zip(here, found, strict=True)
            ]
        blocks.append(found)
    return jnp.concatenate([*(of_q for of_q, _ in blocks), *(of_k for _, of_k in blocks)])


def _inverse(system: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
    """Returns the inverse of 1 + `system` [N, N], which is zero on the diagonal and above.

    Within blocks, each row is subtracted from those below it, in all blocks at once. Then blocks become twice as large:
    the inverse of [[A, 0], [C, B]] has those of A and B in their places, and -B^-1 C A^-1 below.
    """
    inverse, blocks = jnp.where(i == j, 1.0, 0.0), range(0, len(system), BLOCK)
    for token in range(BLOCK - 1):
        # The last block may be smaller: then its last rows are subtracted from nothing.
        places = [(block, min(block + BLOCK, len(system)), min(block + token, len(system) - 1)) for block in blocks]
        column = jnp.concatenate([system[begin:end, at : at + 1] for begin, end, at in places])
        row = [jnp.broadcast_to(inverse[at : at + 1], (end - begin, len(system))) for begin, end, at in places]
        inverse -= column * jnp.concatenate(row)
    for level in range(BLOCK.bit_length() - 1, (len(system) - 1).bit_length()):
        is_below = (i >> (level + 1) == j >> (level + 1)) & (i >> level > j >> level)
        inverse -= _product(_product(inverse, jnp.where(is_below, system, 0.0)), inverse)
    return inverse


def _product(x: jax.Array, y: jax.Array, contracted: tuple[int, int] = (1, 0)) -> jax.Array:
    dimensions = (contracted[:1], contracted[1:]), ((), ())
    return jax.lax.dot_general(
        x, y, dimensions, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
