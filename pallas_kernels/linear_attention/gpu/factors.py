"""Computes what a chunk of tokens does to any state.

It follows section 3 of arXiv 2412.06464, arXiv 2510.26692, and section 6 of arXiv 2405.21060. The chunks of all rows
are prepared together, in plain XLA, because nothing here depends on a state. A chunk is a tile of the step's tokens, of
which a visit takes those of one row. Tokens of other visits have zeros.

A token adds to the state what the state before it says wrong of its key. What that is depends on the tokens before it
in the visit: it is a system of equations with a triangular matrix, which is inverted here.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.linear_attention.gpu.single import StateTokens
from pallas_kernels.linear_attention.visits import TILE

CHUNK = TILE  # tokens; as many as a matrix instruction has rows
# A float32 is the sum of three bfloat16. With two, and three products in the place of six, the states of 512 tokens
# were off by 1.2e-5 where float32 is off by 2e-7, and so was what Mamba-2 reads after 20 tokens.
PARTS = 3
# A logarithm below counts as this one. What is left then is 2e-22, and the sums of logarithms are finite.
LEAST_LOG = -50.0
BLOCK = 16  # tokens between whose channels decays stand inside the sum

_exactly = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


class ChunkFactors(NamedTuple):
    """The operands of `take_chunks` for n chunks of C tokens. The parts of a matrix follow each other in its rows.

    With a state S, a visit's errors are E = system (values - left keys S), what is read is left queries S + reads E,
    and the state after it is kept S + added^T (since E). Without corrections there is no system, and E is `values`.
    """

    queries: jax.Array  # bf16[n, K, 3 C, Dk]
    added: jax.Array  # bf16[n, K, 3 C, Dk]
    reads: jax.Array  # bf16[n, K, r, 3 C, C]
    values: jax.Array  # f32[n C, K, r, Dv]
    left: jax.Array  # f32[K, r, n C]
    since: jax.Array  # f32[K, r, n C]
    kept: jax.Array  # f32[V, K, r, Dk or 1]
    keys: jax.Array | None  # bf16[n, K, 3 C, Dk]
    system: jax.Array | None  # bf16[n, K, r, 3 C, C], the parts of its transpose


def chunk_factors(tokens: StateTokens, of_visits: jax.Array, lasts: jax.Array, *, corrects: bool) -> ChunkFactors:
    """Prepares the chunks of a step.

    of_visits  # i32[n C]: the visit of each token, or -1
    lasts  # i32[V]: the last token of each visit
    """
    visits = of_visits.reshape(-1, CHUNK)
    is_taken = visits >= 0

    def padded(x: jax.Array) -> jax.Array:
        """Returns [n C, ..] of [T, ..]."""
        return jnp.pad(x, ((0, visits.size - len(x)), *[(0, 0)] * (x.ndim - 1)))

    def in_tiles(x: jax.Array) -> jax.Array:
        """Returns [n, C, ..] of [T, ..]."""
        x = padded(x).reshape(*visits.shape, *x.shape[1:])
        return jnp.where(jnp.expand_dims(is_taken, range(2, x.ndim)), x, 0.0)

    betas = in_tiles(tokens.betas)
    queries, keys, logs = in_tiles(tokens.queries), in_tiles(tokens.keys), in_tiles(jnp.maximum(tokens.logs, LEAST_LOG))
    # Zeros that other visits have for a token do not stop what is not finite. It is seen in `left` and `values`.
    is_finite = jnp.isfinite(jnp.sum(queries + keys, axis=-1) + jnp.sum(betas + jnp.sum(logs, axis=-1), axis=-1))
    queries, keys, betas, logs = (
        jnp.where(jnp.expand_dims(is_finite, range(3, x.ndim)), x, 0.0) for x in (queries, keys, betas, logs)
    )
    queries, keys = jnp.moveaxis(queries, 1, 2), jnp.moveaxis(keys, 1, 2)  # [n, K, C, Dk]
    logs, betas = jnp.moveaxis(logs, 1, 3), jnp.moveaxis(betas, 1, 3)  # [n, K, r, C, ..]

    number = jnp.arange(CHUNK)
    together = (visits[:, :, None] == visits[:, None]) & is_taken[:, :, None]
    until = together & (number[:, None] >= number)  # [n, C, C], whether the second token is not after the first
    after = together & (number[:, None] < number)
    # The logarithms of what is left of the state before the visit, and of what is left of a token after it.
    total, following = (_exactly("nij,nkrjg->nkrig", x.astype(jnp.float32), logs) for x in (until, after))
    kept = jnp.exp(jnp.moveaxis(total, 3, 1).reshape(of_visits.size, *total.shape[1:3], -1)[lasts])
    if logs.shape[-1] == 1:
        rate = jnp.exp(jnp.where(until[:, None, None], total - jnp.swapaxes(total, -1, -2), -jnp.inf))
        reads, system = (_exactly("nkid,nkjd->nkij", x, keys)[:, :, None] * rate for x in (queries, keys))
        left, since, added = jnp.exp(total[..., 0]), jnp.exp(following[..., 0]), keys
    else:
        products = _by_channel(queries, keys, total[:, :, 0])
        reads, system = (jnp.where(until[:, None], x, 0.0)[:, :, None] for x in products)
        left = since = jnp.ones(betas.shape, jnp.float32)
        added = keys * jnp.exp(following[:, :, 0])
        queries, keys = (x * jnp.exp(total[:, :, 0]) for x in (queries, keys))
    left = jnp.where(jnp.swapaxes(is_finite, 1, 2)[:, :, None], left, jnp.nan)
    left, since = (jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1) for x in (left, since))
    values = padded(tokens.values)
    if not corrects:
        is_finite = is_finite.reshape(of_visits.size, -1, 1, 1)
        values = jnp.where(is_finite, values * padded(tokens.betas)[..., None], jnp.nan)
    operands = in_parts(queries), in_parts(added), in_parts(reads), values, left, since, kept
    if not corrects:
        return ChunkFactors(*operands, None, None)
    system = jnp.where(number[:, None] > number, system * betas[..., None], 0.0)
    inverse = lax.linalg.triangular_solve(
        system, jnp.broadcast_to(jnp.eye(CHUNK), system.shape), left_side=True, lower=True, unit_diagonal=True
    )
    # The solver writes columns one after the other, which are the rows of the transpose.
    return ChunkFactors(*operands, in_parts(keys), in_parts(jnp.swapaxes(inverse, -1, -2) * betas[..., None]))


def in_parts(x: jax.Array) -> jax.Array:
    """Returns the parts of x f32[.., N, D], the largest first, bf16[.., PARTS * N, D]."""
    return jnp.concatenate(split(x), axis=-2)


def split(x: jax.Array) -> list[jax.Array]:
    """Returns `PARTS` bfloat16 whose sum is the float32 `x`.

    Each is cut off, and not rounded: XLA may leave out that a number is rounded and then widened again.
    """
    parts = []
    for _ in range(PARTS):
        bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-(2**16))
        part = lax.bitcast_convert_type(bits, jnp.float32)
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return parts


def _by_channel(queries: jax.Array, keys: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the products of queries and of keys with keys, [n, K, C, C], where each channel forgets by itself.

    total  # f32[n, K, C, Dk]: the logarithms of what is left of the state before a visit

    What is left of token j at token i is exp(total_i - total_j) in each channel. Between tokens of two blocks it is
    divided at the end of the block before that of i, so that neither factor is above 1. Within a block it stands in the
    sum over channels. The result is finite and arbitrary for j after i, and for tokens of two visits.
    """

    def rate(later: jax.Array, earlier: jax.Array) -> jax.Array:
        return jnp.exp(jnp.minimum(later - earlier, 0.0))

    def in_blocks(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], -1, BLOCK, x.shape[-1])

    keys_here, totals = in_blocks(keys), in_blocks(total)
    rates = rate(totals[..., :, None, :], totals[..., None, :, :])
    within = [
        jnp.sum(in_blocks(x)[..., :, None, :] * keys_here[..., None, :, :] * rates, axis=-1) for x in (queries, keys)
    ]
    rows = []
    for block in range(CHUNK // BLOCK):
        begin, end = block * BLOCK, (block + 1) * BLOCK
        own = jnp.concatenate([x[:, :, block] for x in within], axis=2)
        if begin:
            border = total[:, :, begin - 1 : begin]
            here = jnp.concatenate(
                [x[:, :, begin:end] * rate(total[:, :, begin:end], border) for x in (queries, keys)], 2
            )
            before = _exactly("nkid,nkjd->nkij", here, keys[:, :, :begin] * rate(border, total[:, :, :begin]))
            own = jnp.concatenate([before, own], axis=-1)
        rows.append(jnp.pad(own, (*[(0, 0)] * 3, (0, CHUNK - end))))
    products = zip(*(jnp.split(row, 2, axis=2) for row in rows), strict=True)
    of_queries, of_keys = (jnp.concatenate(blocks, axis=2) for blocks in products)
    return of_queries, of_keys
