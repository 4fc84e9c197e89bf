"""The sizes with which `quantized_matmul.gpu` works: what it takes, and how it divides a product."""

from dataclasses import dataclass
from math import gcd, lcm

import jax
from jax.experimental import pallas as pl

from pallas_kernels.backend import KERNEL_DTYPES
from pallas_kernels.chips import GpuChip
from pallas_kernels.grouped_matmul.gpu import ALIGNMENT, SWIZZLES
from pallas_kernels.mosaic_gpu import RESERVED, SWIZZLED_ROWS, TILE, matrix_unit_of
from pallas_kernels.quantized_matmul.code import E4M3, FLOAT4, Code
from pallas_kernels.quantized_matmul.registers import FOLDED_GROUP, WORD_BYTES

# The rows of x of a unit. A matrix unit takes a multiple of eight, and 128 x 64 sums, twice, are half of a thread's
# registers: those of a group beside those of all groups before it. Where a stage has several groups, sums of the next
# group are under way as well, and ptxas spills 36 bytes with 96 rows.
TOKENS, MOST_WITH_GROUPS = (8, 16, 32, 64, 128), 64
HALVES = 2  # warpgroups that compute, at most
# The bytes of a row of codes in a stage: a line of the L2. With many rows of x, whose stages are larger, half of one.
LINE, HALF_LINE, MOST_OF_LINES = 128, 64, 32
MOST_STAGES = 8
LEAST_SWIZZLE = 32  # bytes; one of them must divide a row
# The fewest inputs that are worth a unit of their own, whose sums in float32 XLA adds to those of the others.
LEAST_INPUTS = 1024
# Before Hopper, CTAs of one warpgroup hide each other's waiting. Registers are enough for so many with 168 each.
CTAS_PER_SM, MOST_STAGES_BEFORE_HOPPER = 3, 4


@dataclass(frozen=True)
class QuantizedTiles:
    """A unit of work is `tokens` rows of x, 64 rows of the matrix for each of `halves` warpgroups, and one of `splits`
    parts of the inputs, of which a stage has `line` bytes of codes."""

    tokens: int
    halves: int
    line: int
    stages: int
    splits: int


def takes_group(code: Code, group: int, scale_dtype: str) -> bool:
    """Tells whether so many inputs with one scale can be added up alone, or multiplied by it before, exactly.

    They consist of parts of 32 inputs, or 16 with codes of eight bits: four threads have a row, each of them a word.
    """
    if folds(code, scale_dtype):
        return group == FOLDED_GROUP
    return gcd(group, HALF_LINE * code.per_byte) >= 4 * WORD_BYTES * code.per_byte


def takes_tokens(code: Code, group: int | None) -> bool:
    """Tells whether tokens may be in the code of the matrix, and have a size for each group of inputs, as rows have.

    A stage of the kernel is one group, or some of the inputs of a row that is one group (None).
    """
    return code == E4M3 and group in (LINE, None)


def folds(code: Code, scale_dtype: str) -> bool:
    """Tells whether scales multiply numbers before the matrix unit, because their products have few enough bits."""
    return code == FLOAT4 and scale_dtype == "float8_e4m3fn"


def filled_inputs(code: Code, inputs: int, group: int | None) -> int:
    """Returns how many inputs rows must have, so that the copy engine takes them: whole groups, 64 bytes or more."""
    unit = lcm(LEAST_SWIZZLE * code.per_byte, group or 1)
    return pl.cdiv(max(inputs, HALF_LINE * code.per_byte), unit) * unit


def filled_rows(rows: int, is_alone: bool) -> int:
    """Returns how many rows a matrix must have, or each of several that are multiplied as one.

    The copy engine takes rows by eight: of others (385 for a head of Kimi Linear) Mosaic GPU lowers no copy.
    """
    return pl.cdiv(max(rows, TILE) if is_alone else rows, SWIZZLED_ROWS) * SWIZZLED_ROWS


def choose_tiles(
    x: jax.Array | jax.ShapeDtypeStruct,
    matrix: tuple[int, int],
    code: Code,
    group: int,
    scale_dtype: str,
    num_groups: int,
    chip: GpuChip,
) -> QuantizedTiles | None:
    """Returns the tiles of `quantized_matmul` for matrices [out, in], or None where it does not take dtype or sizes.

    group: how many inputs have one scale, in `scale_dtype`
    num_groups: the groups of rows of x, each of which has a matrix

    They are those of `gpu_before_hopper.quantized_matmul` for chips without a copy engine.

    A matrix must have rows and inputs as `filled_rows` and `filled_inputs` tell. Rows x may be in E4M3 themselves, as
    `takes_tokens` tells.
    """
    out, size = matrix
    num_bytes = size // code.per_byte
    is_taken = out >= TILE and out % SWIZZLED_ROWS == 0 and size == filled_inputs(code, size, group)
    is_of_codes = x.dtype.name == code.name and takes_tokens(code, None if group == size else group)
    if not is_taken or not (is_of_codes or x.dtype.name in KERNEL_DTYPES["gpu"]):
        return None
    if x.dtype.name == "bfloat16" and not chip.computes_bf16:
        return None
    if not takes_group(code, group, scale_dtype):
        return None
    if not chip.has_copy_engine:
        return None if is_of_codes else _before_hopper(x, matrix, code, group, scale_dtype, num_groups, chip)
    # The tile of a group of rows begins up to seven rows before them.
    rows = pl.cdiv(len(x), num_groups) + (ALIGNMENT - 1 if num_groups > 1 else 0)
    is_whole = group % (HALF_LINE * code.per_byte) == 0 or folds(code, scale_dtype)
    # Without wgmma both codes are operands in registers, and ptxas spills 52 bytes with 128 rows of tokens in FP8.
    by_registers = is_of_codes and matrix_unit_of(chip) == "mma"
    most = TOKENS[-1] if is_whole and not by_registers else MOST_WITH_GROUPS
    halves = min(HALVES, out // TILE)
    of_sizes = 4 if is_of_codes and group < size else 0
    wanted = next(tokens for tokens in TOKENS if tokens >= min(rows, most))
    # 99 KiB of shared memory (GeForce RTX 5090) have no room for stages of 128 rows beside their sums.
    for tokens in reversed(TOKENS[: TOKENS.index(wanted) + 1]):
        line = LINE if (tokens <= MOST_OF_LINES or is_of_codes) and num_bytes % LINE == 0 else HALF_LINE
        stage = halves * TILE * line + tokens * (line * code.per_byte * x.dtype.itemsize + of_sizes)
        staging = halves * TILE * tokens * 4
        stages = min((chip.shared_memory_per_block - RESERVED - staging) // stage, MOST_STAGES)
        if stages >= 2:
            break
    # Few units would leave multiprocessors idle, so that several share a row.
    steps = pl.cdiv(num_bytes, line)
    visits = min(len(x), num_groups) * pl.cdiv(rows, tokens)
    fewest = chip.num_sms // (visits * pl.cdiv(out, halves * TILE))
    each = pl.cdiv(steps, max(1, min(fewest, size // LEAST_INPUTS)))
    return QuantizedTiles(tokens, halves, line, stages, pl.cdiv(steps, each)) if stages >= 2 else None


def row_lanes(tokens: int, inputs: int, unit: int) -> int | None:
    """Returns how many inputs of so many rows of x are swizzled together where threads copy them, as many as can be.

    unit: the inputs that are multiplied at once. The four warps share tiles of 8 rows and so many inputs.
    """
    rows = tokens // SWIZZLED_ROWS
    for lanes in SWIZZLES:
        tiles = inputs // lanes
        if unit % lanes == 0 and (rows % 4 == 0 or tiles % 4 == 0 or (rows % 2 == 0 and tiles % 2 == 0)):
            return lanes
    return None


def _before_hopper(
    x: jax.Array | jax.ShapeDtypeStruct,
    matrix: tuple[int, int],
    code: Code,
    group: int,
    scale_dtype: str,
    num_groups: int,
    chip: GpuChip,
) -> QuantizedTiles | None:
    out, size = matrix
    num_bytes = size // code.per_byte
    line = HALF_LINE if num_bytes % HALF_LINE == 0 else LEAST_SWIZZLE
    inputs = line * code.per_byte
    unit = inputs if folds(code, scale_dtype) else gcd(group, inputs)
    rows = pl.cdiv(len(x), num_groups) + (ALIGNMENT - 1 if num_groups > 1 else 0)
    least = min(rows, MOST_WITH_GROUPS)
    tokens = next((t for t in TOKENS if t >= least and row_lanes(t, inputs, unit) is not None), None)
    if tokens is None:
        return None
    stage = TILE * line + tokens * inputs * x.dtype.itemsize
    # Threads that copy through registers wait for a stage at once: only another CTA computes meanwhile.
    least_stages, most_stages = (2, MOST_STAGES_BEFORE_HOPPER) if chip.has_async_copies else (1, 1)
    for ctas in range(CTAS_PER_SM, 0, -1):
        room = min(chip.shared_memory_per_sm // ctas, chip.shared_memory_per_block) - RESERVED
        if (stages := min(room // stage, most_stages)) >= least_stages:
            break
    else:
        return None
    steps, visits = num_bytes // line, min(len(x), num_groups) * pl.cdiv(rows, tokens)
    fewest = ctas * chip.num_sms // (visits * pl.cdiv(out, TILE))
    wanted = max(1, min(fewest, size // LEAST_INPUTS))
    splits = max(parts for parts in range(1, wanted + 1) if steps % parts == 0)
    return QuantizedTiles(tokens, 1, line, stages, splits)
