"""Row blocks: the logits of many rows are sampled a few rows at a time, so that a step needs less memory."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from jaxvllm.runtime.slot_fields import Rows
from pallas_kernels.backend import Backend
from pallas_kernels.chips import MIB

# Of a device's share of the logits. Sampling needs some six arrays of this size: in the step of Qwen3.5-35B-A3B on four
# v6e, with 256 rows of 248,320 tokens, 0.38 GB without blocks.
BLOCK_BYTES = 16 * MIB
# A TPU keeps eight rows in a tile.
TILE_ROWS = 8


def rows_of_block(share_size: int, num_devices: int, backend: Backend) -> int | None:
    """Returns how many rows with so many logits on each device are sampled together, or None: all of them.

    Each device samples the same number of them. On a GPU the host waits for each condition of each block, and on a CPU
    memory is not scarce, so only a TPU has blocks.
    """
    if backend.kind != "tpu":
        return None
    unit = TILE_ROWS * num_devices
    return max(BLOCK_BYTES // (4 * share_size) // unit, 1) * unit


def by_blocks[Tree](
    of_rows: Callable[[jax.Array, Rows, jax.Array], Tree],
    logits: jax.Array,
    rows: Rows,
    positions: jax.Array,
    block: int | None,
) -> Tree:
    """Returns what `of_rows` makes of logits f32[R, V], their rows and positions i32[R], `block` rows at a time.

    `of_rows` returns arrays [R, ...], and makes the same of a row whichever rows are beside it, where anybody reads it.
    """
    num_rows = len(logits)
    if block is None or num_rows <= block:
        return of_rows(logits, rows, positions)

    def of_block(first: jax.Array | int) -> Tree:
        def part(array: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(array, first, block)

        return of_rows(part(logits), replace(rows, slots=part(rows.slots)), part(positions))

    def once(number: jax.Array, whole: Tree) -> Tree:
        # The last block begins within the one before it, if it must, and computes some rows again.
        first = jnp.minimum(number * block, num_rows - block)
        put = lax.dynamic_update_slice_in_dim
        return jax.tree.map(lambda array, now: put(array, now, first, 0), whole, of_block(first))

    shapes = jax.eval_shape(of_block, 0)
    nothing = jax.tree.map(lambda one: jnp.zeros((num_rows, *one.shape[1:]), one.dtype), shapes)
    return lax.fori_loop(0, -(-num_rows // block), once, nothing)
