"""The product of few rows with a matrix, against float64, with vectors of three widths."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from pallas_kernels.small_matmul import Gate, small_gated_matmul, small_matmul
from pallas_kernels.small_matmul.cases import CASES, MatmulCase
from tests.pallas_kernels.cpu_chips import CPU_CHIPS, in_pairs

LANES = sorted(CPU_CHIPS)
# Of a result, relative to the largest of its row. Errors measured: 4e-7, and 0.002 where it is rounded to 8 bits.
TOLERANCES = {"float32": 2e-6, "bfloat16": 0.004}


@cache
def product(lanes: int, out_dtype: str | None = None) -> Any:
    return jax.jit(lambda x, w: small_matmul(x, [w], 0, dtype=out_dtype, chip=CPU_CHIPS[lanes]))


def operands(case: MatmulCase, dtype: str) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(case.num_rows)
    x, w = (rng.standard_normal((n, case.size_in), np.float32) for n in (case.num_rows, case.size_out))
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype)


def error(result: Any, x: jax.Array, w: jax.Array) -> float:
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    difference = np.abs(np.asarray(result, np.float64) - expected).max(axis=1) / np.abs(expected).max(axis=1)
    return float(np.nan_to_num(difference.max(), nan=np.inf))


@pytest.mark.parametrize(("case", "dtype", "lanes"), in_pairs(CASES, LANES), ids=str)
def test_equals_float64(case: MatmulCase, dtype: str, lanes: int) -> None:
    x, w = operands(case, dtype)
    result = product(lanes)(x, w)
    assert (result.shape, result.dtype) == ((case.num_rows, case.size_out), dtype)
    assert error(result, x, w) < TOLERANCES[dtype]


@pytest.mark.parametrize("lanes", LANES)
def test_bfloat16_with_a_result_in_float32(lanes: int) -> None:
    x, w = operands(CASES[-1], "bfloat16")
    assert error(product(lanes, "float32")(x, w), x, w) < TOLERANCES["float32"]


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_alone_and_among_others(dtype: str, lanes: int) -> None:
    x, w = operands(MatmulCase("", 11, 84, 108), dtype)
    together = np.asarray(product(lanes)(x, w).astype(jnp.float32))
    for count in (1, 2, 3, 5):
        for first in (0, 4, 11 - count):
            some = product(lanes)(x[first : first + count], w)
            np.testing.assert_array_equal(np.asarray(some.astype(jnp.float32)), together[first : first + count])


def test_the_matrix_is_chosen_while_the_program_runs() -> None:
    x, _ = operands(MatmulCase("", 3, 84, 0), "float32")
    matrices = [operands(MatmulCase("", seed, 84, 2 * 54), "float32")[1].reshape(2, 54, 84) for seed in (1, 2, 3)]

    @jax.jit
    def each(x: jax.Array, matrices: list[jax.Array]) -> jax.Array:
        def one(index: jax.Array) -> jax.Array:
            return small_matmul(x, matrices, index, chip=CPU_CHIPS[LANES[-1]])

        return jax.lax.map(one, jnp.arange(3))

    for result, matrix in zip(each(x, matrices), matrices, strict=True):
        assert error(result, x, matrix.reshape(108, 84)) < TOLERANCES["float32"]


def test_nan_stays_in_its_row_and_in_its_column() -> None:
    x, w = operands(MatmulCase("", 6, 84, 108), "float32")
    clean = np.asarray(product(LANES[-1])(x, w))
    result = np.asarray(product(LANES[-1])(x.at[2, 80].set(jnp.nan), w.at[50].set(jnp.nan)))
    sick: NDArray[np.bool_] = np.zeros(clean.shape, np.bool_)
    sick[2], sick[:, 50] = True, True
    np.testing.assert_array_equal(np.isnan(result), sick)
    np.testing.assert_array_equal(result[~sick], clean[~sick])


@cache
def gated_product(lanes: int, gate: Gate) -> Any:
    return jax.jit(lambda x, w: small_gated_matmul(x, [w], 0, gate=gate, chip=CPU_CHIPS[lanes]))


GATES: dict[Gate, Any] = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("rows", "dtype", "lanes"), in_pairs([1, 2, 3, 7, 70], LANES))
def test_gated_products_equal_float64(rows: int, gate: Gate, dtype: str, lanes: int) -> None:
    x, w = operands(MatmulCase("", rows, 84, 2 * 37), dtype)
    result = gated_product(lanes, gate)(x, w.reshape(2, 37, 84))
    assert (result.shape, result.dtype) == ((rows, 37), dtype)
    a, b = np.split(np.asarray(x, np.float64) @ np.asarray(w, np.float64).T, 2, axis=1)
    expected = GATES[gate](a) * b
    difference = np.abs(np.asarray(result, np.float64) - expected).max(axis=1) / np.abs(expected).max(axis=1)
    assert difference.max() < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gated_rows_have_the_same_bits_alone(dtype: str) -> None:
    x, w = operands(MatmulCase("", 7, 84, 2 * 37), dtype)
    call = gated_product(LANES[-1], "silu")
    together = np.asarray(call(x, w.reshape(2, 37, 84)).astype(jnp.float32))
    for row in range(7):
        alone = call(x[row : row + 1], w.reshape(2, 37, 84)).astype(jnp.float32)
        np.testing.assert_array_equal(np.asarray(alone)[0], together[row])


@pytest.mark.parametrize("shape", [(3, 8, 9), (16, 9), (2, 3, 9)], ids=str)
def test_gated_matrices_have_two_halves(shape: tuple[int, ...]) -> None:
    structs = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4, 9), shape)]
    with pytest.raises(ValueError, match=r"gated matrices must be \[2, at least 4, in\]"):
        jax.eval_shape(lambda x, w: small_gated_matmul(x, [w], 0, gate="silu", chip=CPU_CHIPS[LANES[-1]]), *structs)


def rounded(w: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Integers, scales, and the matrix that these are."""
    scales = jnp.abs(w.astype(jnp.float32)).max(-1) / 100
    values = jnp.round(w.astype(jnp.float32) / scales[..., None])
    return values.astype(jnp.int8), scales, values * scales[..., None]


@pytest.mark.parametrize(
    ("case", "dtype", "lanes"), in_pairs([case for case in CASES if case.num_rows in (1, 3, 33)], LANES), ids=str
)
def test_int8_equals_float64(case: MatmulCase, dtype: str, lanes: int) -> None:
    x, w = operands(case, dtype)
    values, scales, exact = rounded(w)
    # The second of two: a program that takes the first one's values or scales is seen.
    result = int8_product(lanes)(x, [values * 0, values], [scales * 0 + 1, scales])
    assert (result.shape, result.dtype) == ((case.num_rows, case.size_out), dtype)
    assert error(result, x, exact) < TOLERANCES[dtype]


@cache
def int8_product(lanes: int) -> Any:
    return jax.jit(lambda x, ws, ss: small_matmul(x, ws, 1, scales=ss, chip=CPU_CHIPS[lanes]))


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("rows", [1, 7])
def test_gated_int8_equals_float64(rows: int, gate: Gate, lanes: int) -> None:
    x, w = operands(MatmulCase("", rows, 84, 2 * 37), "float32")
    values, scales, exact = rounded(w.reshape(2, 37, 84))

    @jax.jit
    def call(x: jax.Array, values: jax.Array, scales: jax.Array) -> jax.Array:
        return small_gated_matmul(x, [values], 0, scales=[scales], gate=gate, chip=CPU_CHIPS[lanes])

    a, b = np.asarray(x, np.float64) @ np.asarray(exact, np.float64).transpose(0, 2, 1)
    expected = GATES[gate](a) * b
    difference = np.abs(np.asarray(call(x, values, scales)) - expected).max(axis=1) / np.abs(expected).max(axis=1)
    assert difference.max() < TOLERANCES["float32"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_times_int8_have_the_same_bits_alone(dtype: str) -> None:
    x, w = operands(MatmulCase("", 11, 84, 108), dtype)
    values, scales, _ = rounded(w)
    call = int8_product(LANES[-1])
    together = np.asarray(call(x, [values] * 2, [scales] * 2).astype(jnp.float32))
    for row in range(11):
        alone = call(x[row : row + 1], [values] * 2, [scales] * 2).astype(jnp.float32)
        np.testing.assert_array_equal(np.asarray(alone)[0], together[row])


@pytest.mark.parametrize(
    ("values", "scales", "message"),
    [
        (jnp.int8, None, "x and matrices must both be of float32 or bfloat16, got float32 and int8"),
        (jnp.float32, (16,), "matrices must be int8, got float32 and float32"),
        (jnp.int8, (15,), r"each of 1 matrices \(16, 8\) needs scales f32\[16\]"),
    ],
)
def test_scales_belong_to_int8(values: Any, scales: Any, message: str) -> None:
    x, w = jax.ShapeDtypeStruct((3, 8), jnp.float32), jax.ShapeDtypeStruct((16, 8), values)
    given = None if scales is None else [jax.ShapeDtypeStruct(scales, jnp.float32)]
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda x, w, s: small_matmul(x, [w], 0, scales=s, chip=CPU_CHIPS[LANES[-1]]), x, w, given)


@pytest.mark.parametrize(
    ("x", "matrices", "message"),
    [
        ((3, 8), [(16, 9)], "x must be"),
        ((3, 2, 8), [(16, 8)], "x must be"),
        ((0, 8), [(16, 8)], "x must be"),
        ((3, 8), [(16, 8), (8, 8)], "all matrices must be alike"),
    ],
    ids=str,
)
def test_shapes_that_do_not_agree_are_refused(x: Any, matrices: Any, message: str) -> None:
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (x, *matrices)]
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda x, *ws: small_matmul(x, ws, 0, chip=CPU_CHIPS[LANES[-1]]), *shapes)


def test_other_dtypes_are_refused() -> None:
    x, w = (jax.ShapeDtypeStruct((4, 8), jnp.float16) for _ in range(2))
    with pytest.raises(ValueError, match="must both be of float32 or bfloat16, got float16"):
        jax.eval_shape(lambda x, w: small_matmul(x, [w], 0, chip=CPU_CHIPS[LANES[-1]]), x, w)
