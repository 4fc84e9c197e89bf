"""The gated delta rule for TPUs, interpreted, against the recurrence in float64, token by token."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.chips import CHIPS, TpuChip
from pallas_kernels.linear_attention import Visits, plan_visits, tpu
from pallas_kernels.linear_attention.cases import CASES, CONV_SIZE, DeltaCase
from pallas_kernels.linear_attention.visits import TILE
from tests.pallas_kernels.state_steps import PLACE, no_races, of_rows, random_pages, taken_in, with_padding

__all__ = ["no_races"]

TPUS = {name: chip for name, chip in CHIPS.items() if isinstance(chip, TpuChip)}


def blocks_of(case: DeltaCase, chip: TpuChip) -> tpu.StateBlocks | None:
    sizes = case.size, case.size
    return tpu.delta_blocks(case.num_heads, case.page_rows, case.values_per_key, sizes, CONV_SIZE, chip)


@dataclass(frozen=True, eq=False)
class Step:
    """A step with random tokens and states. Pages that hold no state before it are NaN."""

    case: DeltaCase
    page_table: np.ndarray  # i32[R, columns]; some columns that no row needs later have page 0
    pages: np.ndarray
    taps: np.ndarray
    channels: np.ndarray
    g: np.ndarray
    beta: np.ndarray

    @classmethod
    def random(cls, case: DeltaCase, dtype: str) -> "Step":
        random, (K, r, T) = np.random.default_rng(0), (case.num_heads, case.values_per_key, case.num_tokens)
        used = r * case.size * case.size + (CONV_SIZE - 1) * case.num_channels
        table, pages = random_pages(case, (K, case.page_rows, case.size), used, random)
        channels = random.normal(size=(T, K, case.num_channels)).astype(np.float32)
        # Keys that repeat, with all of each error corrected, are what powers of the system would not survive.
        channels[T // 2 :, :, case.size : 2 * case.size] = channels[T // 2, 0, : case.size]
        channels = with_padding(case, channels, dtype)
        # Some tokens, or some channels of them, leave nearly everything, and others nothing.
        g = -random.exponential(size=(T, K, r, case.decays)) * random.choice(
            [0.1, 20], (T, K, r, case.decays), p=[0.9, 0.1]
        )
        beta = random.uniform(0.5, 1, size=(T, K, r))
        taps = random.normal(size=(K, CONV_SIZE, case.num_channels)).astype(np.float32)
        return cls(case, table, pages, taps, channels, g.astype(np.float32), beta.astype(np.float32))

    def run(self, chip: TpuChip) -> tuple[np.ndarray, np.ndarray]:
        """What the kernel reads, and the pages after it."""
        case = self.case
        blocks = blocks_of(case, chip)
        assert blocks is not None
        take = partial(tpu.delta_rule, blocks=blocks, chip=chip, interpret=True)

        @jax.jit
        def run(page_table: jax.Array, pages: jax.Array, place: jax.Array) -> tuple[jax.Array, jax.Array]:
            visits = plan_visits(case.ragged(page_table), case.page_size)
            tokens = tpu.DeltaTokens(*map(jnp.asarray, (self.taps, self.channels, self.g, self.beta)))
            return take(pages, place, visits, tokens)

        read, pages = run(jnp.asarray(self.page_table), jnp.asarray(self.pages), jnp.int32(PLACE))
        return np.asarray(read), np.asarray(pages)

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """The same, in float64, one token after the other."""
        case, pages = self.case, self.pages.astype(np.float64)
        read = np.zeros((case.num_tokens, case.num_heads, case.values_per_key, case.size))
        for token, head, state in taken_in(case, self.page_table, pages):
            read[token, head] = self._take(state, token, head)
        return read, pages

    def _take(self, state: np.ndarray, token: int, head: int) -> np.ndarray:
        """Lets the state of a head [S, 128] take in a token, in place, and returns what is read."""
        r, size = self.case.values_per_key, self.case.size
        matrices, window = state[: r * size].reshape(r, size, size), state[r * size :]
        window = window[: (CONV_SIZE - 1) * (2 + r)].reshape(CONV_SIZE - 1, -1)
        seen = np.concatenate([window, self.channels[token, head].astype(np.float64)[None]])
        mixed = np.sum(seen * self.taps[head], axis=0)
        q, k, *v = (mixed / (1 + np.exp(-mixed))).reshape(-1, size)
        q, k = (x / np.sqrt(x @ x + 1e-6) for x in (q, k))
        window[:] = seen[1:]
        for value in range(r):
            matrices[value] *= np.exp(self.g[token, head, value].astype(np.float64))[:, None]
            error = v[value] - matrices[value].T @ k
            matrices[value] += np.outer(k, self.beta[token, head, value] * error)
        return np.stack([matrix.T @ q for matrix in matrices]) / np.sqrt(size)


@pytest.mark.parametrize(
    ("name", "dtype", "chip"),
    [
        ("decode", "bfloat16", "v5p"),
        ("mixed", "float32", "v6e"),
        ("by-channel", "float32", "v7x"),
        ("one-tile", "bfloat16", "v5e"),
        ("every-row-ends-a-column", "float32", "v6e"),
    ],
)
def test_equals_float64(name: str, dtype: str, chip: str) -> None:
    step = Step.random(next(case for case in CASES if case.name == name), dtype)
    (read, pages), (expected, after) = step.run(TPUS[chip]), step.expected()
    # Logarithms of what is left add up to some -100, of which float32 keeps 1e-5.
    np.testing.assert_allclose(read, expected, atol=1e-5, rtol=2e-5)
    np.testing.assert_allclose(pages[:, 1:], after[:, 1:], atol=1e-5, rtol=2e-5)


def visits_of(case: DeltaCase) -> tuple[Step, Visits]:
    step = Step.random(case, "float32")
    return step, plan_visits(case.ragged(jnp.asarray(step.page_table)), case.page_size)


@pytest.mark.parametrize("case", [case for case in CASES if case.num_tokens > len(case.rows)], ids=str)
def test_visits_take_in_every_token_once(case: DeltaCase) -> None:
    _, visits = visits_of(case)
    singles, chunks = visits.singles, visits.chunks
    assert chunks is not None and int(chunks.count) <= len(chunks.tiles)
    # Where no row has one token, there is one visit of page 0.
    taken = [token for token in singles.tokens[: int(singles.count)].tolist() if visits.is_single[token]]
    size = min(TILE, case.num_tokens)
    for visit in range(int(chunks.count)):
        tile, low, high = (int(x[visit]) for x in (chunks.tiles, chunks.lows, chunks.highs))
        taken += range(tile * size + low, tile * size + high)
    assert sorted(taken) == [token for tokens in of_rows(case) for token in tokens]


def test_visits_end_where_a_page_is_kept() -> None:
    # The row of 70 tokens has a page in its last two columns of five; its first visit is as long as the tile.
    step, visits = visits_of(next(case for case in CASES if case.name == "mixed"))
    assert visits.chunks is not None
    assert [int(high) for high in visits.chunks.highs[:2]] == [TILE, 6]
    assert [int(page) for page in visits.chunks.targets[:2]] == [step.page_table[0, 3], step.page_table[0, 4]]


@pytest.mark.parametrize("chip", TPUS.values(), ids=list(TPUS))
def test_blocks_of_models_fit(chip: TpuChip) -> None:
    for num_heads, r in [(16, 2), (16, 3), (2, 2), (32, 1), (24, 2)]:
        blocks = tpu.delta_blocks(num_heads, 128 * r + 16, r, (128, 128), CONV_SIZE, chip)
        assert blocks is not None and num_heads % blocks.single == 0 and num_heads % blocks.chunk == 0
        assert blocks.single == num_heads or blocks.single % 8 == 0
        assert num_heads // blocks.chunk % chip.num_cores == 0
        assert num_heads != 16 or num_heads // blocks.single % chip.num_cores == 0
    assert tpu.delta_blocks(16, 272, 2, (64, 128), CONV_SIZE, chip) is None
    assert tpu.delta_blocks(16, 288, 2, (128, 128), 10, chip) is None
