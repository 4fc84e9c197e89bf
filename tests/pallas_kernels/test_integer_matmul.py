"""Products with matrices of integers in panels, against NumPy that rounds tokens likewise, with three vector widths."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from pallas_kernels.chips import CpuChip
from pallas_kernels.cpu.machine_code import compile_handler
from pallas_kernels.integer_matmul import (
    CodePanels,
    integer_matmul,
    rounded_tokens,
)
from pallas_kernels.integer_matmul.kernel import matmul
from pallas_kernels.packed_matmul.panels import Panels
from pallas_kernels.quantized_matmul.code import FLOAT4, IQ2, IQ4
from tests.pallas_kernels.code_panels import matrix, rounded, unpacked_codes
from tests.pallas_kernels.cpu_chips import CPU_CHIPS
from tests.pallas_kernels.test_small_matmul import GATES

LANES = sorted(CPU_CHIPS)
# Of a result, relative to the largest of its row. Products are exact, so these are errors of sums over groups: 3e-7.
TOLERANCES = {"float32": 2e-6, "bfloat16": 0.004}
# What checkpoints store: the panels but for their columns, and the inputs of a matrix.
INT8 = CodePanels(0, 8, None, "float32", zero=128)
STORED = {
    "int8": (INT8, 84),
    "int8-by-token": (replace(INT8, by_row=True), 84),
    "int8-narrow": (INT8, 7),
    "Q8_0": (CodePanels(0, 8, 32, "float16", zero=128), 96),
    "int8-zeros": (CodePanels(0, 8, 64, "bfloat16", offsets="zeros"), 192),
    "int4": (CodePanels(0, 4, 128, "bfloat16", zero=8), 384),
    "int4-row": (CodePanels(0, 4, None, "float32", zero=8), 90),
    "int4-groups-of-192": (CodePanels(0, 4, 192, "bfloat16", zero=8), 384),
    "AWQ": (CodePanels(0, 4, 64, "float16", offsets="zeros"), 192),
    "Q4_0": (CodePanels(0, 4, 32, "float16", zero=8), 96),
    "Q5_1": (CodePanels(0, 5, 32, "float16", offsets="mins"), 96),
    "MXFP4": (CodePanels(0, 4, 32, "float8_e8m0fnu", looked_up=FLOAT4), 96),
    "NVFP4": (CodePanels(0, 4, 16, "float32", looked_up=FLOAT4), 96),
    "IQ4_NL": (CodePanels(0, 4, 32, "float16", looked_up=IQ4), 96),
    "IQ2_XS": (CodePanels(0, 4, 16, "int8", looked_up=IQ2, span=256), 512),
    "Q4_K": (CodePanels(0, 4, 32, "uint8", offsets="mins", span=256), 512),
    "Q5_K": (CodePanels(0, 5, 32, "uint8", offsets="mins", span=256), 512),
    "Q6_K": (CodePanels(0, 6, 16, "int8", zero=32, span=256), 512),
}


def test_one_size_for_a_token_needs_one_scale_for_a_row() -> None:
    with pytest.raises(AssertionError, match="groups of tokens are groups of the matrix"):
        CodePanels(16, 8, 32, "float32", by_row=True)


def stored(name: str, lanes: int) -> tuple[CodePanels, int]:
    panels, ins = STORED[name]
    return replace(panels, columns=CPU_CHIPS[lanes].panel_columns), ins


def arrays_of(panels: CodePanels, outs: int, ins: int, others: tuple[int, ...] = (), seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    groups = 1 if panels.group is None else -(-ins // panels.group)
    made = panels.packed_codes(rng.integers(0, 2**panels.bits, (*others, outs, ins)).astype(np.uint8))
    for name, (shape, dtype) in panels.arrays(outs, ins).items():
        if name in made:
            continue
        size = (*others, outs, shape[1])
        assert shape[1] in (groups, -(-ins // (panels.span or ins)))
        if name == "scales" and panels.scale_dtype == "float8_e8m0fnu":
            numbers = rng.integers(120, 126, size).astype(np.uint8)
        elif dtype in ("uint8", "int8"):
            numbers = rng.integers(-60 if dtype == "int8" else 0, 60, size).astype(dtype)
        else:
            numbers = rng.uniform(0.5, 1, size).astype(np.float32).astype(jnp.dtype(dtype))
        made[name] = panels.packed_groups(numbers)
    return made


def tokens(count: int, ins: int, dtype: str = "float32") -> jax.Array:
    x = np.random.default_rng(count).standard_normal((count, ins), np.float32)
    x[0, : ins // 2] = 0
    return jnp.asarray(x, dtype)


def error(result: Any, expected: NDArray[np.float64]) -> float:
    difference = np.abs(np.asarray(result, np.float64) - expected).max(axis=1) / np.abs(expected).max(axis=1)
    return float(np.nan_to_num(difference.max(), nan=np.inf))


@cache
def product(panels: CodePanels, lanes: int, outs: int, dtype: str | None = None) -> Any:
    def call(x: jax.Array, matrices: Any, index: jax.Array | int) -> jax.Array:
        return integer_matmul(x, matrices, index, panels=panels, outs=outs, dtype=dtype, chip=CPU_CHIPS[lanes])

    return jax.jit(call)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("name", STORED)
def test_equals_numpy_that_rounds_likewise(name: str, lanes: int) -> None:
    panels, ins = stored(name, lanes)
    outs = panels.columns + 6  # the last panel has few columns
    first, second = (arrays_of(panels, outs, ins, seed=seed) for seed in (1, 2))
    call, w = product(panels, lanes, outs), matrix(panels, second, outs, ins)
    x = tokens(13, ins)
    together = np.asarray(call(x, [first, second], 1))
    assert error(together, rounded(np.asarray(x), panels.together) @ w.T) < TOLERANCES["float32"]
    for begin, count in ((0, 1), (4, 2), (7, 6)):
        np.testing.assert_array_equal(call(x[begin : begin + count], [first, second], 1), together[begin:][:count])


def test_rows_of_bfloat16_and_their_results() -> None:
    panels, ins = stored("int4", LANES[-1])
    arrays, x = arrays_of(panels, 70, ins), tokens(3, ins, "bfloat16")
    expected = rounded(np.asarray(x, np.float32), panels.together) @ matrix(panels, arrays, 70, ins).T
    for dtype in TOLERANCES:
        result = product(panels, LANES[-1], 70, dtype)(x, [arrays], 0)
        assert result.dtype == dtype
        assert error(result, expected) < TOLERANCES[dtype]


def test_many_rows_are_several_items_of_work() -> None:
    panels, ins = stored("Q4_0", LANES[-1])
    arrays, x = arrays_of(panels, 128, ins), tokens(203, ins)
    call = product(panels, LANES[-1], 128)
    result = np.asarray(call(x, [arrays], 0))
    assert error(result, rounded(np.asarray(x), 32) @ matrix(panels, arrays, 128, ins).T) < TOLERANCES["float32"]
    np.testing.assert_array_equal(call(x[150:151], [arrays], 0)[0], result[150])


@pytest.mark.parametrize("lanes", LANES)
def test_the_largest_codes_and_tokens_do_not_overflow(lanes: int) -> None:
    panels, _ = stored("int8", lanes)
    arrays = panels.packed_codes(np.full((8, 256), 255, np.uint8)) | {
        "scales": panels.packed_groups(np.ones((8, 1), np.float32))
    }
    for sign in (1, -1):
        result = product(panels, lanes, 8)(jnp.full((2, 256), 127.0 * sign), [arrays], 0)
        np.testing.assert_array_equal(result, np.full((2, 8), 127 * 127 * 256 * sign))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_in_its_row(value: float) -> None:
    panels, ins = stored("AWQ", LANES[-1])
    call, arrays = product(panels, LANES[-1], 70), arrays_of(panels, 70, ins)
    x = tokens(7, ins)
    clean, sick = (np.asarray(call(rows, [arrays], 0)) for rows in (x, x.at[2, 80].set(value)))
    assert np.isnan(sick[2]).all()
    np.testing.assert_array_equal(np.delete(sick, 2, 0), np.delete(clean, 2, 0))


@pytest.mark.parametrize(("lanes", "gate"), [*((lanes, "silu") for lanes in LANES), (LANES[-1], "gelu_tanh")])
def test_gated_products(gate: Any, lanes: int) -> None:
    panels, ins = stored("int4", lanes)
    arrays, x = arrays_of(panels, 37, ins, others=(2,)), tokens(7, ins)

    @jax.jit
    def call(x: jax.Array, arrays: Any) -> jax.Array:
        return integer_matmul(x, [arrays], 0, panels=panels, outs=37, gate=gate, chip=CPU_CHIPS[lanes])

    a, b = rounded(np.asarray(x), 128) @ matrix(panels, arrays, 37, ins).transpose(0, 2, 1)
    together = np.asarray(call(x, arrays))
    assert error(together, GATES[gate](a) * b) < TOLERANCES["float32"]
    np.testing.assert_array_equal(call(x[3:4], arrays)[0], together[3])


@pytest.mark.parametrize("lanes", LANES)
def test_experts_multiply_the_rows_of_their_groups(lanes: int) -> None:
    panels, ins = stored("Q4_0", lanes)
    starts = jnp.array([0, 3, 3, 11], jnp.int32)  # the second has none
    stack, x = arrays_of(panels, 40, ins, others=(3, 2)), tokens(12, ins)
    chip, w = CPU_CHIPS[lanes], matrix(panels, stack, 40, ins)

    @jax.jit
    def call(x: jax.Array, starts: jax.Array, stack: Any) -> tuple[jax.Array, jax.Array]:
        plain = integer_matmul(x, [stack], 0, starts=starts, panels=panels, outs=40, chip=chip)
        gated = integer_matmul(x, [stack], 0, starts=starts, panels=panels, outs=40, gate="silu", chip=chip)
        return plain, gated

    plain, gated = (np.asarray(y) for y in call(x, starts, stack))
    for group, (begin, end) in enumerate(zip(starts, starts[1:], strict=False)):
        if begin == end:
            continue
        a, b = rounded(np.asarray(x), 32)[begin:end] @ w[group].transpose(0, 2, 1)
        assert error(plain[begin:end], np.concatenate([a, b], 1)) < TOLERANCES["float32"]
        assert error(gated[begin:end], GATES["silu"](a) * b) < TOLERANCES["float32"]
    alone = call(x[5:6], jnp.array([0, 0, 0, 1], jnp.int32), stack)
    for result, expected in zip(alone, (plain, gated), strict=True):
        np.testing.assert_array_equal(result[0], expected[5])


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("ins", [5, 32, 84])
def test_tokens_are_rounded_by_groups(ins: int, lanes: int) -> None:
    x = tokens(3, ins)
    codes, sizes, sums = jax.jit(lambda x: rounded_tokens(x, 32, CPU_CHIPS[lanes]))(x)
    codes = np.asarray(codes)[:, :ins].astype(np.int32)
    np.testing.assert_array_equal(
        codes * np.repeat(np.asarray(sizes, np.float64), 32, 1)[:, :ins], rounded(np.asarray(x), 32)
    )
    for group in range(sizes.shape[1]):
        np.testing.assert_array_equal(sums[:, group], codes[:, group * 32 : group * 32 + 32].sum(1))


@pytest.mark.parametrize("name", ["int8", "int4", "Q5_K", "Q6_K"])
def test_codes_lie_as_the_panels_say(name: str) -> None:
    panels, ins = stored(name, LANES[0])
    codes = np.random.default_rng(0).integers(0, 2**panels.bits, (2, 21, ins)).astype(np.uint8)
    made = panels.packed_codes(codes)
    shapes = panels.arrays(21, ins)
    assert all(array.shape == (2, *shapes[key][0]) for key, array in made.items())
    np.testing.assert_array_equal(unpacked_codes(panels, made, 21, ins), codes)
    if panels.bits == 8:
        np.testing.assert_array_equal(made["codes"], Panels(panels.columns, 4).packed(codes))


@pytest.mark.parametrize(
    ("features", "name"), [("+neon,+dotprod", "MXFP4"), ("+neon,+dotprod,+i8mm", "int8"), ("+neon", "int8")]
)
def test_it_compiles_for_arm(features: str, name: str) -> None:
    chip = CpuChip(name="generic", triple="aarch64-unknown-linux-gnu", features=features)
    panels = replace(STORED[name][0], columns=chip.panel_columns)
    assert compile_handler("handler", lambda e, frame: matmul(e, frame, "float32", panels), chip)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": (3, 97)}, r"codes must be uint8\[.., panels, 13, 64, 4\], not uint8\[2, 12, 64, 4\]"),
        ({"x": (0, 96)}, "x must be"),
        ({"scales": ((2, 3, 64), "float32")}, r"scales must be float16\[.., panels, 3, 64\], not float32\[2, 3, 64\]"),
        ({"dtype": "float16"}, "x must be .* float16"),
    ],
    ids=str,
)
def test_arguments_that_do_not_agree_are_refused(change: Any, message: str) -> None:
    panels = replace(STORED["Q4_0"][0], columns=64)
    arrays = {name: jax.ShapeDtypeStruct(*kind) for name, kind in panels.arrays(100, 96).items()}
    if "scales" in change:
        arrays["scales"] = jax.ShapeDtypeStruct(*change["scales"])
    x = jax.ShapeDtypeStruct(change.get("x", (3, 96)), jnp.float32)

    def call(x: jax.Array, arrays: Any) -> jax.Array:
        options = {"panels": panels, "outs": 100, "dtype": change.get("dtype")}
        return integer_matmul(x, [arrays], 0, chip=CPU_CHIPS[LANES[-1]], **options)

    with pytest.raises(ValueError, match=message):
        jax.eval_shape(call, x, arrays)
