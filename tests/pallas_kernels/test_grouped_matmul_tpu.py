"""The product of groups of rows with a matrix each for TPUs, interpreted, against float64."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.chips import CHIPS, TpuChip
from pallas_kernels.grouped_matmul import tpu
from pallas_kernels.grouped_matmul.cases import CASES, GroupedCase
from pallas_kernels.small_matmul.api import Gate
from tests.pallas_kernels.test_grouped_matmul import assert_near, by_hand, operands

TPUS = {name: chip for name, chip in CHIPS.items() if isinstance(chip, TpuChip)}
FIRST = 2  # the group's matrices follow those of another layer, which are NaN


@pytest.fixture(autouse=True)
def no_races(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """The interpreter prints what it finds: races, and copies that nobody waited for."""
    yield
    printed = "".join(capfd.readouterr())
    assert "RACE DETECTED" not in printed and "non-zero count" not in printed, printed


@dataclass(frozen=True)
class Way:
    """How a case is computed. Without blocks, those that the kernel chooses."""

    case: str
    dtype: str = "float32"
    chip: str = "v5e"
    blocks: tuple[int, int] | None = None
    halves: int = 1
    gate: Gate | None = None

    def __str__(self) -> str:
        return "-".join(map(str, (self.case, self.dtype, self.chip, self.gate or self.halves)))


# A tile of rows has several groups and a group several tiles; blocks are cut at the edge; cores share columns; and
# matrices lie turned ("wide").
WAYS = (
    Way("sixteen-tokens"),
    Way("a-chunk", blocks=(32, 36)),
    Way("one-group-has-all", blocks=(8, 12)),
    Way("none-in-the-middle", "bfloat16"),
    Way("nothing"),
    Way("wide", "bfloat16", chip="v5p", blocks=(16, 128)),
    Way("wide", halves=2),
    Way("a-chunk", halves=2, gate="silu", blocks=(64, 18)),
)


def run(way: Way, x: jax.Array, w: jax.Array, case: GroupedCase) -> np.ndarray:
    """The product, with the place of the matrices in the stack known only while it runs."""
    w = jnp.concatenate([jnp.full((FIRST, *w.shape[1:]), jnp.nan, w.dtype), w])
    chip = TPUS[way.chip]
    blocks = tpu.choose_blocks(x, w, way.gate, chip) if way.blocks is None else tpu.GroupBlocks(*way.blocks)
    assert blocks is not None
    multiply = partial(tpu.grouped_matmul, gate=way.gate, blocks=blocks, chip=chip, interpret=True)
    return np.asarray(jax.jit(multiply)(x, w, jnp.asarray(case.starts), jnp.int32(FIRST)))


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_equals_float64(way: Way) -> None:
    case = next(case for case in CASES if case.name == way.case)
    x, w = operands(case, way.dtype, extra=3)
    expected = by_hand(x, w, case)
    products = 1
    if way.halves == 2:
        w = w.reshape(len(w), 2, -1, case.size_in)
        expected = expected.reshape(len(expected), 2, -1)
    if way.gate is not None:
        gate, expected = expected[:, 0], expected[:, 1]
        expected, products = gate / (1 + np.exp(-gate)) * expected, 2
    result = run(way, x, w, case)
    assert (result.shape, result.dtype) == ((len(x), *expected.shape[1:]), x.dtype)
    # What belongs to no group is finite.
    assert np.isfinite(result.astype(np.float32)).all()
    size = result[0].size
    assert_near(result.reshape(-1, size), expected.reshape(-1, size), way.dtype, products)


def test_visits_only_groups_with_rows() -> None:
    case = next(case for case in CASES if case.name == "sixteen-tokens")
    tiles, matrices, lows, highs = map(np.asarray, tpu.visits_of(jnp.asarray(case.starts), 64 + 40, 16, FIRST))
    # All seven tiles are visited, four of them once for each group that has rows in them.
    of_rows = np.repeat(np.arange(len(case.counts)), case.counts)
    wanted = [(tile, FIRST + group) for tile in range(4) for group in np.unique(of_rows[tile * 16 : tile * 16 + 16])]
    real = highs > lows
    assert list(zip(tiles[real], matrices[real], strict=True)) == wanted
    assert set(matrices) == {FIRST + group for group in of_rows}
    assert list(np.unique(tiles[~real])) == [4, 5, 6] and (np.diff(tiles) >= 0).all()


@pytest.mark.parametrize("chip", TPUS.values(), ids=list(TPUS))
def test_blocks_of_models_fit(chip: TpuChip) -> None:
    for size_out, size_in in [(768, 2048), (2048, 192), (2880, 2880), (4096, 14336), (14336, 4096), (8192, 5120)]:
        x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((512, size_in), (8, 2, size_out, size_in)))
        blocks = tpu.choose_blocks(x, w, "silu", chip)
        assert blocks is not None and blocks.rows == 128
        assert blocks.columns % 128 == 0 or blocks.columns == size_out
        assert -(-size_out // blocks.columns) % chip.num_cores == 0 or size_out <= 128
    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((512, 2**20), (8, 128, 2**20)))
    assert tpu.choose_blocks(x, w, None, chip) is None
    assert tpu.choose_blocks(x.update(dtype=jnp.float16), w.update(dtype=jnp.float16), None, chip) is None
