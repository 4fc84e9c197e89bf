"""`Encoding`: how a checkpoint stores its matrices in few bits, and the scales that encodings have in common."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

import ml_dtypes
import numpy as np

from jaxvllm.models.declaration import Storage
from jaxvllm.models.forms.few_bits import StoredAs
from jaxvllm.models.published.parts import Part, ScaledCodes, by_group, stored
from jaxvllm.models.safetensors_files import DTYPES, WeightFiles
from pallas_kernels.quantized_matmul.code import E4M3

FP8: Mapping[str, np.dtype] = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
# Byte e stands for 2 ** (e - 127). Some files call such bytes integers.
EXPONENTS: Mapping[str, np.dtype] = dict.fromkeys(("F8_E8M0", "U8"), np.dtype(ml_dtypes.float8_e8m0fnu))
SCALES: Mapping[str, np.dtype] = {**DTYPES, **EXPONENTS}
WORDS: Mapping[str, np.dtype] = {"I32": np.dtype(np.int32)}


class Encoding(ABC):
    """A way to store matrices in few bits. The files tell which ones: the others are stored as usual."""

    @property
    @abstractmethod
    def ends(self) -> Mapping[str, str]:
        """The ends of the names of stored tensors, and those of the matrices that these are parts of."""

    def usual(self, storage: Storage) -> StoredAs | None:
        """Returns how the matrices of layers are stored, of which `storage` may be experts, as far as the config tells.

        Layers of which the config says that they are stored otherwise are not considered. Plans count with it.
        """
        return None

    @property
    def has_tables(self) -> bool:
        """Whether embeddings and LM heads are usually stored as matrices of layers are."""
        return False

    @property
    def rounds_tokens(self) -> bool:
        """Whether the checkpoint is made for tokens that are rounded as rows of the matrices are: each as a whole, or
        each group of its inputs, to the same code."""
        return False

    @abstractmethod
    def part(self, files: WeightFiles, name: str, shape: tuple[int, ...]) -> Part | None:
        """Returns the values of a matrix, or None if it is not stored in this encoding. They are read later.

        Raises ValueError that names the file and the tensor which is missing, or of another shape or dtype.
        """


def block_scales(
    files: WeightFiles, name: str, shape: tuple[int, ...], blocks: Sequence[tuple[int, ...]]
) -> tuple[Part, tuple[int, ...]]:
    """Returns the scale of each element of a matrix of this `shape`, and the block of elements that have one scale.

    The tensor `name` has the scales of all blocks, of the first of the sizes in `blocks` that its shape fits.
    """
    grids = [grid_of(shape, block) for block in blocks]
    header = files.header(name)
    if header is None:
        raise ValueError(f"{files.directory} lacks the tensor {name}, which should have shape {grids[0]}")
    for block, grid in zip(blocks, grids, strict=True):
        # One scale may have any number of axes.
        if _long_axes(header.shape) == _long_axes(grid):
            scales = files.tensor(name, header.shape, SCALES).reshape(grid)
            return by_group(stored(scales), block), block
    raise ValueError(
        f"{files.where(name)}: tensor {name} has shape {header.shape}: a matrix of shape {shape} has scales of shape "
        f"{' or '.join(map(str, grids))} under the quantization_config"
    )


def with_input_scale(part: Part, files: WeightFiles, name: str) -> Part:
    """Returns the part of the matrix `name`, with the scale of its tokens if it is in FP8 and a tensor has just one.

    Raises ValueError where that is not a positive number.
    """
    scale = f"{name.removesuffix('.weight')}.input_scale"
    header = files.header(scale)
    if not isinstance(part, ScaledCodes) or part.codes.code != E4M3 or header is None or math.prod(header.shape) != 1:
        return part
    value = np.float32(files.tensor(scale, header.shape, DTYPES).reshape(-1)[0])
    if not 0 < value < np.inf:
        raise ValueError(f"{files.where(scale)}: tensor {scale} must be a positive number, not {value}")
    return replace(part, input_scale=value)


def grid_of(shape: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, ...]:
    """Returns how many blocks a matrix has along each axis. The last ones may be smaller."""
    return tuple(-(-size // step) for size, step in zip(shape, block, strict=True))


def _long_axes(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def usual_blocks(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Returns the blocks of one scale for each matrix, for each row of it, or for all matrices of a stack."""
    *stack, _, columns = shape
    ones = (1,) * len(stack)
    return list(dict.fromkeys([(*ones, *shape[-2:]), (*ones, 1, columns), shape]))
