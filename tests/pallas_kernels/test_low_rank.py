"""What adapters of low rank add to the products of rows, against float64, in any company."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.models.ops import activate
from pallas_kernels.backend import REFERENCE
from pallas_kernels.grouped_matmul import RowOrder, order_rows
from pallas_kernels.low_rank import add_low_rank
from pallas_kernels.low_rank.cases import CASES, LowRankCase
from pallas_kernels.small_matmul import Gate
from tests.pallas_kernels.cpu_chips import CPU_CHIPS

LANES = sorted(CPU_CHIPS)
TOLERANCES = {"float32": 2e-6, "bfloat16": 0.008}
type Operands = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


@cache
def adding(lanes: int) -> Any:
    def one(operands: Operands, groups: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, x, *matrices = operands
        order = order_rows(groups, len(matrices[0]), REFERENCE)
        downs, ups, ratios = ([jnp.full_like(one, jnp.nan), one] for one in matrices)
        return y, add_low_rank(y, x, downs, ups, index, order, ratios=ratios, chip=CPU_CHIPS[lanes])

    return jax.jit(one)


def operands(case: LowRankCase, dtype: str) -> Operands:
    rng = np.random.default_rng(len(case.name))

    def drawn(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)

    num_rows = len(case.groups)
    down = drawn(case.num_groups, case.rank, case.size_in)
    part_rank = case.rank // case.num_parts
    up = drawn(case.num_groups, part_rank + 1, case.size_out)
    # Columns of one part follow each other, but for those at the end.
    parts = np.sort(rng.integers(0, case.num_parts, case.size_out))
    parts[-3:] = rng.integers(0, case.num_parts, 3)
    up = up.at[:, -1].set(jnp.asarray(parts, dtype))
    ratios = jnp.asarray(rng.standard_normal((case.num_groups, case.size_out), np.float32))
    # The matrices of groups without rows are not read.
    unused = np.setdiff1d(np.arange(case.num_groups), case.groups)
    down, up, ratios = (one.at[unused].set(jnp.nan) for one in (down, up, ratios))
    return drawn(num_rows, case.size_out), drawn(num_rows, case.size_in), down, up, ratios


def exact(
    case: LowRankCase, y: jax.Array, x: jax.Array, down: jax.Array, up: jax.Array, ratios: jax.Array | None
) -> np.ndarray:
    """f64[T, out], and y for rows of no group."""
    result = np.array(y, np.float64)
    ranks = case.rank // case.num_parts
    for row, group in enumerate(case.groups.tolist()):
        if group < case.num_groups:
            h = np.asarray(down[group], np.float64) @ np.asarray(x[row], np.float64)
            by_part = h[: ranks * case.num_parts].reshape(case.num_parts, ranks)
            own = by_part[np.asarray(up[group, -1], np.int64)]  # [out, R]
            result[row] *= 1 if ratios is None else 1 + np.asarray(ratios[group], np.float64)
            result[row] += (own * np.asarray(up[group, :-1], np.float64).T).sum(1)
    return result


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_float64(case: LowRankCase, dtype: str, lanes: int) -> None:
    given = operands(case, dtype)
    before, after = adding(lanes)(given, case.groups, jnp.int32(1))
    y = np.asarray(given[0], np.float64)
    np.testing.assert_array_equal(np.asarray(before, np.float64), y, err_msg="another reader sees what it was")
    has = case.groups < case.num_groups
    np.testing.assert_array_equal(np.asarray(after, np.float64)[~has], y[~has])
    expected = exact(case, *given)
    largest = np.abs(expected - y).max(initial=1.0)
    assert np.abs(np.asarray(after, np.float64) - expected).max(initial=0) < TOLERANCES[dtype] * largest


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize(("dtype", "gate", "has_ratios"), [("float32", "silu", True), ("bfloat16", "gelu_tanh", False)])
def test_a_gate_is_for_all_rows(dtype: str, gate: Gate, has_ratios: bool, lanes: int) -> None:
    case = CASES[3]
    before, x, down, up, every = operands(case, dtype)
    ratios = every if has_ratios else None
    y = before.reshape(len(x), 2, -1).astype(jnp.float32)

    @jax.jit
    def run(groups: jax.Array) -> jax.Array:
        order = order_rows(groups, len(down), REFERENCE)
        options: dict[str, Any] = dict(ratios=None if ratios is None else [ratios], gate=gate, chip=CPU_CHIPS[lanes])
        return add_low_rank(y, x, [down], [up], 0, order, **options)

    result = run(case.groups)
    assert (result.shape, result.dtype) == ((len(x), y.shape[2]), dtype)
    halves = jnp.asarray(exact(case, before, x, down, up, ratios).reshape(y.shape), jnp.float32)
    expected = np.asarray(activate(halves[:, 0], gate) * halves[:, 1])
    np.testing.assert_allclose(
        np.asarray(result, np.float32), expected, atol=TOLERANCES[dtype] * np.abs(expected).max()
    )


@pytest.mark.parametrize("lanes", LANES)
def test_a_row_has_the_same_bits_in_any_company_and_any_group(lanes: int) -> None:
    case = CASES[3]
    y, x, *matrices = operands(case, "float32")
    _, together = adding(lanes)((y, x, *matrices), case.groups, jnp.int32(1))
    turned = [one[::-1] for one in matrices]
    for row, group in enumerate(case.groups.tolist()):
        alone = np.full_like(case.groups, case.num_groups)
        alone[0] = case.num_groups - 1 - group if group < case.num_groups else group
        rolled = jnp.roll(y, -row, 0), jnp.roll(x, -row, 0)
        _, found = adding(lanes)((*rolled, *turned), alone, jnp.int32(1))
        np.testing.assert_array_equal(np.asarray(found)[0], np.asarray(together)[row])


def test_wrong_arguments() -> None:
    y, x, down, up, ratios = operands(CASES[3], "float32")
    order, chip = order_rows(jnp.asarray(CASES[3].groups), len(down), REFERENCE), CPU_CHIPS[LANES[0]]

    def add(
        y: jax.Array = y,
        x: jax.Array = x,
        down: jax.Array = down,
        up: jax.Array = up,
        ratios: jax.Array = ratios,
        order: RowOrder = order,
        gate: Gate | None = None,
    ) -> None:
        add_low_rank(y, x, [down], [up], 0, order, ratios=[ratios], gate=gate, chip=chip)

    for wrong, rule in [
        (dict(x=x[:, 1:]), "must agree"),
        (dict(y=y[:, 1:]), "must agree"),
        (dict(down=down[:, :17]), "multiple of 4"),
        (dict(order=order._replace(starts=order.starts[1:])), "of 16 rows in 4 groups"),
        (dict(ratios=ratios[1:]), "ratios f32 of 4 groups by 640"),
        (dict(up=up.astype(jnp.bfloat16)), "must be of one of"),
        (dict(gate="silu"), r"must be f32\[T, 2, F\]"),
    ]:
        with pytest.raises(ValueError, match=rule):
            add(**wrong)  # type: ignore[arg-type]
