"""Products with matrices of few bits: the operands of all cases, what they mean to NumPy, and the reference in XLA."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.quantized_matmul import quantized_matmul
from pallas_kernels.quantized_matmul.cases import CASES, QuantizedCase

# Of the size of the largest sum: a sum in float32, and a matrix and a result that are rounded once.
TOLERANCES = {"float32": 2e-6, "bfloat16": 0.008}


@dataclass(frozen=True)
class Stored:
    """The arrays of `count` matrices, [count, size_out, ..], of rows that NumPy multiplies by them in float64.

    Where scales are in E4M3, rows have some, too.
    """

    case: QuantizedCase
    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None
    row_scales: np.ndarray | None

    @classmethod
    def random(cls, case: QuantizedCase, count: int = 1) -> "Stored":
        rng, code = np.random.default_rng(7), case.code
        codes = rng.integers(0, 256, (count, case.size_out, case.size_in // code.per_byte)).astype(np.uint8)
        codes = codes.view(jnp.dtype(code.dtype))
        if code.per_byte == 1:  # FP8 has codes that are no numbers
            codes = np.where(np.isfinite(codes.astype(np.float32)), codes, np.zeros_like(codes))
        shape = (count, case.size_out, case.num_groups)
        scales = (
            np.exp2(rng.integers(-6, 1, shape)) if case.scale_dtype == "float8_e8m0fnu" else rng.uniform(0.5, 2, shape)
        )
        zeros = rng.integers(0, 16, shape).astype(code.dtype) if case.has_zeros else None
        of_rows = rng.uniform(0.5, 2, (*shape[:2], 1)).astype(np.float32) if "e4m3" in case.scale_dtype else None
        return cls(case, codes, scales.astype(jnp.dtype(case.scale_dtype)), zeros, of_rows)

    @property
    def matrices(self) -> np.ndarray:
        """The elements of the matrices, f64[count, size_out, size_in]."""
        code, codes = self.case.code, self.codes.view(np.uint8)
        if code.per_byte == 2:
            codes = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
        numbers = code.table[codes].astype(np.float64)
        zeros = np.float64(code.zero) if self.zeros is None else self.zeros.astype(np.float64)[..., None]
        by_group = numbers.reshape(*self.scales.shape, -1)
        found = ((by_group - zeros) * self.scales.astype(np.float64)[..., None]).reshape(numbers.shape)
        return found if self.row_scales is None else found * self.row_scales.astype(np.float64)


def rows(case: QuantizedCase, dtype: str) -> jax.Array:
    return jnp.asarray(np.random.default_rng(3).standard_normal((case.num_rows, case.size_in)), dtype)


def assert_near(result: jax.Array, x: jax.Array, matrix: np.ndarray) -> None:
    """Checks a product of rows with a matrix f64[out, in] against NumPy."""
    exact = np.asarray(x, np.float64)
    assert (result.shape, result.dtype) == ((len(x), len(matrix)), x.dtype)
    error = np.abs(np.asarray(result, np.float64) - exact @ matrix.T)
    assert (error <= TOLERANCES[x.dtype.name] * (np.abs(exact) @ np.abs(matrix.T))).all(), error.max()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference_is_the_product_with_the_decoded_matrix(case: QuantizedCase) -> None:
    stored = Stored.random(case)
    for dtype in TOLERANCES:
        x, zeros = rows(case, dtype), None if stored.zeros is None else stored.zeros[0]
        result = quantized_matmul(x, case.code, jnp.asarray(stored.codes[0]), jnp.asarray(stored.scales[0]), zeros)
        assert_near(result, x, stored.matrices[0])
