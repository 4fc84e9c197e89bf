"""The product with packed matrices of bfloat16 by AMX, which this CPU emulates, and compiled for one that has it."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from pallas_kernels.chips import CpuChip
from pallas_kernels.cpu.machine_code import compile_handler, handler_assembly
from pallas_kernels.cpu.tile_product import DEPTH
from pallas_kernels.packed_matmul import Panels, packed_matmul
from pallas_kernels.packed_matmul.kernel import packed_matmul as kernel
from tests.pallas_kernels.cpu_chips import AMX_CHIPS, SAPPHIRE_RAPIDS, WITH_AMX
from tests.pallas_kernels.dot_models import tile_product

PANELS = Panels.of(WITH_AMX, jnp.bfloat16)


@cache
def product(size: int, chip: CpuChip = WITH_AMX) -> Any:
    call = jax.jit(lambda x, w: packed_matmul(x, [w], 0, size=size, dtype="float32", chip=chip))
    return lambda x, w: np.asarray(call(x, PANELS.packed(w)))


def operands(rows: int, size_out: int, size_in: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Random bfloat16, x [rows, in] and w [out, in]."""
    rng = np.random.default_rng(rows)
    x, w = (rng.standard_normal((n, size_in), np.float32).astype(jnp.bfloat16) for n in (rows, size_out))
    return x, w


def model(x: NDArray[Any], w: NDArray[Any]) -> NDArray[Any]:
    """Sums as the manual says of a tile of 32 inputs, tile after tile."""
    missing = -x.shape[1] % DEPTH
    a, b = (np.pad(one, ((0, 0), (0, missing))).view(np.int32) for one in (x, w))
    total = np.zeros((len(x), len(w)), np.int32)
    for k in range(0, a.shape[1], DEPTH // 2):
        total = tile_product("bfloat16", a[:, k : k + DEPTH // 2], b[:, k : k + DEPTH // 2].T.copy(), total)
    return total


@pytest.mark.parametrize(
    ("rows", "size_out", "size_in"),
    [(1, 64, 64), (47, 70, 85), (3, 5, 7), (16, 130, 96), (33, 3, 2100)],
    ids=str,
)
def test_sums_have_the_bits_that_the_manual_says(rows: int, size_out: int, size_in: int) -> None:
    """Rows and columns of whole tiles and not, last inputs that fill no tile, and more inputs than one part has."""
    x, w = operands(rows, size_out, size_in)
    for chip in AMX_CHIPS:
        result = product(size_out, chip)(x, w)
        np.testing.assert_array_equal(result.view(np.int32), model(x, w))
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    assert np.abs(result - exact).max() < 3e-6 * np.abs(exact).max()


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    x, w = operands(57, 70, 85)
    together = product(70)(x, w)
    for count in (1, 5, 17):
        for first in (0, 31, 40):
            np.testing.assert_array_equal(product(70)(x[first : first + count], w), together[first : first + count])


def test_nan_stays_in_its_row_and_in_its_column() -> None:
    x, w = operands(6, 70, 85)  # the last input of a row lies beside the first one of the next
    clean = product(70)(x, w)
    x[2, 0] = x[2, 84] = w[50] = np.nan
    result = product(70)(x, w)
    sick: NDArray[np.bool_] = np.zeros(clean.shape, np.bool_)
    sick[2], sick[:, 50] = True, True
    np.testing.assert_array_equal(np.isnan(result), sick)
    np.testing.assert_array_equal(result[~sick], clean[~sick])


def test_it_is_compiled_to_the_instructions_of_amx() -> None:
    def emit(e: Any, frame: Any) -> None:
        kernel(e, frame, "bfloat16", "bfloat16", "silu")

    emitted = [line.split()[0] for line in handler_assembly("handler", emit, SAPPHIRE_RAPIDS).splitlines() if line]
    counts = {name: emitted.count(name) for name in ("ldtilecfg", "tilerelease", "tdpbf16ps", "vdpbf16ps")}
    # Tiles of 32 rows and of up to 16, whose products are emitted for whole tiles of inputs and for the last one: four
    # of 32 rows or of 64 columns, and what is left of the columns, two of 32 rows or one.
    assert counts == {"ldtilecfg": 2, "tilerelease": 2, "tdpbf16ps": 2 * (4 + 2) + 2 * (4 + 1), "vdpbf16ps": 0}
    assert compile_handler("handler", emit, SAPPHIRE_RAPIDS)[:4] == b"\x7fELF"
