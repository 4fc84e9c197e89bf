"""The sizes of the kernels of the delta rule, by which a chip has room for them, and what both share."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.chips import TpuChip
from pallas_kernels.linear_attention.visits import TILE

LANES, SUBLANES = 128, 8
SIZE = LANES  # of a key and of a value
VMEM_SHARE = 0.5  # of a core's VMEM: the rest is for what XLA keeps there


class DeltaTokens(NamedTuple):
    """The tokens of a step before the convolution, and what takes them in.

    taps  # f32[K, W, C]: of the convolution, whose results go through SiLU
    channels  # [T, K, C]: of a query, a key and r values of 128 each
    g  # f32[T, K, r, G]: the logarithm of what a token leaves of a matrix (G is 1), or of each of its rows (128)
    beta  # f32[T, K, r]: how much of an error it corrects
    """

    taps: jax.Array
    channels: jax.Array
    g: jax.Array
    beta: jax.Array


@dataclass(frozen=True)
class DeltaBlocks:
    """The key heads that a step of each kernel's grid takes."""

    single: int
    chunk: int


def choose_blocks(
    num_heads: int, page_rows: int, values_per_key: int, sizes: tuple[int, int], conv_size: int, chip: TpuChip
) -> DeltaBlocks | None:
    """Returns the blocks for key heads with so many matrices of `sizes`, or None where the kernels do not take these.

    The page of a head has `page_rows` rows, and a convolution sees `conv_size` tokens.
    """
    # The window before a tile's tokens is one register high.
    if sizes != (SIZE, SIZE) or conv_size > SUBLANES + 1:
        return None
    # A state is in two buffers to be read and in two to be written, and where it is kept between visits of a row.
    state = 5 * page_rows * SIZE * 4
    # Channels and what is read for them, in two buffers each.
    tokens = 2 * 2 * TILE * (2 + values_per_key) * SIZE * 4
    room = int(chip.vmem_bytes * VMEM_SHARE)
    # Heads are rows of registers for a single token, so a block has all of them or a multiple of 8.
    whole = [size for size in range(1, num_heads + 1) if num_heads % size == 0]
    single = [size for size in whole if size <= min(room // state, 16) and (size == num_heads or size % SUBLANES == 0)]
    chunk = [size for size in whole if size <= min(room // (state + tokens), 2)]
    if not single or not chunk:
        return None

    def largest(fitting: list[int]) -> int:
        """Returns the largest size with a block for each core, where there is one."""
        return max(fitting, key=lambda size: (num_heads // size % chip.num_cores == 0, size))

    return DeltaBlocks(largest(single), largest(chunk))


def compiler_params(chip: TpuChip) -> pltpu.CompilerParams:
    # Cores share the heads. Visits of a row follow each other.
    return pltpu.CompilerParams(
        dimension_semantics=("parallel" if chip.num_cores > 1 else "arbitrary", "arbitrary"),
        vmem_limit_bytes=int(chip.vmem_bytes * VMEM_SHARE),
    )


def interpreter(chip: TpuChip, interpret: bool) -> Any:
    return pltpu.InterpretParams(detect_races=True, num_cores_or_threads=chip.num_cores) if interpret else False
