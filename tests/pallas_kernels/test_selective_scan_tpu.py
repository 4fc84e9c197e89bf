"""Mamba-2 for TPUs, interpreted, against the recurrence in float64, token by token."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.chips import CHIPS, TpuChip
from pallas_kernels.linear_attention import plan_visits, tpu
from pallas_kernels.linear_attention.cases import CONV_SIZE, SCAN_CASES, SCAN_SERVING, ScanCase
from tests.pallas_kernels.state_steps import PLACE, no_races, random_pages, taken_in, with_padding

__all__ = ["no_races"]

TPUS = {name: chip for name, chip in CHIPS.items() if isinstance(chip, TpuChip)}


def shape_of(case: ScanCase) -> tpu.ScanShape:
    return tpu.ScanShape(case.num_heads, case.head_size, case.state_size)


def blocks_of(case: ScanCase, chip: TpuChip) -> tpu.StateBlocks | None:
    return tpu.scan_blocks(case.num_groups, case.page_rows, shape_of(case), CONV_SIZE, chip)


@dataclass(frozen=True, eq=False)
class ScanStep:
    """A step with random tokens and states."""

    case: ScanCase
    page_table: np.ndarray
    pages: np.ndarray
    tokens: tpu.ScanTokens

    @classmethod
    def random(cls, case: ScanCase, dtype: str) -> "ScanStep":
        random, K, H, T = np.random.default_rng(0), case.num_groups, case.num_heads, case.num_tokens
        C = case.num_channels
        used = case.num_values * case.state_size + (CONV_SIZE - 1) * C
        table, pages = random_pages(case, (K, case.page_rows, 128), used, random)
        # Some tokens leave nearly everything, and others nothing.
        g = -random.exponential(size=(T, K, H)) * random.choice([0.1, 20], (T, K, H), p=[0.9, 0.1])
        # What is read is about 1: logarithms that add up to some -100 have errors of 1e-5.
        scale = np.repeat([1, case.state_size**-0.5], [case.num_values, 2 * case.state_size]).astype(np.float32)
        tokens = tpu.ScanTokens(
            taps=random.normal(size=(K, CONV_SIZE, C)).astype(np.float32) * scale,
            bias=random.normal(size=(K, C)).astype(np.float32) * scale,
            skip=random.normal(size=(K, H)).astype(np.float32),
            channels=with_padding(case, random.normal(size=(T, K, C)).astype(np.float32), dtype),
            g=g.astype(np.float32),
            dt=random.uniform(size=(T, K, H)).astype(np.float32),
        )
        return cls(case, table, pages, tokens)

    def run(self, chip: TpuChip) -> tuple[np.ndarray, np.ndarray]:
        """What the kernel reads, and the pages after it."""
        case, blocks = self.case, blocks_of(self.case, chip)
        assert blocks is not None
        take = partial(tpu.selective_scan, shape=shape_of(case), blocks=blocks, chip=chip, interpret=True)

        @jax.jit
        def run(page_table: jax.Array, pages: jax.Array, place: jax.Array) -> tuple[jax.Array, jax.Array]:
            visits = plan_visits(case.ragged(page_table), case.page_size)
            return take(pages, place, visits, tpu.ScanTokens(*map(jnp.asarray, self.tokens)))

        read, pages = run(jnp.asarray(self.page_table), jnp.asarray(self.pages), jnp.int32(PLACE))
        return np.asarray(read), np.asarray(pages)

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """The same, in float64, one token after the other."""
        case, pages = self.case, self.pages.astype(np.float64)
        read = np.zeros((case.num_tokens, case.num_groups, case.num_heads, case.head_size))
        for token, group, state in taken_in(case, self.page_table, pages):
            read[token, group] = self._take(state.reshape(-1), token, group)
        return read, pages

    def _take(self, state: np.ndarray, token: int, group: int) -> np.ndarray:
        """Lets the state of a group take in a token, in place, and returns what is read."""
        case, tokens = self.case, self.tokens
        H, P, S = case.num_heads, case.head_size, case.state_size
        heads = state[: H * P * S].reshape(H, P, S)
        window = state[H * P * S :][: (CONV_SIZE - 1) * case.num_channels].reshape(CONV_SIZE - 1, -1)
        seen = np.concatenate([window, tokens.channels[token, group].astype(np.float64)[None]])
        mixed = np.sum(seen * tokens.taps[group], axis=0) + tokens.bias[group]
        x, b, c = np.split(mixed / (1 + np.exp(-mixed)), (H * P, H * P + S))
        x = x.reshape(H, P)
        window[:] = seen[1:]
        heads *= np.exp(tokens.g[token, group].astype(np.float64))[:, None, None]
        heads += (tokens.dt[token, group, :, None] * x)[..., None] * b
        return heads @ c + tokens.skip[group][:, None] * x


@pytest.mark.parametrize(
    ("name", "dtype", "chip"),
    [("decode", "bfloat16", "v5p"), ("mixed", "float32", "v6e"), ("one-tile", "bfloat16", "v7x")],
)
def test_equals_float64(name: str, dtype: str, chip: str) -> None:
    step = ScanStep.random(next(case for case in SCAN_CASES if case.name == name), dtype)
    (read, pages), (expected, after) = step.run(TPUS[chip]), step.expected()
    np.testing.assert_allclose(read, expected, atol=2e-5, rtol=2e-5)
    np.testing.assert_allclose(pages[:, 1:], after[:, 1:], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("chip", TPUS.values(), ids=list(TPUS))
def test_blocks_of_models_fit(chip: TpuChip) -> None:
    for case in SCAN_SERVING:
        blocks = blocks_of(case, chip)
        assert blocks is not None and case.num_groups % blocks.single == 0 and case.num_groups % blocks.chunk == 0
        assert case.num_groups == 1 or case.num_groups // blocks.single % chip.num_cores == 0
    # Values, states and heads that no rows of registers end with, and a window higher than a register.
    for shape, conv_size in [((3, 64, 128), 4), ((2, 64, 64), 4), ((32, 4, 128), 4), ((2, 64, 128), 10)]:
        assert tpu.scan_blocks(8, 1056, tpu.ScanShape(*shape), conv_size, chip) is None
