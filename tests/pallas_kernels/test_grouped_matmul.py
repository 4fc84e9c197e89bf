"""Products of groups of rows with a matrix each, against float64: the kernel for CPUs and the loop in plain XLA."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import grouped_gated_matmul, grouped_matmul, over_groups
from pallas_kernels.grouped_matmul.cases import CASES, GroupedCase
from tests.pallas_kernels.cpu_chips import CPU_CHIPS, in_pairs

LANES = sorted(CPU_CHIPS)
TOLERANCES = {"float32": 2e-6, "bfloat16": 0.004, "float16": 0.0005}
WAYS: list[int | str] = ["xla", *LANES]


@cache
def product(way: int | str, has_scales: bool = False) -> Any:
    def one(x: jax.Array, stacks: list[jax.Array], index: int, starts: jax.Array, scales: Any) -> jax.Array:
        if way == "xla":
            return over_groups(x, starts, lambda tile, group: tile @ stacks[0][group].T)
        return grouped_matmul(x, stacks, index, starts, scales=scales, chip=CPU_CHIPS[way])

    return jax.jit(one)


def operands(case: GroupedCase, dtype: str, extra: int = 0) -> tuple[jax.Array, jax.Array]:
    """Rows, some of which belong to no group, and the matrices."""
    rng = np.random.default_rng(len(case.name))
    x = rng.standard_normal((max(sum(case.counts), 1) + extra, case.size_in), np.float32)
    w = rng.standard_normal((len(case.counts), case.size_out, case.size_in), np.float32)
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype)


def by_hand(x: jax.Array, w: jax.Array, case: GroupedCase) -> np.ndarray:
    groups = np.repeat(np.arange(len(case.counts)), case.counts)
    rows = np.asarray(x, np.float64)[: len(groups)]
    return np.einsum("ni,noi->no", rows, np.asarray(w, np.float64)[groups])


def assert_near(result: Any, expected: np.ndarray, dtype: str, products: int = 1) -> None:
    got = np.asarray(result[: len(expected)], np.float64)
    largest = np.abs(expected).max(axis=1, keepdims=True, initial=1e-30)
    assert np.abs((got - expected) / largest).max(initial=0) < products * TOLERANCES[dtype]


@pytest.mark.parametrize(("case", "dtype", "way"), in_pairs(CASES, WAYS), ids=str)
def test_equals_float64(case: GroupedCase, dtype: str, way: int | str) -> None:
    x, w = operands(case, dtype, extra=3)
    result = product(way)(x, [w], 0, jnp.asarray(case.starts), None)
    assert (result.shape, result.dtype) == ((len(x), case.size_out), dtype)
    assert_near(result, by_hand(x, w, case), dtype)


@pytest.mark.parametrize("lanes", LANES)
def test_a_row_has_the_same_bits_in_any_company(lanes: int) -> None:
    case = CASES[1]
    x, w = operands(case, "float32")
    together = np.asarray(product(lanes)(x, [w], 0, jnp.asarray(case.starts), None))
    for group, (first, end) in enumerate(zip(case.starts, case.starts[1:], strict=False)):
        for row in range(first, end):
            starts = np.where(np.arange(len(case.starts)) > group, 1, 0).astype(np.int32)
            alone = product(lanes)(x[row : row + 1], [w], 0, jnp.asarray(starts), None)
            np.testing.assert_array_equal(np.asarray(alone)[0], together[row])


@pytest.mark.parametrize("lanes", LANES)
def test_gated_with_int8_and_the_stack_chosen_while_it_runs(lanes: int) -> None:
    case = CASES[2]
    x, w = operands(case, "float32")
    halves = w.reshape(len(case.counts), 2, -1, case.size_in)
    values = jnp.round(halves * 20).astype(jnp.int8)
    scales = (jnp.abs(halves[..., 0]) + 0.1) / 100
    others = [jnp.zeros_like(values), values], [jnp.zeros_like(scales), scales]

    @jax.jit
    def run(x: jax.Array, index: jax.Array) -> jax.Array:
        starts = jnp.asarray(case.starts)
        chip = CPU_CHIPS[lanes]
        return grouped_gated_matmul(x, others[0], index, starts, scales=others[1], gate="silu", chip=chip)

    exact = np.asarray(values, np.float64) * np.asarray(scales, np.float64)[..., None]
    groups = np.repeat(np.arange(len(case.counts)), case.counts)
    both = np.einsum("ni,nhoi->nho", np.asarray(x, np.float64), exact[groups])
    expected = both[:, 0] / (1 + np.exp(-both[:, 0])) * both[:, 1]
    assert_near(run(x, jnp.int32(1)), expected, "float32", products=2)
    assert not np.asarray(run(x, jnp.int32(0))).any()


def test_wrong_arguments() -> None:
    x, w = operands(CASES[1], "float32")
    starts, chip = jnp.asarray(CASES[1].starts), CPU_CHIPS[LANES[0]]
    for wrong, rule in [
        (lambda: grouped_matmul(x[:, 1:], [w], 0, starts, chip=chip), r"x must be \[rows, in\]"),
        (lambda: grouped_matmul(x, [w], 0, starts[1:], chip=chip), r"starts must be i32\[33\]"),
        (lambda: grouped_matmul(x, [w, w[1:]], 0, starts, chip=chip), "all stacks must be alike"),
        (lambda: grouped_matmul(x, [w[:, :3]], 0, starts, chip=chip), "at least 4 rows"),
        (lambda: grouped_matmul(x, [w.astype(jnp.int8)], 0, starts, chip=chip), "x and matrices must agree"),
        (lambda: grouped_gated_matmul(x, [w], 0, starts, gate="silu", chip=chip), r"\[groups, 2, F, in\]"),
    ]:
        with pytest.raises(ValueError, match=rule):
            wrong()
