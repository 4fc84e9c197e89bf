"""The sizes of the kernels for states, by which a chip has room for them."""

from dataclasses import dataclass

from pallas_kernels.chips import TpuChip
from pallas_kernels.linear_attention.tpu.tokens import LANES, ScanShape
from pallas_kernels.linear_attention.visits import TILE

SUBLANES = 8
SIZE = LANES  # of a key and of a value of the delta rule
VMEM_SHARE = 0.5  # of a core's VMEM: the rest is for what XLA keeps there


@dataclass(frozen=True)
class StateBlocks:
    """The key heads, or the groups of heads, that a step of each kernel's grid takes."""

    single: int
    chunk: int


def delta_blocks(
    num_heads: int, page_rows: int, values_per_key: int, sizes: tuple[int, int], conv_size: int, chip: TpuChip
) -> StateBlocks | None:
    """Returns the blocks for key heads with so many matrices of `sizes`, or None where the kernels do not take these.

    The page of a head has `page_rows` rows, and a convolution sees `conv_size` tokens.
    """
    # The window before a tile's tokens is one register high.
    if sizes != (SIZE, SIZE) or conv_size > SUBLANES + 1:
        return None
    single, chunk = _fitting(num_heads, page_rows, (2 + values_per_key) * SIZE, chip)
    # Heads are rows of registers for a single token, so a block has all of them or a multiple of 8.
    single = [size for size in single if size <= 16 and (size == num_heads or size % SUBLANES == 0)]
    return _largest(num_heads, single, [size for size in chunk if size <= 2], chip)


def scan_blocks(num_groups: int, page_rows: int, shape: ScanShape, conv_size: int, chip: TpuChip) -> StateBlocks | None:
    """Returns the blocks for groups of heads of Mamba-2, or None where the kernels do not take these.

    The page of a group has `page_rows` rows, and a convolution sees `conv_size` tokens.
    """
    in_registers = shape.values % LANES == 0 and shape.state_size % LANES == 0 and shape.head_size % SUBLANES == 0
    if not in_registers or conv_size > SUBLANES + 1:
        return None
    single, chunk = _fitting(num_groups, page_rows, shape.channels, chip)
    # Each 128 values are a part of the kernel's text.
    single = [size for size in single if size * shape.parts <= 64]
    return _largest(num_groups, single, [size for size in chunk if size <= 2], chip)


def channel_blocks(
    num_heads: int, page_rows: int, num_channels: int, conv_size: int, chip: TpuChip
) -> StateBlocks | None:
    """Returns the blocks for heads whose channels know nothing of each other, or None where kernels do not take them.

    Such are short convolutions, which see `conv_size` tokens, and the recurrence of the first Mamba, which has 1. The
    page of a head has `page_rows` rows.
    """
    if num_channels % LANES or conv_size > SUBLANES + 1:
        return None
    # There are twice as many numbers of a token as channels, and as many are read.
    single, chunk = _fitting(num_heads, page_rows, 2 * num_channels, chip)
    return _largest(num_heads, single, chunk, chip)


def _fitting(num_heads: int, page_rows: int, num_channels: int, chip: TpuChip) -> tuple[list[int], list[int]]:
    """Returns the blocks that divide the heads and fit into VMEM, for single tokens and for tiles."""
    # A state is in two buffers to be read and in two to be written, and where it is kept between visits of a row.
    state = 5 * page_rows * LANES * 4
    # Channels and what is read for them, in two buffers each.
    tokens = 2 * 2 * TILE * num_channels * 4
    room = int(chip.vmem_bytes * VMEM_SHARE)
    whole = [size for size in range(1, num_heads + 1) if num_heads % size == 0]
    return [size for size in whole if size * state <= room], [size for size in whole if size * (state + tokens) <= room]


def _largest(num_heads: int, single: list[int], chunk: list[int], chip: TpuChip) -> StateBlocks | None:
    """Returns the largest blocks with one for each core, where there are such."""
    if not single or not chunk:
        return None

    def largest(fitting: list[int]) -> int:
        return max(fitting, key=lambda size: (num_heads // size % chip.num_cores == 0, size))

    return StateBlocks(largest(single), largest(chunk))
