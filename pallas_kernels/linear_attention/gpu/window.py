"""A short convolution for NVIDIA GPUs, whose window alone is the state (LFM2, and before the recurrence of Mamba).

Channels know nothing of each other, so a thread has some of them with all the ages of their windows. A token needs no
more than the few before it. So the columns of a prompt are taken in side by side, each with a window of its own: the
tokens before it in the step, or what the page has that the row goes on from.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.linear_attention.channel_tokens import WindowTokens
from pallas_kernels.mosaic_gpu import Ref, interpretation
from pallas_kernels.ragged_paged_attention import RaggedRows

THREADS = 128
# Tokens that are fetched together.
GROUP = 8


class WindowPlan(NamedTuple):
    """The plan of `convolve_windows`. It depends on the rows, and is the same for all layers of a step.

    There is a visit for each column, which takes in the tokens of that column. The first visit of a row also takes
    in the columns after it whose tokens see tokens from before the step, and the visits of these columns do nothing.
    So only the visit that reads a page may write it.
    """

    visits: jax.Array  # i32[N, 4]: first token, columns, page of the window before or -1, whether the row has begun
    columns: jax.Array  # i32[N, 2]: end of its tokens, and page of the window after them, or 0 for none


def choose_lanes(num_channels: int) -> int | None:
    """Returns the channels of a CTA, or None where a block has no multiple of 128, which the kernel does not take."""
    return next((lanes for lanes in (4 * THREADS, 2 * THREADS, THREADS) if num_channels % lanes == 0), None)


def plan_windows(rows: RaggedRows, page_size: int, conv_size: int) -> WindowPlan:
    """Makes the plan for these rows, which have a page for every `page_size` tokens, and for windows of `conv_size`.

    A convolution sees `conv_size` tokens, of which the last one is its own.
    """
    starts, first_tokens, columns = rows.starts(), rows.query_starts[:-1], rows.parts(page_size)
    row, number = columns.rows, columns.numbers
    start, index = starts[row], jnp.arange(len(row), dtype=jnp.int32) - columns.firsts[row]
    begin, end = (jnp.clip(at * page_size, start, rows.kv_lens[row]) for at in (number, number + 1))
    # A column sees tokens from before the step where fewer than a window come before it in the step.
    missing = conv_size - 1 - (page_size - start % page_size)  # from the window of a row's second column
    seeing = 1 + jnp.maximum(-(-missing // page_size), 0)
    count = jnp.where(index == 0, jnp.minimum(columns.counts[row], seeing), (index >= seeing).astype(jnp.int32))
    before = rows.page_table[row, jnp.maximum(start - 1, 0) // page_size]
    before = jnp.where(start > 0, before, -1)
    from_step = (index > 0).astype(jnp.int32)
    visits = [first_tokens[row] + begin - start, jnp.where(columns.is_real, count, 0), before, from_step]
    pages = rows.page_table.at[row, number].get(mode="clip")
    of_columns = jnp.stack([first_tokens[row] + end - start, pages], axis=1)
    return WindowPlan(jnp.stack(visits, axis=1).astype(jnp.int32), of_columns.astype(jnp.int32))


def convolve_windows(
    pages: jax.Array,
    place: jax.Array | int,
    plan: WindowPlan,
    tokens: WindowTokens,
    *,
    has_activation: bool,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Lets each channel of the tokens of a step be convolved with the tokens before it.

    pages  # f32[L, P, K, R, W]: of a block of channels, the window of the convolution [size - 1, C]
    has_activation: the results go through SiLU

    Returns what becomes of each token, f32[T, K, C], anything for padding, and the pages. Columns are taken in any
    order, so no row may write a page from which another one begins. The pages are updated in place when donated.
    """
    num_tokens, num_blocks, num_channels = tokens.channels.shape
    size, lanes = tokens.taps.shape[1], choose_lanes(num_channels)
    assert lanes is not None, num_channels
    layout = plgpu.Layout.WG_STRIDED((lanes,), lanes // THREADS)
    groups = (1,) if num_tokens == len(plan.visits) else (GROUP, 1)

    def load(ref: Ref) -> jax.Array:
        return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

    def kernel(
        where: Ref, visits: Ref, columns: Ref, taps: Ref, bias: Ref, channels: Ref, pages: Ref, mixed: Ref
    ) -> None:
        visit, block, part = (lax.axis_index(name) for name in ("visit", "block", "part"))
        first, count, before, goes_on = (visits[visit, i] for i in range(4))
        own = pl.ds(part * lanes, lanes)

        def age(page: jax.Array, number: int) -> Ref:
            return pages.at[where[0], page, block, pl.ds(number * num_channels + part * lanes, lanes)]

        def channels_of(token: jax.Array) -> jax.Array:
            return load(channels.at[token, block, own])

        def window_before(number: int) -> jax.Array:
            of_page = load(age(jnp.maximum(before, 0), number))
            # A page that was free may have NaN.
            of_page = jnp.where(jnp.broadcast_to(before >= 0, (lanes,)), of_page, 0.0)
            of_step = channels_of(jnp.maximum(first + number - (size - 1), 0))
            return jnp.where(jnp.broadcast_to(goes_on > 0, (lanes,)), of_step, of_page)

        @pl.when(count > 0)
        def _() -> None:
            own_taps = [load(taps.at[block, number, own]) for number in range(size)]
            own_bias = load(bias.at[block, own])

            def take(token: jax.Array, window: list[jax.Array], num_tokens: int) -> list[jax.Array]:
                seen = [*window, *(channels_of(token + i) for i in range(num_tokens))]
                for i in range(num_tokens):
                    sums = sum((tap * seen[i + number] for number, tap in enumerate(own_taps)), own_bias)
                    mixed[token + i, block, own] = sums / (1 + jnp.exp(-sums)) if has_activation else sums
                return seen[num_tokens:]

            def take_column(
                index: jax.Array, carry: tuple[jax.Array, list[jax.Array]]
            ) -> tuple[jax.Array, list[jax.Array]]:
                token, window = carry
                end, page = columns[visit + index, 0], columns[visit + index, 1]
                for group in groups:
                    turns = (end - token) // group

                    def turn(
                        number: jax.Array, window: list[jax.Array], token: jax.Array = token, group: int = group
                    ) -> list[jax.Array]:
                        return take(token + number * group, window, group)

                    window = lax.fori_loop(0, turns, turn, window)
                    token = token + turns * group

                @pl.when(page > 0)
                def _() -> None:
                    for number, value in enumerate(window):
                        age(page, number)[...] = value

                return token, window

            lax.fori_loop(0, count, take_column, (first, [window_before(number) for number in range(size - 1)]))

    kept_pages = jax.new_ref(pages.reshape(*pages.shape[:3], -1))
    out: jax.Array = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(tokens.channels.shape, jnp.float32),
        grid=(len(plan.visits), num_blocks, num_channels // lanes),
        grid_names=("visit", "block", "part"),
        # Between a read and a write of the same numbers by the same thread, which is all that there is, no warp waits.
        # e^-x of SiLU may be off by 2^-24 x of itself, where the result is x e^x or nearly x.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=True),
        interpret=interpretation(interpret),
        kernel_name="convolve_windows",
    )(jnp.asarray(place, jnp.int32)[None], *plan, *tokens, kept_pages)
    return out, jax.freeze(kept_pages).reshape(pages.shape)
