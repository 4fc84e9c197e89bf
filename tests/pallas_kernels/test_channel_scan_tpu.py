"""The first Mamba and short convolutions for TPUs, interpreted, against float64, token by token."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.chips import CHIPS, TpuChip
from pallas_kernels.linear_attention import plan_visits, tpu
from pallas_kernels.linear_attention.cases import CHANNEL_CASES, CHANNEL_SERVING, WINDOW_SERVING, ChannelCase
from tests.pallas_kernels.channel_steps import ByHand, scan_step, window_step
from tests.pallas_kernels.state_steps import PLACE, no_races, random_pages, taken_in

__all__ = ["no_races"]

TPUS = {name: chip for name, chip in CHIPS.items() if isinstance(chip, TpuChip)}


def check(case: ChannelCase, chip: TpuChip, tokens: Any, take: Any, by_hand: ByHand, conv: int) -> None:
    """Compares what `take` reads and leaves with `by_hand`, which lets a state [size, C] take in a token of a head."""
    random, used = np.random.default_rng(1), case.num_channels * case.size
    table, pages = random_pages(case, (case.num_heads, case.page_rows, 128), used, random)
    blocks = tpu.channel_blocks(case.num_heads, case.page_rows, case.num_channels, conv, chip)
    assert blocks is not None

    @jax.jit
    def run(page_table: jax.Array, pages: jax.Array, place: jax.Array, tokens: Any) -> tuple[jax.Array, jax.Array]:
        visits = plan_visits(case.ragged(page_table), case.page_size)
        return take(pages, place, visits, tokens, blocks=blocks, chip=chip, interpret=True)

    read, got = run(jnp.asarray(table), jnp.asarray(pages), jnp.int32(PLACE), type(tokens)(*map(jnp.asarray, tokens)))
    after, expected = pages.astype(np.float64), np.zeros((case.num_tokens, case.num_heads, case.num_channels))
    for token, head, state in taken_in(case, table, after):
        expected[token, head] = by_hand(state.reshape(-1)[:used].reshape(case.size, -1), token, head)
    np.testing.assert_allclose(read, expected, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(got)[:, 1:], after[:, 1:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("case", "dtype", "chip"), [(CHANNEL_CASES[0], "bfloat16", "v5p"), (CHANNEL_CASES[1], "float32", "v6e")]
)
def test_the_first_mamba_equals_float64(case: ChannelCase, dtype: str, chip: str) -> None:
    tokens, by_hand = scan_step(case, dtype)
    check(case, TPUS[chip], tokens, tpu.channel_scan, by_hand, 1)


@pytest.mark.parametrize(
    ("case", "dtype", "chip"), [(CHANNEL_CASES[0], "float32", "v7x"), (CHANNEL_CASES[1], "bfloat16", "v5p")]
)
def test_short_convolutions_equal_float64(case: ChannelCase, dtype: str, chip: str) -> None:
    has_activation = chip == "v5p"
    tokens, by_hand = window_step(case, dtype, has_activation)

    def take(*args: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
        return tpu.short_convolution(*args, has_activation=has_activation, **options)

    check(case, TPUS[chip], tokens, take, by_hand, case.size + 1)


@pytest.mark.parametrize("chip", TPUS.values(), ids=list(TPUS))
def test_blocks_of_models_fit(chip: TpuChip) -> None:
    for case in (*CHANNEL_SERVING, *WINDOW_SERVING):
        blocks = tpu.channel_blocks(case.num_heads, case.page_rows, case.num_channels, 4, chip)
        assert blocks is not None and case.num_heads // blocks.single % chip.num_cores == 0
    assert tpu.channel_blocks(8, 16, 192, 4, chip) is None
    assert tpu.channel_blocks(8, 16, 256, 10, chip) is None
