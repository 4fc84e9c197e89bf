"""The product with a packed matrix, against float64, with vectors of three widths."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from pallas_kernels.packed_matmul import Panels, packed_matmul
from pallas_kernels.packed_matmul.cases import CASES, PackedCase
from pallas_kernels.packed_matmul.kernel import ROWS
from pallas_kernels.small_matmul import Gate
from tests.pallas_kernels.cpu_chips import CPU_CHIPS, in_pairs

LANES = sorted(CPU_CHIPS)
WIDEST = LANES[-1]
DTYPES = ["float32", "bfloat16"]
# Of a result, relative to the largest of its row. Errors measured: 1e-6, and 0.002 where it is rounded to 8 bits.
TOLERANCES = {"float32": 3e-6, "bfloat16": 0.004}
GATES: dict[Gate, Any] = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}


@cache
def product(lanes: int, size: int, out_dtype: str | None = None, gate: Gate | None = None) -> Any:
    def call(x: jax.Array, matrices: list[jax.Array], index: jax.Array, starts: jax.Array | None) -> jax.Array:
        return packed_matmul(
            x, matrices, index, size=size, starts=starts, dtype=out_dtype, gate=gate, chip=CPU_CHIPS[lanes]
        )

    compiled = jax.jit(call)

    def of_matrices(x: Any, *matrices: Any, index: int = 0, starts: Any = None) -> Any:
        panels = Panels.of(CPU_CHIPS[lanes], x.dtype)
        packed = [jnp.asarray(panels.packed(np.asarray(matrix))) for matrix in matrices]
        return compiled(x, packed, jnp.int32(index), None if starts is None else jnp.asarray(starts, jnp.int32))

    return of_matrices


def operands(num_rows: int, *shape: int, dtype: str = "float32") -> tuple[jax.Array, jax.Array]:
    """Random x [num_rows, in] and a matrix of that shape [.., in]."""
    rng = np.random.default_rng(num_rows)
    x, w = rng.standard_normal((num_rows, shape[-1]), np.float32), rng.standard_normal(shape, np.float32)
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype)


def exact(x: Any, w: Any) -> Any:
    return np.asarray(x, np.float64) @ np.asarray(w, np.float64).reshape(-1, w.shape[-1]).T


def error(result: Any, expected: Any) -> float:
    assert result.shape == expected.shape
    difference = np.abs(np.asarray(result, np.float64) - expected).max(axis=1) / np.abs(expected).max(axis=1)
    return float(np.nan_to_num(difference.max(), nan=np.inf))


def bits(result: Any) -> Any:
    return np.asarray(result.astype(jnp.float32)).view(np.int32)


@pytest.mark.parametrize(("case", "dtype", "lanes"), in_pairs(CASES, LANES), ids=str)
def test_equals_float64(case: PackedCase, dtype: str, lanes: int) -> None:
    x, w = operands(case.num_rows, case.parts, case.size_out, case.size_in, dtype=dtype)
    result = product(lanes, case.size_out)(x, w)
    assert result.dtype == dtype
    assert error(result, exact(x, w)) < TOLERANCES[dtype]


@pytest.mark.parametrize("lanes", LANES)
def test_bfloat16_with_a_result_in_float32(lanes: int) -> None:
    x, w = operands(9, 70, 333, dtype="bfloat16")
    assert error(product(lanes, 70, "float32")(x, w), exact(x, w)) < TOLERANCES["float32"]


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_and_among_others(dtype: str, lanes: int) -> None:
    # The sums of 4,500 inputs are made in several parts, and the last rows are of a second item.
    x, w = operands(ROWS + 11, 20, 4500, dtype=dtype)
    call = product(lanes, 20, "float32")
    together = bits(call(x, w))
    for count in (1, 2, 3, 5, 11):
        for first in (0, 4, ROWS):
            np.testing.assert_array_equal(bits(call(x[first : first + count], w)), together[first : first + count])


def test_the_order_of_a_sum_is_that_of_its_inputs() -> None:
    x, w = operands(3, 4, 50)
    total = np.zeros((3, 4), np.float32)
    for k in range(50):  # a product of two float32 is exact in float64, and so nearly is its sum with a third
        total = (total + np.outer(np.asarray(x[:, k], np.float64), np.asarray(w[:, k], np.float64))).astype(np.float32)
    for lanes in LANES:
        np.testing.assert_array_equal(product(lanes, 4)(x, w), total)


def test_the_matrix_is_chosen_while_the_program_runs() -> None:
    matrices = [operands(seed, 2, 54, 84)[1] for seed in (1, 2, 3)]
    x, _ = operands(3, 84)
    for index, matrix in enumerate(matrices):
        assert error(product(WIDEST, 54)(x, *matrices, index=index), exact(x, matrix)) < TOLERANCES["float32"]


def test_nan_stays_in_its_row_and_in_its_column() -> None:
    for dtype in DTYPES:
        x, w = operands(6, 108, 85, dtype=dtype)  # the last input of a row lies beside the first one of the next row
        clean = bits(product(WIDEST, 108)(x, w))
        result = product(WIDEST, 108)(x.at[2, 0].set(jnp.nan).at[2, 84].set(jnp.nan), w.at[50].set(jnp.nan))
        sick: NDArray[np.bool_] = np.zeros(clean.shape, np.bool_)
        sick[2], sick[:, 50] = True, True
        np.testing.assert_array_equal(np.isnan(result), sick)
        np.testing.assert_array_equal(bits(result)[~sick], clean[~sick])


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("rows", "dtype", "lanes"), in_pairs([1, 7, 100], LANES))
def test_gated_products_equal_float64(rows: int, gate: Gate, dtype: str, lanes: int) -> None:
    x, w = operands(rows, 2, 70, 85, dtype=dtype)
    call = product(lanes, 70, gate=gate)
    result = call(x, w)
    assert result.dtype == dtype
    a, b = np.split(exact(x, w), 2, axis=1)
    assert error(result, GATES[gate](a) * b) < TOLERANCES[dtype]
    np.testing.assert_array_equal(bits(call(x[-1:], w))[0], bits(result)[-1], "the last row alone")


# The rows of each group: none in the middle, all in one group, more than an item has, and none at all.
COUNTS = [(3, 0, 0, 9, 1, 0), (0, 0, 21, 0), (0, ROWS + 9, 2), (0, 0, 0)]


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("gate", [None, "silu"])
def test_grouped_products_equal_float64(gate: Gate | None, counts: tuple[int, ...], lanes: int) -> None:
    dtype = "float32" if sum(counts) % 2 else "bfloat16"
    starts, rows = np.cumsum((0, *counts)), max(sum(counts), 1)
    x, w = operands(rows, len(counts), 2, 37, 85, dtype=dtype)
    result = np.asarray(product(lanes, 37, gate=gate)(x, w, starts=starts).astype(jnp.float32))
    for group, (begin, end) in enumerate(zip(starts, starts[1:], strict=False)):
        if begin < end:
            expected = exact(x[begin:end], w[group])
            if gate is not None:
                a, b = np.split(expected, 2, axis=1)
                expected = GATES[gate](a) * b
            assert error(result[begin:end], expected) < TOLERANCES[dtype]
            alone = bits(product(lanes, 37, gate=gate)(x[begin:end], w[group]))
            np.testing.assert_array_equal(alone, result[begin:end].view(np.int32), "as without other groups")


def test_groups_without_rows_are_not_read() -> None:
    x, w = operands(4, 3, 37, 85)
    call = product(WIDEST, 37)
    result = call(x, w.at[1].set(jnp.nan), starts=[0, 3, 3, 4])
    np.testing.assert_array_equal(result, call(x, w, starts=[0, 3, 3, 4]))


def refused(x: tuple[int, ...], panels: tuple[int, ...], message: str, of: str = "float32", **options: Any) -> None:
    with pytest.raises(ValueError, match=message):
        packed_matmul(jnp.zeros(x, of), [jnp.zeros(panels)], 0, size=20, chip=CPU_CHIPS[4], **options)


def test_arguments_that_do_not_agree_are_refused() -> None:
    panels, rule = (2, 8, 16, 1), r"of 20 rows of 8 must lie in panels \[.., \(2, 8, 16, 1\)\]"
    refused((0, 8), panels, "with at least one row")
    refused((4, 8), (1, 8, 16, 1), rf"{rule}, got \(1, 8, 16, 1\)")
    refused((4, 8), (2, 9, 16, 1), rule)
    refused((4, 8), panels, "must both be of float32 or bfloat16", "float16")
    refused((4, 8), panels, "and so must the result", dtype="float16")
    refused((4, 8), (3, *panels), r"two halves, .* got \(3, 2, 8, 16, 1\) and 'silu'", gate="silu")
    refused((4, 8), (2, *panels), "the gate is one of silu, gelu_tanh: .* 'relu'", gate="relu")
    refused((4, 8), (3, *panels), r"i32\[groups \+ 1\]", starts=jnp.zeros(3, jnp.int32))
