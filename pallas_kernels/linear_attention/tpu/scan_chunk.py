"""Mamba-2 for the tokens of a tile that belong to one row: products of matrices (section 6 of arXiv 2405.21060)."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.chips import TpuChip
from pallas_kernels.linear_attention.tpu.blocks import StateBlocks
from pallas_kernels.linear_attention.tpu.calls import call_chunks
from pallas_kernels.linear_attention.tpu.scan_single import scan_weights
from pallas_kernels.linear_attention.tpu.tile import convolved, product
from pallas_kernels.linear_attention.tpu.tokens import LANES, ScanShape, ScanTokens
from pallas_kernels.linear_attention.visits import ChunkVisits


def scan_chunks(
    pages: jax.Array,
    place: jax.Array | int,
    visits: ChunkVisits,
    tokens: ScanTokens,
    *,
    shape: ScanShape,
    blocks: StateBlocks,
    chip: TpuChip,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Takes in the tokens of rows with several, and returns the same as `scan_singles`."""
    return call_chunks(
        partial(_scan_chunk, shape=shape),
        scan_weights(tokens, shape),
        [tokens.channels],
        (shape.values,),
        pages,
        place,
        visits,
        gates=[tokens.g, tokens.dt],
        heads=blocks.chunk,
        chip=chip,
        interpret=interpret,
        name="scan_chunk",
    )


def _scan_chunk(
    low: jax.Array,
    high: jax.Array,
    weights: Any,  # [groups, W + 2, C]
    x: Any,  # [N, groups * C]
    gates: Any,  # [N, 2 * groups * H, and more]: g of all heads, then dt
    out: Any,  # [N, groups * H * P]
    state: Any,  # [groups, R, 128]
    *,
    shape: ScanShape,
) -> None:
    num_groups, num_tokens, parts, lines = weights.shape[0], x.shape[0], shape.parts, shape.lines
    size, heads = weights.shape[1] - 2, num_groups * shape.num_heads
    number = jax.lax.broadcasted_iota(jnp.int32, (num_tokens, 1), 0)
    is_real = (number >= low) & (number < high)
    i, j = (jax.lax.broadcasted_iota(jnp.int32, (num_tokens, num_tokens), axis) for axis in (0, 1))
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    gate = jnp.where(is_real, gates[...], 0.0)
    steps = gate[:, heads : 2 * heads]
    until = product((i >= j).astype(jnp.float32), gate[:, :heads])  # the sums of the logarithms g, until each token
    # Tokens after the last one of the visit leave everything.
    end = until[num_tokens - 1 :]
    left_at_end, lasting = jnp.exp(end), jnp.exp(end - until) * steps
    until_rows, steps_rows = until.T, steps.T
    for group in range(num_groups):
        mixed = [
            jnp.where(is_real, jax.nn.silu(sums), 0.0)  # tokens that are not real are another row's, or anything
            for sums in (
                convolved(weights, size, x, state, group, part, shape.channels // LANES, shape.rows, low, high)
                + weights[group, size : size + 1, part * LANES : (part + 1) * LANES]
                for part in range(shape.channels // LANES)
            )
        ]
        b, c = mixed[parts : parts + lines], mixed[parts + lines :]
        products = sum(
            (product(*of_line, (1, 1)) for of_line in zip(c[1:], b[1:], strict=True)), product(c[0], b[0], (1, 1))
        )
        for part, values in enumerate(mixed[:parts]):
            own = [(group * shape.num_heads + head, lanes) for head, lanes in shape.heads(part)]
            # For each head of the part, a number for each token in all lanes.
            untils, lastings = (
                [jnp.broadcast_to(of_heads[:, head : head + 1], values.shape) for head, _ in own]
                for of_heads in (until, lasting)
            )
            since, incoming = [], []
            for (head, lanes), of_head in zip(own, untils, strict=True):
                passed = jnp.where(i >= j, of_head[:, :num_tokens] - until_rows[head : head + 1], -jnp.inf)
                since.append(products * jnp.exp(passed) * steps_rows[head : head + 1])
                incoming.append(jnp.where((lane >= lanes.start) & (lane < lanes.stop), values, 0.0))
            at = slice(part * LANES, (part + 1) * LANES)
            read = product(jnp.concatenate(since, axis=1), jnp.concatenate(incoming))
            read += weights[group, size + 1 : size + 2, at] * values
            left, added = jnp.exp(_by_lane(untils, own, lane)), values * _by_lane(lastings, own, lane)
            decay = jnp.concatenate(
                [
                    jnp.broadcast_to(left_at_end[:, head : head + 1], (lanes.stop - lanes.start, LANES))
                    for head, lanes in own
                ]
            )
            for line in range(lines):
                rows = shape.rows_of(part, slice(0, LANES), line)
                matrix = state[group, rows, :]
                read += left * product(c[line], matrix, (1, 1))
                state[group, rows, :] = matrix * decay + product(added, b[line], (0, 0))
            at = slice((group * parts + part) * LANES, (group * parts + part + 1) * LANES)
            out[:, at] = jnp.where(is_real, read, out[:, at])


def _by_lane(of_heads: list[jax.Array], own: list[tuple[int, slice]], lane: jax.Array) -> jax.Array:
    """Returns for each lane what its head has, where each of `own` begins at a lane."""
    found = of_heads[0]
    for of_head, (_, lanes) in zip(of_heads[1:], own[1:], strict=True):
        found = jnp.where(lane < lanes.start, found, of_head)
    return found
