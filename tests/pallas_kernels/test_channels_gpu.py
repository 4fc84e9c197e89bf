"""The first Mamba and short convolutions for GPUs, interpreted, against float64, token by token."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.linear_attention import gpu
from pallas_kernels.linear_attention.cases import CHANNEL_CASES, ChannelCase
from pallas_kernels.ragged_paged_attention import RaggedRows
from tests.pallas_kernels.channel_steps import ByHand, scan_step, window_step
from tests.pallas_kernels.gpu_here import INTERPRETED
from tests.pallas_kernels.state_steps import PLACE, no_races, random_pages, taken_in

__all__ = ["no_races"]

DECODE, MIXED = CHANNEL_CASES


def check(case: ChannelCase, tokens: Any, take: Any, by_hand: ByHand) -> None:
    """Compares what `take` reads and leaves with `by_hand`, which lets a state [size, C] take in a token of a head."""
    random, used = np.random.default_rng(1), case.num_channels * case.size
    table, pages = random_pages(case, (case.num_heads, case.page_rows, 128), used, random)

    @jax.jit
    def run(page_table: jax.Array, pages: jax.Array, place: jax.Array, tokens: Any) -> tuple[jax.Array, ...]:
        rows = case.ragged(page_table)
        return *take(pages, place, rows, tokens), rows.is_real()

    read, got, is_real = run(
        jnp.asarray(table), jnp.asarray(pages), jnp.int32(PLACE), type(tokens)(*map(jnp.asarray, tokens))
    )
    after, expected = pages.astype(np.float64), np.zeros((case.num_tokens, case.num_heads, case.num_channels))
    for token, head, state in taken_in(case, table, after):
        expected[token, head] = by_hand(state.reshape(-1)[:used].reshape(case.size, -1), token, head)
    np.testing.assert_allclose(np.where(is_real[:, None, None], read, 0), expected, atol=1e-5, rtol=1e-5)
    states, after = (x.reshape(*x.shape[:3], -1)[..., :used] for x in (np.asarray(got), after))
    np.testing.assert_allclose(states[:, 1:], after[:, 1:], atol=1e-5, rtol=1e-5)
    np.testing.assert_array_equal(np.asarray(got)[:, 0], pages[:, 0])  # which is of nobody


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(replace(DECODE, num_channels=128, size=16), "bfloat16"), (replace(MIXED, num_channels=64, size=8), "float32")],
    ids=str,
)
def test_the_first_mamba_equals_float64(case: ChannelCase, dtype: str) -> None:
    tokens, by_hand = scan_step(case, dtype)

    def take(pages: jax.Array, place: jax.Array, rows: RaggedRows, tokens: gpu.ChannelTokens) -> Any:
        tile = gpu.choose_channels(case.size, case.num_channels)
        assert tile is not None
        plan = gpu.plan_states(rows, case.page_size)
        return gpu.scan_channels(pages, place, plan, tokens, tile=tile, interpret=INTERPRETED)

    check(case, tokens, take, by_hand)


# In pages of a token, three columns of a row need something of the page before them.
TINY_PAGES = ChannelCase("pages-of-a-token", 1, 128, 3, ((2, 5), (0, 4)), 10, page_size=1)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(DECODE, "float32"), (replace(MIXED, num_channels=128), "bfloat16"), (TINY_PAGES, "float32")],
    ids=str,
)
def test_short_convolutions_equal_float64(case: ChannelCase, dtype: str) -> None:
    has_activation = dtype == "bfloat16"
    tokens, by_hand = window_step(case, dtype, has_activation)

    def take(pages: jax.Array, place: jax.Array, rows: RaggedRows, tokens: gpu.WindowTokens) -> Any:
        plan = gpu.plan_windows(rows, case.page_size, case.size + 1)
        return gpu.convolve_windows(pages, place, plan, tokens, has_activation=has_activation, interpret=INTERPRETED)

    check(case, tokens, take, by_hand)


@pytest.mark.parametrize(
    ("size", "num_channels", "is_taken"),
    [(16, 1024, True), (16, 640, True), (64, 64, True), (16, 96, False), (12, 128, False), (128, 128, False)],
)
def test_what_the_scan_takes(size: int, num_channels: int, is_taken: bool) -> None:
    assert (gpu.choose_channels(size, num_channels) is not None) == is_taken


@pytest.mark.parametrize(("num_channels", "lanes"), [(1024, 512), (256, 256), (384, 128), (192, None)])
def test_lanes_of_windows(num_channels: int, lanes: int | None) -> None:
    assert gpu.choose_lanes(num_channels) == lanes
