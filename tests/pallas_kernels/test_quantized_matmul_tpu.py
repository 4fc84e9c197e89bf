"""The product with matrices of few bits for TPUs, interpreted, against NumPy."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.chips import CHIPS, TpuChip
from pallas_kernels.quantized_matmul import tpu
from pallas_kernels.quantized_matmul.cases import CASES, QuantizedCase
from pallas_kernels.quantized_matmul.code import E4M3, E5M2, Code
from pallas_kernels.quantized_matmul.tpu_words import floats_of, in_words
from tests.pallas_kernels.test_quantized_matmul import Stored, assert_near, rows

TPUS = {name: chip for name, chip in CHIPS.items() if isinstance(chip, TpuChip)}
FIRST = 1  # the matrices follow another one


@pytest.fixture(autouse=True)
def no_races(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """The interpreter prints what it finds: races, and copies that nobody waited for."""
    yield
    printed = "".join(capfd.readouterr())
    assert "RACE DETECTED" not in printed and "non-zero count" not in printed, printed


def padded(array: np.ndarray, *units: int) -> np.ndarray:
    """The array with zeros after the last rows and columns, so many that these numbers divide its last sides."""
    more = [(0, 0)] * (array.ndim - len(units)) + [(0, -array.shape[i - len(units)] % u) for i, u in enumerate(units)]
    return np.pad(array, more)


def matrices_of(stored: Stored) -> tpu.QuantizedMatrices:
    """The matrices as the kernel takes them, one of P."""
    code, codes, case = stored.case.code, stored.codes.view(np.uint8), stored.case
    if code.per_byte == 2:
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)

    def turned(array: np.ndarray) -> jax.Array:
        groups = padded(array, 1, tpu.INPUTS // case.group)
        return jnp.asarray(groups.swapaxes(-1, -2)[:, None])

    scales = stored.scales
    if case.scale_dtype == "float8_e8m0fnu":
        scales = scales.view(np.uint8)
    elif case.scale_dtype == "float16":
        scales = scales.astype(np.float32)
    zeros = None if stored.zeros is None else turned(stored.zeros)
    words = jnp.asarray(in_words(code, padded(codes, 128, tpu.INPUTS)).swapaxes(-1, -2)[:, None])
    return tpu.QuantizedMatrices(code, case.group, words, turned(scales), zeros)


@dataclass(frozen=True)
class Way:
    case: QuantizedCase
    dtype: str = "bfloat16"
    chip: str = "v6e"

    def __str__(self) -> str:
        return "-".join((self.case.name, self.dtype, self.chip))


INT4, INT4_OF_32, INT4_ZEROS, INT8, INT8_ZEROS, FP8, FP8_E5M2, MXFP4, _ = CASES
WAYS = [Way(case) for case in CASES] + [
    Way(replace(INT4, name="int4-long", size_in=2432), chip="v5e"),
    Way(INT4, chip="v7x"),
    Way(INT4_OF_32, "float32"),
    Way(replace(INT4_OF_32, name="int4-many-long", num_rows=33, size_in=1408)),
    Way(replace(INT4_ZEROS, name="int4-zeros-many", num_rows=33), chip="v7x"),
    Way(INT8_ZEROS, chip="v5e"),
    Way(replace(FP8, name="fp8-many", num_rows=65), chip="v5p"),
    Way(replace(MXFP4, name="mxfp4-few", num_rows=5, size_in=128), chip="v5p"),
    # With groups of 128, few rows are multiplied by numbers alone, and sums are scaled: each kind of eight bits.
    Way(replace(INT8, name="int8-few", group=128, num_rows=20, size_in=256), chip="v5e"),
    Way(replace(INT8_ZEROS, name="int8-zeros-few", group=128, size_in=256)),
    Way(replace(FP8_E5M2, name="e5m2-few", group=128, size_in=256)),
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_equals_numpy(way: Way) -> None:
    case, chip = way.case, TPUS[way.chip]
    stored = Stored.random(case, FIRST + 1)
    w, x = matrices_of(stored), rows(case, way.dtype)
    wide = jnp.pad(x, ((0, 0), (0, w.size - case.size_in)))
    blocks = tpu.choose_blocks(wide, w, 1, chip)
    # Few rows in bfloat16 are multiplied by numbers that nobody rounds, so that their sums are those of float32.
    dtype = jnp.float32 if blocks.scales_sums else x.dtype

    @jax.jit
    def run(x: jax.Array, first: jax.Array) -> jax.Array:
        starts = jnp.array([0, len(x)], jnp.int32)
        return tpu.quantized_matmul(x, w, starts, first, dtype=dtype, blocks=blocks, chip=chip, interpret=True)

    result = run(wide, jnp.int32(FIRST))[:, 0, : case.size_out]
    assert_near(result, x.astype(dtype), stored.matrices[FIRST])


@pytest.mark.parametrize(
    ("code", "chip", "no_number"),
    [(E4M3, "v5e", 480), (E4M3, "v5p", 480), (E4M3, "v6e", 480), (E4M3, "v7x", np.nan), (E5M2, "v6e", np.nan)],
)
def test_every_code_of_a_float_of_eight_bits(code: Code, chip: str, no_number: float) -> None:
    decoding = floats_of(code, TPUS[chip])
    assert decoding is not None
    bits = in_words(code, np.arange(256, dtype=np.uint8)).view(np.uint8)
    numbers = bits.view(jnp.dtype(decoding.dtype)).astype(np.float32) * decoding.factor
    expected = np.where(np.isnan(code.table), np.copysign(no_number, code.table), code.table)
    np.testing.assert_array_equal(numbers, expected)
