"""`StoredCodes`: what a checkpoint stores of one of our matrices, whose parts may be several tensors."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from jaxvllm.models.forms.few_bits import Elements, StoredAs
from jaxvllm.models.published.encoded_files import decoded
from jaxvllm.models.published.parts import Part, ScaledCodes
from jaxvllm.models.tiling import Box, Fill, Tile, tiled
from jaxvllm.models.weight_names import Source
from pallas_kernels.quantized_matmul.code import E4M3


@dataclass(frozen=True, eq=False)
class StoredCodes:
    """A matrix [.., in]. Each of its tensors fills the part of it that the source tells."""

    parts: tuple[tuple[Source, ScaledCodes], ...]

    def stored_as(self, inputs: int) -> StoredAs | None:
        """Returns how all parts of the matrix, which has so many `inputs`, are stored, or None if no such way has all.

        The groups are those of our matrix: each has consecutive elements of a row, of which the last may have fewer.
        """
        return joined([_stored_as(source, codes, inputs) for source, codes in self.parts], inputs)

    @property
    def elements(self) -> Elements:
        """The functions that fill parts of our matrix with what is stored of its elements."""

        def fill(part_of: Callable[[ScaledCodes], Part]) -> Fill:
            return tiled(
                [
                    Tile(Box(source.at, source.view), decoded(part_of(codes), source), (0,) * len(source.at))
                    for source, codes in self.parts
                ]
            )

        return Elements(
            fill(lambda codes: codes.codes.read), fill(lambda codes: codes.scales), fill(_zeros), fill(_factors)
        )


def joined(ways: Iterable[StoredAs | None], inputs: int) -> StoredAs | None:
    """Returns the way in which matrices of so many `inputs` can all be stored, if each is stored in one of `ways`."""
    found = list(ways)
    known = [way for way in found if way is not None]
    if not known or len(known) < len(found) or len({way.code for way in known}) > 1:
        return None
    groups, dtypes = {way.group for way in known}, {way.scale_dtype for way in known}
    group = None if groups == {None} else math.gcd(*(inputs if size is None else size for size in groups))
    return StoredAs(
        known[0].code, group, dtypes.pop() if len(dtypes) == 1 else "float32", any(way.has_zeros for way in known)
    )


def _stored_as(source: Source, codes: ScaledCodes, inputs: int) -> StoredAs | None:
    """Returns how the part of our matrix is stored that `source` tells."""
    if codes.groups is None:
        return None
    code, added = codes.codes.code, codes.codes.added
    has_zeros = codes.zeros is not None or -added != code.zero
    if has_zeros and code.name.startswith("float"):
        return None
    start, steps = source.steps()
    along = [axis for axis, step in enumerate(steps) if step[-1]]
    if len(along) != 1 or steps[along[0]][-1] != 1:
        return None
    [axis] = along
    size = codes.groups[axis]
    is_e4m3 = codes.scales.dtype == E4M3.name
    if size >= source.shape[axis] and source.view[-1] == inputs and not is_e4m3:
        return StoredAs(code, None, codes.scales.dtype, has_zeros)
    moves = [step for step, count in zip(steps[axis][:-1], source.view[:-1], strict=True) if count > 1]
    # After the last tensor of a row, nothing begins within a group.
    is_last = source.at[-1] + source.view[-1] == inputs
    group = math.gcd(size, start[axis], source.at[-1], 0 if is_last else source.view[-1], *moves)
    # A row whose parts are several tensors has no factor of its own.
    dtype = "float32" if is_e4m3 and source.view[-1] < inputs else codes.scales.dtype
    return StoredAs(code, group, dtype, has_zeros)


def _factors(codes: ScaledCodes) -> Part:
    """Returns what all scales of the tensor are multiplied by."""
    return lambda box: np.full(box.shape, codes.scales.factor, np.float32)


def _zeros(codes: ScaledCodes) -> Part:
    """Returns the codes that stand for 0."""
    zeros, added = codes.zeros, np.float32(codes.codes.added)
    if zeros is None:
        return lambda box: np.full(box.shape, -added, np.float32)
    return lambda box: zeros(box) - added
