"""The delta rule for the tokens of a tile that belong to one row: products of matrices (section 3 of arXiv 2412.06464).

What a token corrects depends on those before it, by a triangular system. Its inverse is put together from the inverses
of parts, from blocks of 16 tokens to the whole tile: no power of the system is computed, which would grow beyond
float32 where keys repeat.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.chips import TpuChip
from pallas_kernels.linear_attention.length import of_length_one
from pallas_kernels.linear_attention.tpu.blocks import SIZE, StateBlocks
from pallas_kernels.linear_attention.tpu.calls import call_chunks
from pallas_kernels.linear_attention.tpu.tile import convolved, product
from pallas_kernels.linear_attention.tpu.tokens import DeltaTokens
from pallas_kernels.linear_attention.visits import ChunkVisits

BLOCK = 16  # tokens among which sums go one by one, and not by products of matrices


def take_chunks(
    pages: jax.Array,
    place: jax.Array | int,
    visits: ChunkVisits,
    tokens: DeltaTokens,
    *,
    blocks: StateBlocks,
    chip: TpuChip,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Takes in the tokens of rows with several, and returns the same as `take_singles`."""
    taps, channels, g, beta = tokens
    r = beta.shape[-1]
    return call_chunks(
        partial(_chunk, values_per_key=r, decays=g.shape[-1]),
        taps,
        [channels],
        (r * SIZE,),
        pages,
        place,
        visits,
        gates=[g, beta],
        heads=blocks.chunk,
        chip=chip,
        interpret=interpret,
        name="delta_rule_chunk",
    )


def _chunk(
    low: jax.Array,
    high: jax.Array,
    taps: Any,  # [heads, W, C]
    x: Any,  # [N, heads * C]
    gates: Any,  # [N, heads * r * G + heads * r, and more]
    out: Any,  # [N, heads * r * 128]
    state: Any,  # [heads, S, 128]: what the row's tokens have left
    *,
    values_per_key: int,
    decays: int,
) -> None:
    heads, num_tokens, r = taps.shape[0], x.shape[0], values_per_key
    parts, betas = taps.shape[2] // SIZE, heads * r * decays
    number = jax.lax.broadcasted_iota(jnp.int32, (num_tokens, 1), 0)
    is_real = (number >= low) & (number < high)
    i, j = (jax.lax.broadcasted_iota(jnp.int32, (num_tokens, num_tokens), axis) for axis in (0, 1))
    gate = jnp.where(is_real, gates[...], 0.0)
    total = product((i >= j).astype(jnp.float32), gate)  # of the logarithms g, until each token
    total_rows = total.T
    for head in range(heads):
        q, k, *v = (
            jnp.where(is_real, jax.nn.silu(sums), 0.0)  # tokens that are not real are another row's, or anything
            for sums in (
                convolved(taps, taps.shape[1], x, state, head, part, parts, r * SIZE, low, high)
                for part in range(parts)
            )
        )
        q, k = of_length_one(q) * SIZE**-0.5, of_length_one(k)
        qk = jnp.concatenate([q, k])
        products = product(qk, k, contracted=(1, 1)) if decays == 1 else None
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
            told = product(qk * jnp.concatenate([left, left]), matrix)
            system = jnp.where(i > j, weights[num_tokens:] * beta, 0.0)
            error = product(_inverse(system, i, j), beta * (v[value] - told[num_tokens:]))
            read = told[:num_tokens] + product(jnp.where(i >= j, weights[:num_tokens], 0.0), error)
            lanes = slice(at * SIZE, (at + 1) * SIZE)
            out[:, lanes] = jnp.where(is_real, read, out[:, lanes])
            # Tokens after the last one of the visit leave everything.
            added = product(k * jnp.exp(until[num_tokens - 1 :] - until), error, contracted=(0, 0))
            state[head, rows, :] = matrix * jnp.exp(total_rows[own, num_tokens - 1 :]) + added


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
            found = [product(x * jnp.exp(until_here - border), earlier, contracted=(1, 1)) for x in here]
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
        inverse -= product(product(inverse, jnp.where(is_below, system, 0.0)), inverse)
    return inverse
