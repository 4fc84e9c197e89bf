"""Instructions that add up products: as emitted for this CPU, as emulated, and as the manuals say, in NumPy."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from pallas_kernels.chips import CpuChip
from pallas_kernels.cpu.amx import Factors, TileShape, tile_registers
from pallas_kernels.cpu.bytes import dot_bytes, has_table_of_128, looked_up_of_128
from pallas_kernels.cpu.dots import DOTS, Dot, dot_for
from pallas_kernels.cpu.emit import Emitter
from pallas_kernels.cpu.frame import Frame
from pallas_kernels.cpu.handlers import Handler
from pallas_kernels.cpu.host import host_chip, permitted
from pallas_kernels.cpu.machine_code import compile_handler, handler_assembly
from pallas_kernels.integer_matmul.code_panels import CodePanels
from pallas_kernels.integer_matmul.kernel import matmul
from pallas_kernels.packed_matmul import Panels, packed_matmul
from pallas_kernels.packed_matmul.kernel import packed_matmul as packed
from tests.pallas_kernels.cpu_chips import AMX_CHIPS, CPU_CHIPS, SAPPHIRE_RAPIDS, WITH_AMX
from tests.pallas_kernels.dot_models import MODELS, tile_product

INSTRUCTIONS: dict[Factors, str] = {
    "bfloat16": "tdpbf16ps",
    "int8 int8": "tdpbssd",
    "int8 uint8": "tdpbsud",
    "uint8 int8": "tdpbusd",
    "uint8 uint8": "tdpbuud",
}
AVX2, AVX512 = "+avx,+avx2,+fma", "+avx,+avx2,+fma,+avx512f,+avx512bw,+avx512vl"
X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"


def words(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> NDArray[np.int32]:
    """Factors of that dtype, or sums in float32: of all sizes where they are floating, with zeros and denormals."""
    if "bfloat16" in dtype:
        some = rng.standard_normal((*shape, 2)) * 2.0 ** rng.integers(-80, 30, (*shape, 2))
        return np.asarray(jnp.asarray(some, jnp.bfloat16)).view(np.int32)[..., 0]
    if dtype == "float32":
        some = rng.standard_normal(shape) * 2.0 ** rng.integers(-140, 30, shape)
        return some.astype(np.float32).view(np.int32)
    return rng.integers(-(2**31), 2**31, shape).astype(np.int32)


def dots(e: Emitter, frame: Frame, number: str) -> None:
    a, b, c = (frame.argument(n) for n in range(3))
    with e.loop(0, c.size(0), e.lanes) as i:
        first, second = (e.load(x.data + i * 4) for x in (a, b))
        total = e.load(c.data + i * 4)
        total = total if DOTS[int(number)].a == "bfloat16" else e.bits(total)
        result = DOTS[int(number)](first, second, total)
        e.store(frame.result(0).data + i * 4, result)


def emulating(dot: Dot) -> CpuChip:
    return replace(CPU_CHIPS[dot.lanes[-1]], emulated=(dot.feature,))


@pytest.mark.parametrize("dot", DOTS, ids=lambda dot: f"{dot.name}-{dot.feature}")
def test_an_instruction_is_what_its_manual_says(dot: Dot) -> None:
    """The model, the emulation, and the instruction itself where this CPU has it."""
    rng = np.random.default_rng(0)
    a, b = (words(rng, (4096,), dtype) for dtype in (dot.a, dot.b))
    c = words(rng, (4096,), "float32" if dot.a == "bfloat16" else "int32")
    expected = MODELS[dot.name](a, b, c)
    here = CPU_CHIPS[dot.lanes[-1]]
    for chip in (emulating(dot), *([here] if here.has(dot.feature) else [])):
        handler = Handler(dots, (str(DOTS.index(dot)),), chip)
        result = jax.jit(partial(handler, jax.ShapeDtypeStruct((4096,), jnp.int32)))(a, b, c)
        np.testing.assert_array_equal(np.asarray(result), expected)


def test_a_chip_has_the_instruction_of_its_features() -> None:
    found = {
        features: [getattr(dot_for(x86(features), a, b), "name", None) for a, b in TAKEN]
        for features in (AVX2, f"{AVX2},+avxvnni", f"{AVX2},+avxvnniint8", AVX512, f"{AVX512},+avx512vnni,+avx512bf16")
    }
    assert found == {
        AVX2: [None, "vpmaddubsw", None],
        f"{AVX2},+avxvnni": [None, "vpdpbusd", None],
        f"{AVX2},+avxvnniint8": [None, "vpmaddubsw", "vpdpbssd"],
        AVX512: [None, "vpmaddubsw", None],
        f"{AVX512},+avx512vnni,+avx512bf16": ["vdpbf16ps", "vpdpbusd", None],
    }
    arm = [CpuChip(name="generic", triple=ARM, features=f"+neon{more}") for more in ("", ",+dotprod,+i8mm,+bf16")]
    assert [dot_for(arm[0], a, b) for a, b in TAKEN] == [None] * 3
    names = [dot.name for a, b in TAKEN if (dot := dot_for(arm[1], a, b))]
    assert names == ["bfdot", "usdot", "sdot"]
    assert dot_for(x86(AVX2), "uint8", "int8", most=128) is None, "sums of two products are cut off"


def dots_of_codes(e: Emitter, frame: Frame, most: str) -> None:
    a, b, c = (frame.argument(n).data for n in range(3))
    with e.loop(0, frame.argument(2).size(0), e.lanes) as i:
        codes, numbers, total = (e.load_words(x + i * 4) for x in (a, b, c))
        e.store(frame.result(0).data + i * 4, dot_bytes(total, codes, numbers, int(most)))


@pytest.mark.parametrize("most", [63, 255])
def test_codes_times_numbers_are_exact_on_every_chip(most: int) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, most + 1, (256, 4), np.uint8).view(np.int32)[:, 0]
    numbers = rng.integers(-127, 128, (256, 4), np.int8).view(np.int32)[:, 0]
    sums = words(rng, (256,), "int32")
    for chip in (
        *CPU_CHIPS.values(),
        CPU_CHIPS[16].without("avx512vnni"),
        replace(CPU_CHIPS[8], emulated=("avxvnni",)),
        replace(CPU_CHIPS[4], emulated=("dotprod",)),
        replace(CPU_CHIPS[4], emulated=("i8mm",)),
    ):
        handler = Handler(dots_of_codes, (str(most),), chip)
        result = jax.jit(partial(handler, jax.ShapeDtypeStruct((256,), jnp.int32)))(codes, numbers, sums)
        np.testing.assert_array_equal(np.asarray(result), MODELS["vpdpbusd"](codes, numbers, sums))


def bytes_of_table(e: Emitter, frame: Frame) -> None:
    with e.loop(0, frame.argument(0).size(0), e.lanes) as i:
        found = looked_up_of_128(TABLE, e.load_words(frame.argument(0).data + i * 4))
        e.store(frame.result(0).data + i * 4, e.of_bits(found))


def test_a_table_of_128_bytes_is_what_the_manual_says() -> None:
    places = words(np.random.default_rng(0), (256,), "uint8")
    expected = np.asarray(TABLE, np.uint8)[places.view(np.uint8) & 127].view(np.int32)
    here = CPU_CHIPS[16]
    for chip in (
        *([here] if has_table_of_128(here) else []),
        replace(here.without("avx512vbmi"), emulated=("avx512vbmi",)),
    ):
        handler = Handler(bytes_of_table, (), chip)
        result = jax.jit(partial(handler, jax.ShapeDtypeStruct((256,), jnp.int32)))(places)
        np.testing.assert_array_equal(np.asarray(result), expected)
    assert not has_table_of_128(here.without("avx512vbmi")) and not has_table_of_128(CPU_CHIPS[8])


TABLE = np.random.default_rng(1).integers(0, 256, 128).tolist()
TAKEN = (("bfloat16", "bfloat16"), ("uint8", "int8"), ("int8", "int8"))


def x86(features: str) -> CpuChip:
    return CpuChip(name="generic", triple=X86, features=features)


@pytest.mark.parametrize("dot", DOTS, ids=lambda dot: f"{dot.name}-{dot.feature}")
def test_an_instruction_is_emitted_for_cpus_that_are_not_here(dot: Dot) -> None:
    if dot.feature in ("bf16", "dotprod", "i8mm"):
        chip = CpuChip(name="generic", triple=ARM, features=f"+neon,+{dot.feature}")
    else:
        chip = CpuChip(name="x86-64", triple=X86, features=f"{AVX512 if 16 in dot.lanes else AVX2},+{dot.feature}")
    assembly = handler_assembly("handler", lambda e, f: dots(e, f, str(DOTS.index(dot))), chip)
    assert f"\t{dot.name}\t" in assembly


def test_products_use_the_instructions_of_arm() -> None:
    chip = CpuChip(name="neoverse-v1", triple=ARM, features="+neon,+bf16,+dotprod,+i8mm")
    panels = CodePanels(chip.panel_columns, 8, None, "float32", zero=128, by_row=True)
    of_pairs = handler_assembly("handler", lambda e, f: packed(e, f, "bfloat16", "float32", "none"), chip)
    of_bytes = handler_assembly("handler", lambda e, f: matmul(e, f, "float32", panels), chip)
    assert "\tbfdot\t" in of_pairs and "\tusdot\t" in of_bytes

    here = replace(CPU_CHIPS[4], emulated=("bf16",))
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal((rows, 85)).astype(jnp.bfloat16) for rows in (7, 20))
    call = jax.jit(lambda x, w: packed_matmul(x, [w], 0, size=20, dtype="float32", chip=here))
    result = np.asarray(call(x, Panels.of(here, x.dtype).packed(w)))
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    assert np.abs(result - exact).max() < 2e-6 * np.abs(exact).max()


def products(e: Emitter, frame: Frame, factors: str, rows: str, inner: str, columns: str) -> None:
    """c [rows, columns] + a [rows, inner] b [inner, columns], of words, and after that once more, from zeros."""
    M, K, N = int(rows), int(inner), int(columns)
    a, b, c = (frame.argument(n).data for n in range(3))
    y = frame.result(0).data
    with tile_registers(e, [TileShape(M, 4 * N), TileShape(M, 4 * K), TileShape(K, 4 * N)]) as tiles:
        tiles.load(0, c, 4 * N)
        tiles.load(1, a, 4 * K)
        tiles.load(2, b, 4 * N)
        tiles.add_products(factors, 0, 1, 2)  # type: ignore[arg-type]
        tiles.store(0, y, 4 * N)
        tiles.zero(0)
        tiles.add_products(factors, 0, 1, 2)  # type: ignore[arg-type]
        tiles.store(0, y + M * N * 4, 4 * N)


@pytest.mark.parametrize("factors", INSTRUCTIONS)
def test_products_of_tiles_are_what_the_manual_says(factors: Factors) -> None:
    rng = np.random.default_rng(0)
    dtypes = factors.split() if " " in factors else [factors] * 2
    for M, K, N in ((16, 16, 16), (1, 16, 16), (5, 3, 7)):
        a, b = (words(rng, shape, dtype) for shape, dtype in zip(((M, K), (K, N)), dtypes, strict=True))
        c = words(rng, (M, N), "float32" if factors == "bfloat16" else "int32")
        for chip in AMX_CHIPS:
            handler = Handler(products, (factors, str(M), str(K), str(N)), chip)
            result = np.asarray(jax.jit(partial(handler, jax.ShapeDtypeStruct((2, M, N), jnp.int32)))(a, b, c))
            np.testing.assert_array_equal(result[0], tile_product(factors, a, b, c))
            np.testing.assert_array_equal(result[1], tile_product(factors, a, b, c * 0))


@pytest.mark.parametrize("factors", INSTRUCTIONS)
def test_tiles_are_compiled_to_the_instructions_of_amx(factors: Factors) -> None:
    def emit(e: Emitter, frame: Frame) -> None:
        products(e, frame, factors, "16", "16", "16")

    emitted = [line.split()[0] for line in handler_assembly("handler", emit, SAPPHIRE_RAPIDS).splitlines() if line]
    assert [one for one in emitted if one.startswith(("tile", "tdp", "ldtile"))] == [
        "ldtilecfg", "tileloadd", "tileloadd", "tileloadd", INSTRUCTIONS[factors], "tilestored",
        "tilezero", INSTRUCTIONS[factors], "tilestored", "tilerelease",
    ]  # fmt: skip
    assert compile_handler("handler", emit, SAPPHIRE_RAPIDS)[:4] == b"\x7fELF"


def test_tiles_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="1 to 16 rows of up to 64 bytes, in words of 4: not 17 of 64"):
        TileShape(rows=17)
    for shapes, message in (
        ([TileShape()] * 9, "there are 8 tile registers, not 9"),
        ([TileShape(), TileShape(rows=2), TileShape()], "the tiles of a product do not fit"),
        ([TileShape(), TileShape(row_bytes=32), TileShape()], "the tiles of a product do not fit"),
    ):

        def emit(e: Emitter, frame: Frame, shapes: list[TileShape] = shapes) -> None:
            with tile_registers(e, shapes) as tiles:
                tiles.add_products("bfloat16", 0, 1, 2)

        with pytest.raises(ValueError, match=message):
            compile_handler("handler", emit, WITH_AMX)


def test_without_permission_there_are_no_tiles(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pallas_kernels.cpu.host._request_tiles", lambda: "")
    assert permitted(SAPPHIRE_RAPIDS) == SAPPHIRE_RAPIDS
    assert SAPPHIRE_RAPIDS.has_bf16_tiles and SAPPHIRE_RAPIDS.has_byte_tiles
    monkeypatch.setattr("pallas_kernels.cpu.host._request_tiles", lambda: "Operation not supported")
    refused = permitted(SAPPHIRE_RAPIDS)
    assert refused.features == SAPPHIRE_RAPIDS.features.replace("+amx", "-amx")
    assert not refused.has_bf16_tiles and not refused.has_byte_tiles and refused.has_bf16_dot
    assert [record.getMessage() for record in caplog.records] == [
        "kernels use vectors and no AMX: Linux refuses this process the tile registers (Operation not supported)"
    ]
    # A program that was stored with one's handlers does not bring them in the place of the other's.
    assert len({Handler(dots, ("0",), chip).target for chip in (SAPPHIRE_RAPIDS, refused)}) == 2


@pytest.mark.skipif(host_chip().has("amx-tile"), reason="this CPU has AMX")
def test_this_system_says_why_it_refuses_tiles(caplog: pytest.LogCaptureFixture) -> None:
    assert not permitted(SAPPHIRE_RAPIDS).has("amx-tile")
    assert "(" in caplog.text
