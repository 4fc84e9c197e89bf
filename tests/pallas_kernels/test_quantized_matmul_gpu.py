"""The product with matrices of few bits for GPUs, interpreted, against float64; and what registers hold."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.chips import CHIPS, GpuChip
from pallas_kernels.mosaic_gpu import MatrixUnit
from pallas_kernels.quantized_matmul import gpu, gpu_before_hopper
from pallas_kernels.quantized_matmul.cases import CASES, SERVING, QuantizedCase
from pallas_kernels.quantized_matmul.code import E4M3, E5M2, FLOAT4, INT8, UINT4, Code
from pallas_kernels.quantized_matmul.gpu_before_hopper import WarpgroupUnit
from pallas_kernels.quantized_matmul.gpu_product import QuantizedProduct
from pallas_kernels.quantized_matmul.gpu_tiles import QuantizedTiles, choose_tiles, row_lanes
from pallas_kernels.quantized_matmul.registers import ROWS, WORDS, Registers, RowPanels, twice
from tests.pallas_kernels.gpu_here import INTERPRETED
from tests.pallas_kernels.test_quantized_matmul import Stored, rows

# An idle multiprocessor costs the interpreter as much as a busy one.
GPUS = {name: replace(chip, num_sms=2) for name, chip in CHIPS.items() if isinstance(chip, GpuChip)}
BY_NAME = {case.name: case for case in CASES}
NVFP4 = replace(BY_NAME["nvfp4"], scale_dtype="float8_e4m3fn", size_in=192, size_out=72)
POWERS = replace(BY_NAME["fp8-blocks"], scale_dtype="float8_e8m0fnu", size_in=256, size_out=72)
FIRST = 1  # the matrices follow that of another layer, whose scales are NaN
SUMS = 2e-6  # of the size of the largest sum: sums in float32 of elements that nobody has rounded


@pytest.fixture(autouse=True)
def no_races(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    printed = "".join(capfd.readouterr())
    assert "RACE DETECTED" not in printed, printed


@dataclass(frozen=True)
class Way:
    """How a case is computed. With two stages, all are used again and again."""

    case: QuantizedCase
    tiles: QuantizedTiles
    chip: str = "h200"
    dtype: str = "bfloat16"
    counts: tuple[int, ...] = ()  # the rows of each group; none: all rows have one matrix

    def __str__(self) -> str:
        return "-".join(map(str, (self.case, self.dtype, self.chip, len(self.counts))))


# Every way to decode and both matrix units; parts of the inputs, several tiles of rows, groups that begin anywhere,
# rows and inputs that end within a tile, and groups that are larger than a stage, smaller, and neither.
WAYS = (
    Way(BY_NAME["fp8-blocks"], QuantizedTiles(16, 2, 64, 2, 2)),
    Way(BY_NAME["int4-zeros"], QuantizedTiles(8, 1, 64, 2, 1), "b200", "float16"),
    Way(replace(BY_NAME["int8-zeros"], size_in=160), QuantizedTiles(16, 2, 64, 2, 1)),
    Way(replace(BY_NAME["mxfp4"], size_in=192, num_rows=70), QuantizedTiles(64, 1, 64, 2, 1), "b200"),
    Way(replace(BY_NAME["int4"], size_in=384, group=96), QuantizedTiles(8, 1, 64, 2, 2)),
    Way(NVFP4, QuantizedTiles(8, 2, 64, 2, 1), "b200", "float16", counts=(1, 0, 3)),
    Way(BY_NAME["int4-groups-of-32"], QuantizedTiles(8, 2, 64, 2, 1), dtype="float16", counts=(3, 0, 12)),
    # Tokens in FP8, too, with a size for each group: of three, the second part of the inputs has one.
    Way(BY_NAME["fp8-blocks"], QuantizedTiles(16, 2, 128, 2, 2), dtype="float8_e4m3fn"),
    Way(POWERS, QuantizedTiles(8, 1, 128, 2, 1), "b200", "float8_e4m3fn", counts=(3, 0, 9)),
    # Before Hopper: parts of the inputs, blocks of rows that overlap, groups without rows, and fewer stages than there
    # is room for. Turing's copies go through registers.
    Way(BY_NAME["fp8-blocks"], QuantizedTiles(16, 1, 64, 2, 2), "l4"),
    Way(replace(BY_NAME["int8-zeros"], size_in=96), QuantizedTiles(16, 1, 32, 2, 1), "a100"),
    Way(BY_NAME["int4-groups-of-32"], QuantizedTiles(8, 1, 64, 1, 1), "t4", "float16", counts=(3, 0, 12)),
    Way(NVFP4, QuantizedTiles(8, 1, 32, 2, 1), "rtx3090"),
)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_equals_float64(way: Way) -> None:
    case, chip = way.case, GPUS[way.chip]
    counts = way.counts or (case.num_rows,)
    stored, x, sizes = Stored.random(case, FIRST + len(counts)), rows(case, way.dtype), None
    exact = np.asarray(x, np.float64)
    if way.dtype == case.code.name:
        sizes = np.random.default_rng(5).uniform(0.5, 2, (case.num_groups, len(x))).astype(np.float32)
        exact *= np.repeat(sizes.T, case.group, axis=1)
    matrices = stored.matrices[FIRST:]
    scales = jnp.asarray(stored.scales)
    if case.scale_dtype.startswith("float8"):
        scales = jax.lax.bitcast_convert_type(scales, jnp.uint8)
    else:
        scales = scales.at[:FIRST].set(jnp.nan)
    assert (
        choose_tiles(x, (case.size_out, case.size_in), case.code, case.group, case.scale_dtype, len(counts), chip)
        is not None
    )
    multiply = partial(
        gpu.quantized_matmul,
        code=case.code,
        scale_dtype=case.scale_dtype,
        dtype=jnp.dtype(jnp.float32),
        tiles=way.tiles,
        chip=chip,
        interpret=INTERPRETED,
    )
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    zeros = None if stored.zeros is None else jnp.asarray(stored.zeros)
    own_starts = jnp.asarray(starts) if way.counts else None
    of_rows = None if stored.row_scales is None else jnp.asarray(stored.row_scales)
    operands = x, jnp.asarray(stored.codes), scales, zeros, own_starts, jnp.int32(FIRST), of_rows, sizes
    result = jax.jit(multiply)(*operands)
    assert (result.shape, result.dtype) == ((len(x), case.size_out), jnp.float32)
    for group, matrix in enumerate(matrices):
        own = slice(starts[group], starts[group + 1])
        error = np.abs(np.asarray(result[own], np.float64) - exact[own] @ matrix.T)
        assert (error <= SUMS * (np.abs(exact[own]) @ np.abs(matrix.T))).all(), error.max()


def product_of(code: Code, dtype: str) -> QuantizedProduct:
    tiles = QuantizedTiles(8, 1, 64, 2, 1)
    return QuantizedProduct(
        tiles=tiles, code=code, scale_dtype="float32", has_zeros=False, has_row_scales=False, dtype=jnp.dtype(dtype),
        size=512, group=128, num_columns=64, panels=RowPanels(), matrix_unit="wgmma", interpret=True,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("code", [INT8, UINT4, E4M3, E5M2, FLOAT4], ids=lambda code: code.name)
def test_every_code_is_decoded_exactly(code: Code, dtype: str) -> None:
    codes = np.stack([np.roll(np.arange(256), 3 * row) for row in range(64)]).astype(np.uint8)
    if code.per_byte == 1:
        codes = np.where(np.isfinite(code.table[codes]), codes, 0)
    registers = Registers(code, jnp.dtype(dtype), "wgmma", interpret=True)
    # Other numbers stand for 0 in the second half of the rows, where integers have zeros.
    zeros = np.where(np.arange(64) < 32, code.zero, 11).astype(code.dtype) if code in (INT8, UINT4) else None
    numbers = code.table[np.stack([codes & 15, codes >> 4], -1).reshape(64, -1) if code.per_byte == 2 else codes]
    words = jnp.asarray(np.ascontiguousarray(codes).view(np.uint32))
    for minus in (None,) if zeros is None else (None, zeros):
        expected = numbers - (code.zero if minus is None else minus.astype(np.float32)[:, None])
        masks = [twice(mask) for mask in registers.masks]
        decoded = registers.decoded(words, None if minus is None else jnp.asarray(minus), masks)
        reordered = product_of(code, dtype).reordered(jnp.asarray(expected))
        np.testing.assert_array_equal(np.asarray(decoded, np.float32), reordered)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_scale_multiplies_every_code_exactly(dtype: str) -> None:
    """All codes of E2M1 in groups of 16, each row with two of E4M3's scales."""
    registers = Registers(FLOAT4, jnp.dtype(dtype), "wgmma", interpret=True)
    codes = np.arange(256).astype(np.uint8).reshape(16, 16)[:, [0, 1, 2, 3, 4, 5, 6, 7] * 4]
    codes = np.tile(codes, (4, 1))
    numbers = FLOAT4.table[np.stack([codes & 15, codes >> 4], -1).reshape(64, 64)]
    steps = (np.arange(256) % 127).reshape(64, 4).astype(np.uint8)
    words = [jnp.asarray(array.view(np.uint32)) for array in (np.ascontiguousarray(codes), steps)]
    decoded = registers.decoded(words[0], None, [twice(mask) for mask in registers.masks], [words[1][:, 0]])
    expected = numbers * np.repeat(E4M3.table[steps], 16, -1) * 2.0**-8
    np.testing.assert_array_equal(np.asarray(decoded, np.float32), product_of(FLOAT4, dtype).reordered(expected))


@pytest.mark.parametrize(
    ("code", "byte", "dtype", "expected"),
    [
        (E4M3, 0x7F, "bfloat16", 480),
        (E4M3, 0x7F, "float16", 480),
        (E5M2, 0x7C, "bfloat16", 2**16),
        (E5M2, 0xFC, "float16", -np.inf),
    ],
)
def test_codes_that_are_no_finite_numbers(code: Code, byte: int, dtype: str, expected: float) -> None:
    registers = Registers(code, jnp.dtype(dtype), "wgmma", interpret=True)
    words = jnp.full((64, 8), byte * 0x01010101, jnp.uint32)
    decoded = registers.decoded(words, None, [twice(mask) for mask in registers.masks])
    np.testing.assert_array_equal(np.asarray(decoded, np.float32), np.full((64, 32), expected, np.float32))


def held(layout: Any, shape: tuple[int, ...]) -> np.ndarray:
    """The elements of an array that threads hold, by their numbers: [warps, lanes, registers, elements of one]."""
    layout = layout.to_mgpu()
    array = np.arange(math.prod(shape)).reshape(shape)
    for tile in layout.tiling.tiles:
        lead, dims = array.shape[: -len(tile)], array.shape[-len(tile) :]
        parts = [part for dim, size in zip(dims, tile, strict=True) for part in (dim // size, size)]
        first, n = len(lead), len(tile)
        order = [*range(first), *(first + 2 * i for i in range(n)), *(first + 2 * i + 1 for i in range(n))]
        array = array.reshape(*lead, *parts).transpose(order)
    threads = [[dim for dim in dims if isinstance(dim, int)] for dims in (layout.warp_dims, layout.lane_dims)]
    taken = [dim % array.ndim for dim in (*threads[0], *threads[1])]
    vector = layout.vector_dim % array.ndim
    rest = [dim for dim in range(array.ndim) if dim not in (*taken, vector)]
    warps, lanes = (math.prod(array.shape[dim] for dim in dims) for dims in threads)
    return array.transpose(*taken, *rest, vector).reshape(warps, lanes, -1, array.shape[vector])


@pytest.mark.parametrize("unit", ["wgmma", "mma"])
@pytest.mark.parametrize("code", [INT8, UINT4], ids=lambda code: code.name)
def test_registers_hold_what_the_matrix_unit_wants(code: Code, unit: MatrixUnit) -> None:
    """The interpreter has no registers, so what the kernel says of them is compared with the layouts of Mosaic GPU."""
    registers = Registers(code, jnp.dtype(jnp.bfloat16), unit, interpret=False)
    pairs, size = registers.pairs, 64 * code.per_byte
    num_bytes, words = held(plgpu.Layout.WGMMA_8BIT, (64, 64)), held(WORDS, (64, 16))
    np.testing.assert_array_equal(num_bytes[..., 0], 4 * words[..., 0])  # a register of bytes is a word
    # A register of `_paired` has two codes of a word. Those of all pairs come first, then those of both halves of rows.
    by_half = words.reshape(4, 32, -1, 1, 2)
    pair = np.arange(pairs)[:, None]
    codes = np.stack([2 * pairs * by_half + pair, 2 * pairs * by_half + pair + pairs], -1).reshape(4, 32, -1, 2)
    product = product_of(code, "bfloat16")
    wanted = np.asarray(product.reordered(jnp.arange(64 * size).reshape(64, size))).reshape(-1)
    operand = held(registers.operand, (64, size))
    np.testing.assert_array_equal(codes, wanted[operand])
    # Scales of 16 codes that follow each other, as `_times` holds them: those of two threads, for a block of words.
    blocks = np.arange(size // (8 * pairs))[:, None, None]
    of_thread = 2 * blocks + (np.arange(32) % 4 // 2)[:, None, None, None]
    groups = np.broadcast_to(of_thread, (4, 32, len(blocks), pairs, 2)).reshape(4, 32, -1)
    np.testing.assert_array_equal(codes % size // (4 * pairs), np.stack([groups, groups], -1))
    # Values of rows, as `row_values` loads them and `_spread` repeats them.
    of_rows = held(ROWS, (64,))  # the four lanes of a row have the same
    warp, lane, half = np.arange(4)[:, None, None], np.arange(0, 32, 4)[:, None], np.arange(2)
    np.testing.assert_array_equal(of_rows[..., 0], 16 * warp + lane // 4 + 8 * half)
    spread = np.repeat(np.tile(of_rows[..., 0], (1, 1, size // 8)), 4, axis=1)
    np.testing.assert_array_equal(operand // size, np.stack([spread, spread], -1))


def tiles_of(case: QuantizedCase, chip: GpuChip, dtype: str = "bfloat16") -> QuantizedTiles | None:
    x = jax.ShapeDtypeStruct((case.num_rows, case.size_in), dtype)
    return choose_tiles(x, (case.size_out, case.size_in), case.code, case.group, case.scale_dtype, 1, chip)


@pytest.mark.parametrize("name", ["h100", "h200", "b200"])
def test_tiles_of_models(name: str) -> None:
    chip = CHIPS[name]
    assert isinstance(chip, GpuChip)
    for case in SERVING:
        tiles = tiles_of(case, chip, case.code.name if case.rounds_tokens else "bfloat16")
        assert tiles is not None and tiles.stages >= 4 and tiles.tokens >= min(case.num_rows, 64)
        # Half of the multiprocessors at least are busy, as far as units have a thousand inputs.
        units = -(-case.num_rows // tiles.tokens) * -(-case.size_out // 128) * tiles.splits
        assert units >= chip.num_sms // 2 or case.size_in < 2048 * tiles.splits, (case, tiles)


@pytest.mark.parametrize("name", ["t4", "a100", "l4"])
def test_tiles_before_hopper(name: str) -> None:
    chip = CHIPS[name]
    assert isinstance(chip, GpuChip)
    for case in SERVING:
        tiles = tiles_of(case, chip, "float16")
        assert tiles is not None and tiles.tokens >= min(case.num_rows, 64), case
        inputs, rest = divmod(case.size_in // case.code.per_byte, tiles.line * tiles.splits)
        assert inputs and not rest, "copies beyond the end of a row"
        of_stage = 64 * tiles.line + tiles.tokens * tiles.line * case.code.per_byte * 2
        # Turing's threads wait for what they copy, so another CTA must have room beside this one.
        assert tiles.stages >= 2 if chip.has_async_copies else tiles.stages == 1
        room = chip.shared_memory_per_block if chip.has_async_copies else chip.shared_memory_per_sm // 2
        assert tiles.stages * of_stage < room
        assert tiles_of(case, chip, "float8_e4m3fn") is None
        assert (tiles_of(case, chip) is None) == (name == "t4")  # which multiplies no bfloat16


def test_tiles_of_99_kibibytes() -> None:
    chip = CHIPS["pro6000"]
    assert isinstance(chip, GpuChip)
    for case in SERVING:
        tiles = tiles_of(case, chip, case.code.name if case.rounds_tokens else "bfloat16")
        assert tiles is not None and tiles.stages >= 2 and tiles.tokens >= min(case.num_rows, 64), case


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_threads_wait_for_the_copies_of_their_stage_and_no_others(
    stages: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter knows no groups of `cp.async`, so threads are simulated: what they copy, and wait for."""
    copied: list[tuple[int, int]] = []  # the first of the inputs of each copy, and the slot
    computed: list[int] = []
    done, split, line, size = 0, 1, 64, 128

    class Where:
        """A reference that remembers how it was indexed."""

        def __init__(self, *index: Any) -> None:
            self.index, self.at = index, self

        def __getitem__(self, index: Any) -> "Where":
            return Where(*(index if isinstance(index, tuple) else (index,)))

    def copy(source: Where, into: Where, oob_mode: Any) -> None:
        copied.append((int(source.index[-1].start), int(into.index[0])))

    def wait(count: int) -> None:
        nonlocal done
        done = len(copied) - count

    def plus(total: int, matrices: Where, rows: Where, own: Any, masks: Any) -> int:
        first, slot = split * steps + total, int(matrices.index[0])
        assert done == 2 * (total + 1) and int(rows.index[0]) == slot
        newest = [start for start, into in copied if into == slot][-2:]  # nothing else has been copied over them
        assert newest == [first * line, first * size]
        computed.append(first)
        return total + 1

    def loop(begin: int, end: int, body: Any, carry: Any) -> Any:
        for step in range(begin, end):
            carry = body(jnp.int32(step), carry)
        return carry

    monkeypatch.setattr(gpu_before_hopper.plgpu, "copy_gmem_to_smem", copy)
    monkeypatch.setattr(gpu_before_hopper.plgpu, "wait_gmem_to_smem", wait)
    monkeypatch.setattr(gpu_before_hopper.pl, "when", lambda condition: lambda function: function() if condition else 0)
    monkeypatch.setattr(gpu_before_hopper.lax, "fori_loop", loop)
    product: Any = SimpleNamespace(
        tiles=QuantizedTiles(8, 1, line, stages, 2), steps=steps, inputs=size, plus=plus, nothing=lambda: 0,
        of_stage=lambda *_: ((), ()), of_rows=lambda total, *_: total,
    )  # fmt: skip
    unit: Any = SimpleNamespace(split=split, matrix=0, column=0, tile=0)
    factors: Any = SimpleNamespace(masks=())
    memory: Any = {"matrices": Where(), "rows": Where()}
    WarpgroupUnit(product, "cp.async").compute(unit, Where(), Where(), factors, memory)
    assert computed == list(range(steps, 2 * steps))
    assert len(copied) == done == 2 * steps


def test_four_warps_share_the_copy_of_rows() -> None:
    assert [row_lanes(tokens, 128, 128) for tokens in (8, 16, 32)] == [32, 64, 64]
    assert [row_lanes(tokens, 64, 32) for tokens in (8, 16, 64)] == [16, 32, 32]
    assert row_lanes(8, 32, 32) is None  # two tiles of eight rows and sixteen inputs


def test_registers_of_turing_are_halves_of_later_ones() -> None:
    """PTX's mma.m16n8k8: in lane 4 g + t, A has columns 2 t and 2 t + 1 of rows g and g + 8, and B such rows of column
    g. Those of m16n8k16 are that for the first eight columns of A and rows of B, and then for the others."""
    lane, pair = np.arange(32)[:, None], np.arange(2)
    group, thread = lane // 4, lane % 4
    a = held(plgpu.Layout.MMA_LHS(jnp.float16), (64, 16))[0]
    b = held(plgpu.Layout.MMA_RHS(jnp.float16), (16, 8))[0]
    for half in range(2):
        inputs = 8 * half + 2 * thread + pair
        for below in range(2):
            np.testing.assert_array_equal(a[:, 2 * half + below], (group + 8 * below) * 16 + inputs)
        np.testing.assert_array_equal(b[:, half], inputs * 8 + group)


def test_what_the_hardware_does_not_take_is_refused() -> None:
    taken = {case.name for case in CASES if tiles_of(case, GPUS["h200"]) is not None}
    assert taken == {"int4", "int4-groups-of-32", "int4-zeros", "int8-groups", "fp8-blocks"}
    assert tiles_of(BY_NAME["int4"], GPUS["h200"], "float32") is None
    assert tiles_of(replace(BY_NAME["int4-zeros"], size_out=100), GPUS["h200"]) is None  # no multiple of eight rows
    assert tiles_of(replace(NVFP4, scale_dtype="float32"), GPUS["h200"]) is None  # products would be rounded
