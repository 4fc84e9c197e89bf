"""The calls of kernels for states: blocks of heads, and for each block one visit after the other.

Pallas fetches the state of the next visit, and writes that of the visit before, while a visit is computed. Pages are
updated in place.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.chips import TpuChip
from pallas_kernels.linear_attention.tpu.blocks import VMEM_SHARE
from pallas_kernels.linear_attention.tpu.tokens import LANES
from pallas_kernels.linear_attention.visits import TILE, ChunkVisits, SingleVisits


def call_singles(
    kernel: Callable[..., None],
    weights: jax.Array,
    tokens: Sequence[jax.Array],
    read: tuple[int, ...],
    pages: jax.Array,
    place: jax.Array | int,
    visits: SingleVisits,
    *,
    numbers: Sequence[jax.Array] = (),
    heads: int,
    head_axis: int = 0,
    chip: TpuChip,
    interpret: bool,
    name: str,
) -> tuple[jax.Array, jax.Array]:
    """Calls a kernel for `heads` heads and one token at a time.

    weights: heads are its axis `head_axis`
    tokens: arrays [T, K, ..]
    read: the shape of what is read of a head
    numbers: arrays f32[T, K, n] of which the kernel takes single numbers, in SMEM as [heads, 1, n]

    The kernel is given whether the state before the token counts, and references to the weights, to the arrays and the
    numbers of the token, to the state before it, to what is read and to the state after it. Returns what is read,
    f32[T, K, *read], and the pages. What is read for tokens without a visit is arbitrary.
    """
    num_tokens, num_heads = tokens[0].shape[:2]
    numbers = [x[:, :, None] for x in numbers]  # whose last two axes a block may have whole
    of_weights = [*weights.shape]
    of_weights[head_axis] = heads

    def of_token(shape: tuple[int, ...], memory_space: pltpu.MemorySpace = pltpu.VMEM) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, heads, *shape),
            lambda block, visit, place, tokens, *_: (tokens[visit], block, *[0] * len(shape)),
            memory_space=memory_space,
        )

    def page(which: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, None, heads, *pages.shape[3:]),
            lambda block, visit, place, tokens, *of_visits: (place[0], of_visits[which][visit], block, 0, 0),
        )

    def body(place: Any, tokens: Any, sources: Any, targets: Any, begins: Any, *references: Any) -> None:
        kernel(begins[pl.program_id(1)] == 0, *references)

    scalars = jnp.reshape(place, 1).astype(jnp.int32), visits.tokens, visits.sources, visits.targets, visits.begins
    call = pl.pallas_call(
        body,
        out_shape=(
            jax.ShapeDtypeStruct((num_tokens, num_heads, *read), jnp.float32),
            jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(num_heads // heads, visits.count),
            in_specs=[
                pl.BlockSpec(
                    tuple(of_weights),
                    lambda block, visit, *_: tuple(block if axis == head_axis else 0 for axis in range(weights.ndim)),
                ),
                *(of_token(x.shape[2:]) for x in tokens),
                *(of_token(x.shape[2:], pltpu.SMEM) for x in numbers),
                page(0),
            ],
            out_specs=[of_token(read), page(1)],
        ),
        input_output_aliases={len(scalars) + 1 + len(tokens) + len(numbers): 1},
        compiler_params=_compiler_params(chip),
        interpret=_interpreter(chip, interpret),
        name=name,
    )
    out, pages = call(*scalars, weights, *tokens, *numbers, pages)
    return out, pages


def call_chunks(
    kernel: Callable[..., None],
    weights: jax.Array,
    tokens: Sequence[jax.Array],
    read: tuple[int, ...],
    pages: jax.Array,
    place: jax.Array | int,
    visits: ChunkVisits,
    *,
    gates: Sequence[jax.Array] = (),
    numbers: Sequence[jax.Array] = (),
    heads: int,
    chip: TpuChip,
    interpret: bool,
    name: str,
) -> tuple[jax.Array, jax.Array]:
    """Calls a kernel for `heads` heads and the tokens of a tile that belong to one row.

    weights  # f32[K, ..]
    tokens: arrays [T, K, C], of which a tile has [N, heads * C], or [T, K, n, 128], of which it has [N, heads, n, 128]
    read: the shape of what is read of a head, in one of these ways
    gates: arrays f32[T, K, ..], of which a tile has [N, all], all of the first one, then of the next, and padding
    numbers: arrays f32[T, n] of which the kernel takes single numbers, in SMEM

    The kernel is given the visit's tokens in the tile, from one to before another, and references to the weights, to
    the arrays, the gates, if there are any, and the numbers of the tile, to what is read, which it must not change for
    other tokens, and to the state f32[heads, S, W], which it changes. Returns the same as `call_singles`.
    """
    num_tokens, num_heads = tokens[0].shape[:2]
    tile = min(TILE, num_tokens)

    def in_lanes(shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of all tokens, of which a block of heads has a part of the second axis."""
        return (num_tokens, num_heads * shape[0]) if len(shape) == 1 else (num_tokens, num_heads, *shape)

    def of_tile(shape: tuple[int, ...]) -> pl.BlockSpec:
        _, second, *others = in_lanes(shape)
        return pl.BlockSpec(
            (tile, second // num_heads * heads, *others),
            lambda block, visit, place, tiles, *_: (tiles[visit], block, *[0] * len(others)),
        )

    def page(which: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, None, heads, *pages.shape[3:]),
            lambda block, visit, place, tiles, lows, highs, *of_visits: (
                place[0],
                of_visits[which][visit],
                block,
                0,
                0,
            ),
        )

    given = [x.reshape(in_lanes(x.shape[2:])) for x in tokens]
    specs = [of_tile(x.shape[2:]) for x in tokens]
    if gates:
        parts = [x.reshape(num_tokens, num_heads // heads, -1) for x in gates]
        of_blocks = jnp.concatenate(parts, axis=-1).swapaxes(0, 1)
        of_blocks = jnp.pad(of_blocks, ((0, 0), (0, 0), (0, -of_blocks.shape[-1] % LANES)))  # whole registers
        given.append(of_blocks)
        specs.append(
            pl.BlockSpec(
                (None, tile, of_blocks.shape[-1]), lambda block, visit, place, tiles, *_: (block, tiles[visit], 0)
            )
        )
    for x in numbers:
        given.append(x)
        specs.append(
            pl.BlockSpec(
                (tile, x.shape[1]),
                lambda block, visit, place, tiles, *_: (tiles[visit], 0),
                memory_space=pltpu.SMEM,
            )
        )

    def body(
        place: Any,
        tiles: Any,
        lows: Any,
        highs: Any,
        sources: Any,
        targets: Any,
        firsts: Any,
        begins: Any,
        *references: Any,
    ) -> None:
        *inputs, before, out, after, state = references
        visit = pl.program_id(1)

        @pl.when(firsts[visit] == 1)
        def _() -> None:
            state[...] = jnp.where(begins[visit] == 0, before[...], 0.0)  # a page that was free may have NaN

        @pl.when((visit == 0) | (tiles[jnp.maximum(visit - 1, 0)] != tiles[visit]))
        def _() -> None:
            out[...] = jnp.zeros(out.shape, out.dtype)

        kernel(lows[visit], highs[visit], *inputs, out, state)
        after[...] = state[...]

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
        body,
        out_shape=(
            jax.ShapeDtypeStruct(in_lanes(read), jnp.float32),
            jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(num_heads // heads, visits.count),
            in_specs=[
                pl.BlockSpec((heads, *weights.shape[1:]), lambda block, visit, *_: (block, *[0] * (weights.ndim - 1))),
                *specs,
                page(0),
            ],
            out_specs=[of_tile(read), page(1)],
            scratch_shapes=[pltpu.VMEM((heads, *pages.shape[3:]), jnp.float32)],
        ),
        input_output_aliases={len(scalars) + 1 + len(given): 1},
        compiler_params=_compiler_params(chip),
        interpret=_interpreter(chip, interpret),
        name=name,
    )
    out, pages = call(*scalars, weights, *given, pages)
    return out.reshape(num_tokens, num_heads, *read), pages


def _compiler_params(chip: TpuChip) -> pltpu.CompilerParams:
    # Cores share the heads. Visits of a row follow each other.
    return pltpu.CompilerParams(
        dimension_semantics=("parallel" if chip.num_cores > 1 else "arbitrary", "arbitrary"),
        vmem_limit_bytes=int(chip.vmem_bytes * VMEM_SHARE),
    )


def _interpreter(chip: TpuChip, interpret: bool) -> Any:
    return pltpu.InterpretParams(detect_races=True, num_cores_or_threads=chip.num_cores) if interpret else False
