"""Products with matrices of FP8 and of tables in panels, against float64 and the packed matrices that they are."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.chips import CpuChip
from pallas_kernels.cpu.machine_code import handler_assembly
from pallas_kernels.decoded_matmul import decoded_matmul
from pallas_kernels.decoded_matmul.kernel import multiply_by_decoded
from pallas_kernels.integer_matmul import CodePanels
from pallas_kernels.integer_matmul.decoded_rows import decoded_rows
from pallas_kernels.packed_matmul import Panels, packed_matmul
from pallas_kernels.packed_matmul.kernel import ROWS
from pallas_kernels.quantized_matmul.code import E4M3, FP4, NF4
from pallas_kernels.small_matmul import Gate
from tests.pallas_kernels.code_panels import matrix
from tests.pallas_kernels.cpu_chips import CPU_CHIPS, WITH_AMX
from tests.pallas_kernels.test_packed_matmul import GATES, TOLERANCES, bits, error, exact

WIDEST = CPU_CHIPS[16]
CHIPS = {
    "avx512": WIDEST,
    "avx512-f16c": WIDEST.without("avx512vbmi"),
    "avx2": CPU_CHIPS[8],
    "sse": CPU_CHIPS[4],
}
# What checkpoints store: the inputs that share a scale, the dtype of scales, and the inputs of a matrix.
STORED = {
    "rows": (None, "float32", 301),  # more than are decoded at a time
    "blocks": (128, "float32", 384),
    "ue8m0": (128, "float8_e8m0fnu", 200),
    "MXFP8": (32, "float8_e8m0fnu", 96),
    "NF4": (64, "float32", 192),
    "FP4": (8, "bfloat16", 136),
}
TABLES = {"NF4": NF4, "FP4": FP4}
# Codes that are numbers.
NUMBERS = np.flatnonzero(np.isfinite(E4M3.table)).astype(np.uint8)


def stored(name: str, chip: CpuChip) -> tuple[CodePanels, int]:
    group, scale_dtype, ins = STORED[name]
    if name in TABLES:
        return CodePanels(chip.panel_columns, 4, group, scale_dtype, looked_up=TABLES[name]), ins
    return CodePanels(chip.panel_columns, 8, group, scale_dtype, is_float8=True), ins


def arrays_of(panels: CodePanels, outs: int, ins: int, others: tuple[int, ...] = (), seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    size = (*others, outs, panels.arrays(outs, ins)["scales"][0][1])
    scales = rng.uniform(0.5, 2, size).astype(panels.held_scales)
    if panels.scale_dtype == "float8_e8m0fnu":
        scales = rng.integers(120, 130, size).astype(np.uint8)
    numbers = NUMBERS if panels.is_float8 else np.arange(16, dtype=np.uint8)
    codes = panels.packed_codes(rng.choice(numbers, (*others, outs, ins)))
    return codes | {"scales": panels.packed_groups(scales)}


def tokens(count: int, ins: int, dtype: str = "float32") -> jax.Array:
    """Random numbers, so small that no gate of a product is too large for an exponential function."""
    return jnp.asarray(np.random.default_rng(count).standard_normal((count, ins), np.float32) * 2**-10, dtype)


@cache
def product(panels: CodePanels, chip: CpuChip, outs: int, dtype: str | None = None, gate: Gate | None = None) -> Any:
    def call(x: jax.Array, matrices: Any, index: jax.Array | int = 0, starts: jax.Array | None = None) -> jax.Array:
        options = {"panels": panels, "outs": outs, "starts": starts, "dtype": dtype, "gate": gate, "chip": chip}
        return decoded_matmul(x, matrices, index, **options)

    return jax.jit(call)


@pytest.mark.parametrize(
    ("name", "dtype", "chip"),
    [
        *(
            (name, "float32", chip)
            for name in ("blocks", "NF4")
            for chip in CHIPS
            if (name, chip) != ("NF4", "avx512-f16c")
        ),
        *((name, "bfloat16", "avx512") for name in STORED),
    ],
)
def test_equals_float64(name: str, dtype: str, chip: str) -> None:
    panels, ins = stored(name, CHIPS[chip])
    outs = panels.columns + 6  # the last panel has few columns
    matrices = [arrays_of(panels, outs, ins, seed=seed) for seed in (1, 2)]
    x, w = tokens(13, ins, dtype), matrix(panels, matrices[1], outs, ins)
    call = product(panels, CHIPS[chip], outs, "float32")
    together = call(x, matrices, 1)
    assert error(together, exact(x, w)) < TOLERANCES["float32"]
    for begin, count in ((0, 1), (4, 2), (7, 6)):  # few rows are multiplied by what is in registers
        alone = call(x[begin : begin + count], matrices, 1)
        np.testing.assert_array_equal(bits(alone), bits(together)[begin:][:count])


@pytest.mark.parametrize(
    ("dtype", "chip"), [*(("float32", chip) for chip in CHIPS), *(("bfloat16", chip) for chip in (*CHIPS, "amx"))]
)
def test_it_has_the_bits_of_the_packed_matrix(dtype: str, chip: str) -> None:
    """All codes are bfloat16, and are added up in the same order."""
    on = WITH_AMX if chip == "amx" else CHIPS[chip]
    panels, ins = stored("rows", on)
    arrays = arrays_of(panels, 70, ins) | {"scales": panels.packed_groups(np.ones((70, 1), np.float32))}
    packed = Panels.of(on, dtype).packed(matrix(panels, arrays, 70, ins).astype(jnp.dtype(dtype)))
    x = tokens(7, ins, dtype)
    expected = jax.jit(lambda x, w: packed_matmul(x, [w], 0, size=70, dtype="float32", chip=on))(x, packed)
    call = product(panels, on, 70, "float32")
    np.testing.assert_array_equal(bits(call(x, [arrays])), bits(expected))
    np.testing.assert_array_equal(bits(call(x[2:3], [arrays]))[0], bits(expected)[2])


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_code_is_its_number(dtype: str, chip: str) -> None:
    panels, _ = stored("rows", CHIPS[chip])
    codes = np.arange(256, dtype=np.uint8)[:, None] * np.ones((1, 3), np.uint8)
    arrays = panels.packed_codes(codes) | {"scales": panels.packed_groups(np.full((256, 1), 0.5, np.float32))}
    for rows in (1, 5):
        found = product(panels, CHIPS[chip], 256, "float32")(jnp.full((rows, 3), 2 / 4, dtype), [arrays])
        np.testing.assert_array_equal(found, np.tile(E4M3.table * np.float32(3 / 4), (rows, 1)))
    np.testing.assert_array_equal(
        decoded_rows(panels, jax.tree.map(jnp.asarray, arrays), jnp.arange(256), 3), E4M3.table[codes] / 2
    )


@pytest.mark.parametrize("chip", ["avx512", "avx2", "sse"])
@pytest.mark.parametrize("name", TABLES)
def test_every_code_is_its_place_in_a_table(name: str, chip: str) -> None:
    panels, _ = stored(name, CHIPS[chip])
    assert panels.group is not None
    codes = np.arange(16, dtype=np.uint8)[:, None] * np.ones((1, panels.group), np.uint8)
    scales = np.full((16, 1), 0.5, panels.held_scales)
    arrays = panels.packed_codes(codes) | {"scales": panels.packed_groups(scales)}
    table = TABLES[name].table[:16]
    for rows in (1, 5):
        for place in range(8):  # of an input among those whose codes lie together
            x = jnp.zeros((rows, panels.group)).at[:, place].set(2)
            found = product(panels, CHIPS[chip], 16)(x, [arrays])
            np.testing.assert_array_equal(found, np.tile(table, (rows, 1)))
    np.testing.assert_array_equal(
        decoded_rows(panels, jax.tree.map(jnp.asarray, arrays), jnp.arange(16), panels.group), table[codes] / 2
    )


def test_many_rows_are_several_items_of_work() -> None:
    panels, ins = stored("blocks", WIDEST)
    arrays, x = arrays_of(panels, 128, ins), tokens(2 * ROWS + 5, ins)
    call = product(panels, WIDEST, 128)
    result = call(x, [arrays])
    assert error(result, exact(x, matrix(panels, arrays, 128, ins))) < TOLERANCES["float32"]
    np.testing.assert_array_equal(bits(call(x[150:151], [arrays]))[0], bits(result)[150])


@pytest.mark.parametrize("chip", ["avx512", "avx2"])
@pytest.mark.parametrize("gate", GATES)
def test_gated_products(gate: Gate, chip: str) -> None:
    panels, ins = stored("blocks", CHIPS[chip])
    arrays, x = arrays_of(panels, 37, ins, others=(2,)), tokens(7, ins, "bfloat16")
    a, b = (exact(x, half) for half in matrix(panels, arrays, 37, ins))
    call = product(panels, CHIPS[chip], 37, gate=gate)
    together = call(x, [arrays])
    assert together.dtype == "bfloat16"
    assert error(together, GATES[gate](a) * b) < TOLERANCES["bfloat16"]
    np.testing.assert_array_equal(bits(call(x[3:4], [arrays]))[0], bits(together)[3])


@pytest.mark.parametrize("chip", ["avx512", "avx2"])
@pytest.mark.parametrize("gate", [None, "silu"])
def test_experts_multiply_the_rows_of_their_groups(gate: Gate | None, chip: str) -> None:
    panels, ins = stored("MXFP8", CHIPS[chip])
    starts = jnp.array([0, 3, 3, ROWS + 11], jnp.int32)  # the second has none
    stack, x = arrays_of(panels, 40, ins, others=(3, 2)), tokens(ROWS + 12, ins)
    call, w = product(panels, CHIPS[chip], 40, gate=gate), matrix(panels, stack, 40, ins)
    result = np.asarray(call(x, [stack], 0, starts))
    for group, (begin, end) in enumerate(zip(starts, starts[1:], strict=False)):
        if begin == end:
            continue
        a, b = (exact(x[begin:end], half) for half in w[group])
        expected = np.concatenate([a, b], 1) if gate is None else GATES[gate](a) * b
        assert error(result[begin:end], expected) < TOLERANCES["float32"]
    alone = call(x[5:6], [stack], 0, jnp.array([0, 0, 0, 1], jnp.int32))
    np.testing.assert_array_equal(bits(alone)[0], result[5].view(np.int32))


def test_what_is_no_number_stays_in_its_row_and_in_its_column() -> None:
    panels, ins = stored("blocks", WIDEST)
    call, arrays, x = product(panels, WIDEST, 70), arrays_of(panels, 70, ins), tokens(7, ins)
    clean = bits(call(x, [arrays]))
    codes = arrays["codes"].copy()
    codes[0, 3, 50, 1] = 0x7F
    result = call(x.at[2, 80].set(jnp.nan), [arrays | {"codes": codes}])
    sick = np.zeros(clean.shape, np.bool_)
    sick[2], sick[:, 50] = True, True
    np.testing.assert_array_equal(np.isnan(result), sick)
    np.testing.assert_array_equal(bits(result)[~sick], clean[~sick])


def test_other_chips_have_the_instructions_of_theirs() -> None:
    def assembly(triple: str, features: str) -> str:
        chip = CpuChip(name="generic", triple=f"{triple}-unknown-linux-gnu", features=features)
        panels, _ = stored("blocks", chip)
        options = ("bfloat16", "float32", "none", "whole", panels)
        return handler_assembly("handler", lambda e, frame: multiply_by_decoded(e, frame, *options), chip)

    wide = "+avx,+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512vl"
    with_tables = assembly("x86_64", f"{wide},+avx512vbmi,+avx512bf16")
    assert all(f"\t{name}\t" in with_tables for name in ("vpermi2b", "vdpbf16ps"))
    cooper_lake = assembly("x86_64", f"{wide},+avx512bf16")
    assert "\tvcvtph2ps\t" in cooper_lake and "\tvdpbf16ps\t" in cooper_lake and "vpermi2b" not in cooper_lake
    assert "\tbfdot\t" in assembly("aarch64", "+neon,+bf16")


def test_panels_that_do_not_agree_are_refused() -> None:
    panels, ins = stored("blocks", WIDEST)
    arrays = arrays_of(panels, 70, ins)
    for change, message in (
        ({"codes": arrays["codes"][..., :1]}, r"codes must be uint8\[.., panels, 192, 64, 2\]"),
        ({"scales": arrays["scales"].astype(np.float16)}, r"scales must be float32\[.., panels, 3, 64\]"),
    ):
        with pytest.raises(ValueError, match=message):
            decoded_matmul(tokens(2, ins), [arrays | change], 0, panels=panels, outs=70, chip=WIDEST)
    with pytest.raises(AssertionError):
        CodePanels(64, 4, 32, "float32", is_float8=True)
