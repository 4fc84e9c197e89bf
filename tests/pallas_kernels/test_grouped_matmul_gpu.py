"""The product of groups of rows with a matrix each for GPUs, interpreted, against float64."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.chips import CHIPS, GpuChip
from pallas_kernels.grouped_matmul import gpu
from pallas_kernels.grouped_matmul.cases import CASES, SERVING, GroupedCase
from pallas_kernels.small_matmul.api import Gate
from tests.pallas_kernels.gpu_here import INTERPRETED
from tests.pallas_kernels.test_grouped_matmul import assert_near, by_hand, operands

# An idle multiprocessor costs the interpreter as much as a busy one.
GPUS = {name: replace(chip, num_sms=2) for name, chip in CHIPS.items() if isinstance(chip, GpuChip)}
FIRST = 2  # the group's matrices follow those of another layer, which are NaN
BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(autouse=True)
def no_races(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    printed = "".join(capfd.readouterr())
    assert "RACE DETECTED" not in printed, printed


@dataclass(frozen=True)
class Way:
    """How a case is computed. With two stages, all are used again and again."""

    case: str
    tiles: gpu.GroupTiles
    chip: str = "h200"
    dtype: str = "bfloat16"
    halves: int = 1
    gate: Gate | None = None

    def __str__(self) -> str:
        return "-".join(map(str, (self.case, self.dtype, self.chip, self.gate or self.halves)))


# Tiles of one and of two warpgroups, of which the second one may be idle; groups with several tiles, and tiles with
# several groups; several parts of a sum, and of the columns; both matrix units; sums and columns that fill no tile.
WAYS = (
    Way("whole-tiles-many", gpu.GroupTiles(128, 64, 2)),
    Way("whole-tiles-few", gpu.GroupTiles(64, 64, 2), halves=2, gate="silu"),
    Way("whole-tiles-few", gpu.GroupTiles(64, 128, 2), "b200", "float16", halves=2),
    Way("parts-of-tiles", gpu.GroupTiles(64, 64, 2), halves=2, gate="silu"),
    Way("halves-of-tiles", gpu.GroupTiles(64, 128, 2), "b200"),
)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_equals_float64(way: Way) -> None:
    case, chip = BY_NAME[way.case], GPUS[way.chip]
    x, w = operands(case, way.dtype, extra=3)
    expected, products = by_hand(x, w, case), 1
    if way.halves == 2:
        w = w.reshape(len(w), 2, -1, case.size_in)
        expected = expected.reshape(len(expected), 2, -1)
    if way.gate is not None:
        gate, expected = expected[:, 0], expected[:, 1]
        expected, products = gate / (1 + np.exp(-gate)) * expected, 2
    w = jnp.concatenate([jnp.full((FIRST, *w.shape[1:]), jnp.nan, w.dtype), w])
    assert gpu.choose_tiles(x, w, len(case.counts), way.gate, chip) is not None
    multiply = partial(gpu.grouped_matmul, gate=way.gate, tiles=way.tiles, chip=chip, interpret=INTERPRETED)
    result = np.asarray(jax.jit(multiply)(x, w, jnp.asarray(case.starts), jnp.int32(FIRST)))
    assert (result.shape, result.dtype) == ((len(x), *expected.shape[1:]), x.dtype)
    size = result[0].size
    assert_near(result.reshape(-1, size), expected.reshape(-1, size), way.dtype, products)


def test_gelu_is_its_approximation_by_tanh() -> None:
    """As `jax.nn.gelu` has it, but in float64, because XLA's own tanh is an approximation."""
    gates = np.linspace(-30, 30, 1001, dtype=np.float32)
    got = gpu._gated(jnp.asarray(gates), jnp.float32(2), "gelu_tanh")
    exact = gates.astype(np.float64)
    expected = exact * (1 + np.tanh(np.sqrt(2 / np.pi) * (exact + 0.044715 * exact**3)))
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["sixteen-tokens", "whole-tiles-many", "nothing"])
@pytest.mark.parametrize("tile_rows", [64, 128])
def test_visits_cover_each_row_once(name: str, tile_rows: int) -> None:
    case = BY_NAME[name]
    plan = jax.jit(gpu.plan_visits, static_argnums=(1, 2))
    visits, count = map(np.asarray, plan(case.starts, max(sum(case.counts), 1) + 3, tile_rows, FIRST))
    assert count[0] <= len(visits)
    covered = []
    for matrix, eighth, low, high in visits[: count[0]]:
        assert eighth * 8 <= low < high <= eighth * 8 + tile_rows
        covered += [(row, matrix - FIRST) for row in range(low, high)]
    assert covered == list(enumerate(np.repeat(np.arange(len(case.counts)), case.counts)))


@pytest.mark.parametrize("num_rows", [1, 64, 70, 128])
def test_visits_of_one_group_are_known_before_the_step(num_rows: int) -> None:
    visits, count = map(np.asarray, gpu.plan_visits(jnp.array([0, num_rows]), num_rows, 64, 0))
    of_one, count_of_one = gpu.visits_of_one(num_rows, 64)
    assert count_of_one == count
    np.testing.assert_array_equal(of_one, visits[: count[0]])


def tiles_of(case: GroupedCase, chip: GpuChip, dtype: str = "bfloat16") -> gpu.GroupTiles | None:
    num_groups = len(case.counts)
    x = jax.ShapeDtypeStruct((max(sum(case.counts), 1), case.size_in), dtype)
    w = jax.ShapeDtypeStruct((num_groups, 2, case.size_out, case.size_in), dtype)
    return gpu.choose_tiles(x, w, num_groups, "silu", chip)


@pytest.mark.parametrize("name", ["h100", "h200", "b200"])
def test_tiles_of_models(name: str) -> None:
    chip = CHIPS[name]
    assert isinstance(chip, GpuChip)
    for case in SERVING:
        tiles = tiles_of(case, chip)
        assert tiles is not None and -case.size_out % tiles.columns == -case.size_out % 64 and tiles.stages >= 4
        assert tiles.rows == (128 if max(case.counts) > 32 else 64)  # few rows need one warpgroup
    if name != "b200":  # which never has more than 64
        by_name = {case.name: tiles_of(case, chip) for case in SERVING}
        one, many = by_name["qwen3-30b-decode-1"], by_name["qwen3-30b-decode-64"]
        assert one is not None and many is not None and (one.columns, many.columns) == (64, 128)


def test_what_the_hardware_does_not_take_is_refused() -> None:
    taken = {case.name for case in CASES if tiles_of(case, GPUS["h200"]) is not None}
    assert taken == {"whole-tiles-few", "whole-tiles-many", "parts-of-tiles", "halves-of-tiles"}
    assert tiles_of(BY_NAME["whole-tiles-few"], GPUS["h200"], "float32") is None
