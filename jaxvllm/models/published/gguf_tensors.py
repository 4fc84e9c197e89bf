"""`GgufTensors`: the tensors of a GGUF file as a Hugging Face checkpoint has them, decoded while they are read."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from jaxvllm.gguf_file import GgufFile, GgufTensor
from jaxvllm.models.published.encoded_files import decoded
from jaxvllm.models.published.gguf_architecture import GgufArchitecture, RebuiltTensor
from jaxvllm.models.published.gguf_architectures import (
    LONG_FACTORS,
    ROPE_FACTORS,
    SHORT_FACTORS,
    architecture_of,
)
from jaxvllm.models.published.gguf_blocks import BlockType
from jaxvllm.models.published.gguf_codes import STORED_TYPES
from jaxvllm.models.published.gguf_names import OUTSIDE
from jaxvllm.models.published.parts import (
    Part,
    ScaledCodes,
    added,
    alternating,
    alternating_codes,
    by_group,
    stored,
    turned,
)
from jaxvllm.models.published.shaped_part import ShapedPart
from jaxvllm.models.tiling import Box, Fill, by_threads
from jaxvllm.models.weight_names import Source

_MOST_EXPERTS = 4096
_NVFP4 = 40  # its number in ggml
# Threads decode pieces of so many numbers. XLA and the system, which makes the memory for them, take most of the time.
_PIECE = 1 << 20


@dataclass(frozen=True)
class _StoredMatrix:
    """The tensors of the file whose rows take turns in a tensor, or one matrix of a tensor, if it is a stack."""

    names: tuple[str, ...]
    number: int | None = None  # in the stack
    is_turned: bool = False  # the file has its matrices the other way round
    rebuilt: RebuiltTensor | None = None  # how it is made of these tensors

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape that each of the tensors has in the file, if all of them make one of that shape."""
        found = (*shape[:-2], shape[-1], shape[-2]) if self.is_turned else shape
        count = len(self.names)
        return found if count == 1 else (found[0], found[1] // count, *found[2:])


@dataclass(frozen=True)
class GgufTensors:
    """The tensors of a file, by the names of a Hugging Face checkpoint."""

    file: GgufFile
    places: Mapping[str, _StoredMatrix]
    numbers: Mapping[str, float]  # tensors of one number, which the metadata have
    heads: Mapping[str, int]  # how many a tensor has whose rows are stored for a rope that turns neighbours
    norm_offset: float
    values: Mapping[str, Any]  # the metadata under the architecture's name
    types: Mapping[int, BlockType]
    mapped: Mapping[Path, np.ndarray]  # u8[bytes of the file]
    factors: Mapping[str, str]  # tensors with the factors of others, in NVFP4, by the names of these in the file

    @classmethod
    def of(cls, file: GgufFile) -> "GgufTensors":
        """Names all tensors. Raises ValueError for an architecture or a type that is not known."""
        name, architecture = architecture_of(file)
        start = f"{name}."
        values = {key.removeprefix(start): value for key, value in file.metadata.items() if key.startswith(start)}
        places = _rebuilt(file, architecture)
        others = {stored_name for place in places.values() for stored_name in place.names}
        others |= {ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS}
        factors = _factors(file, architecture)
        # Tokens are not rounded to NVFP4 here, for which some tensors have a scale.
        others |= {*factors.values(), *(f"{name.removesuffix('.weight')}.input_scale" for name in factors)}
        for stored_name, tensor in file.tensors.items():
            if stored_name not in others:
                own = _hf_name(stored_name, architecture)
                is_stack = len(tensor.shape) > 2 or "*" in own
                count = _stack_size(stored_name, tensor, architecture.stack_size(values)) if is_stack else 0
                if "*" in own:
                    for number in range(count):
                        places[own.replace("*", str(number))] = _StoredMatrix((stored_name,), number)
                else:
                    before = places[own].names if own in places else ()
                    names = _in_turn(file, (*before, stored_name), architecture.tensors)
                    places[own] = _StoredMatrix(names, is_turned=own.endswith(architecture.turned))
        heads = {}
        if architecture.has_turned_heads:
            queries = _num_heads(file, f"{name}.attention.head_count", None)
            keys = _num_heads(file, f"{name}.attention.head_count_kv", queries)
            heads = {"self_attn.q_proj": queries, "self_attn.k_proj": keys}
        types: dict[int, BlockType] = {}
        for stored_name, tensor in file.tensors.items():
            if tensor.kind not in types:
                types[tensor.kind] = BlockType.of(tensor.kind, f"{tensor.path}: tensor {stored_name}")
        paths = {tensor.path for tensor in file.tensors.values()}
        mapped = {path: np.memmap(path, np.uint8, "r").view(np.ndarray) for path in paths}
        numbers = _numbers(file, architecture)
        return cls(file, places, numbers, heads, architecture.norm_offset, values, types, mapped, factors)

    @property
    def names(self) -> set[str]:
        return {*self.places, *self.numbers}

    def where(self, name: str) -> str:
        """Returns the file of a tensor, and its name there."""
        if name in self.numbers:
            return f"{self.file.path}: metadata of {name}"
        return self._where(self.places[name].names[0])

    def _where(self, stored_name: str) -> str:
        return f"{self.file.tensors[stored_name].path}: tensor {stored_name}"

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor that is there."""
        if name in self.numbers:
            return (1,)
        return self.file.tensors[self.places[name].names[0]].shape

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises ValueError if the tensor is missing, or another one. Nothing of it is read."""
        if name in self.numbers:
            assert math.prod(shape) == 1, "families have such tensors as numbers"
        else:
            self._part(name, shape)

    def fill(self, source: Source) -> Fill:
        """Returns the function that fills a part of our array. Raises ValueError as `check` does."""
        self.check(source.name, source.shape)
        if (number := self.numbers.get(source.name)) is not None:
            return lambda out, _: out.fill(number)

        def fill(out: np.ndarray, start: tuple[int, ...]) -> None:
            whole = decoded(self._part(source.name, source.shape, out.dtype), source)
            by_threads(whole, _PIECE)(out, start)

        return fill

    def codes(self, source: Source) -> ScaledCodes | None:
        """Returns what is stored of the tensor of `source`, if that is codes and scales. Raises as `check` does.

        Each matrix of a stack of experts is such a tensor, or the whole stack. Rows of several tensors may take turns.
        Tensors that are made of others are decoded.
        """
        self.check(source.name, source.shape)
        place = self.places[source.name]
        if place.rebuilt is not None:
            return None
        found = [self._stored_codes(one, place.number, place.stored_shape(source.shape)) for one in place.names]
        known = [codes for codes in found if codes is not None]
        if len(known) < len(found):
            return None
        if (codes := known[0] if len(known) == 1 else alternating_codes(known, axis=1)) is None:
            return None
        codes = codes.turned if place.is_turned else codes
        if (heads := self._turned_heads(source.name)) is None:
            return codes
        return codes.with_rows(_halves(source.shape[0], heads))

    def _stored_codes(self, stored_name: str, number: int | None, shape: tuple[int, ...]) -> ScaledCodes | None:
        """Returns what a tensor of the file, or a matrix of it, has in matrices of that shape, if that is codes."""
        tensor = self.file.tensors[stored_name]
        kind, found = STORED_TYPES.get(tensor.kind), tensor.shape if number is None else tensor.shape[1:]
        if kind is None or found != shape or len(found) not in (2, 3):
            return None
        factors = self._factors_of(stored_name, number)
        if (factors != factors[0]).any():
            return None
        rows = *found[:-1], found[-1] // kind.count * kind.size
        start = tensor.offset + (number or 0) * math.prod(rows)
        return kind.part(self.mapped[tensor.path][start : start + math.prod(rows)].reshape(rows), float(factors[0]))

    def _factors_of(self, stored_name: str, number: int | None) -> np.ndarray:
        """Returns by what a tensor is multiplied, or a matrix of it, or each matrix of a stack: f32[1 or matrices].

        Raises ValueError if there are not as many numbers, or if one is not above 0 and finite.
        """
        if (name := self.factors.get(stored_name)) is None:
            return np.ones(1, np.float32)
        tensor, where = self.file.tensors[name], self._where(name)
        shape = self.file.tensors[stored_name].shape
        if tensor.shape not in ((1,), shape[:-2]):
            raise ValueError(f"{where} has shape {tensor.shape}, and should have a factor for {stored_name}, {shape}")
        found = values_of(tensor, where, self.types[tensor.kind], self.mapped[tensor.path])(Box.whole(tensor.shape))
        if not (np.isfinite(found) & (found > 0)).all():
            raise ValueError(f"{where} has factors {found[:4]}, which must be positive numbers")
        return found if number is None or len(found) == 1 else found[number : number + 1]

    def _values(self, stored_name: str, tensor: GgufTensor, number: int | None, dtype: DTypeLike) -> Part:
        """Returns the values of a tensor of the file, whose shape `tensor` tells, or of one matrix of a stack."""
        where, kind, mapped = self._where(stored_name), self.types[tensor.kind], self.mapped[tensor.path]
        if stored_name not in self.factors:
            return values_of(tensor, where, kind, mapped, number, dtype)
        [factor] = self._factors_of(stored_name, number)
        part = values_of(tensor, where, kind, mapped, number)
        return lambda box: (part(box) * factor).astype(dtype)

    def _turned_heads(self, name: str) -> int | None:
        """Returns how many heads a tensor has whose rows are stored for a rope that turns neighbours."""
        module = name.rpartition(".")[0]
        return next((heads for end, heads in self.heads.items() if module.endswith(end)), None)

    def _part(self, name: str, shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> Part:
        """Returns the values of a tensor, rounded to `dtype`, or in float32 where something is computed with them."""
        if name not in self.places:
            raise ValueError(f"{self.file.path} lacks the tensor {name}, which should have shape {shape}")
        place = self.places[name]
        if place.rebuilt is not None:
            try:
                made = place.rebuilt.make([self._whole(one, dtype) for one in place.names], self.values)
            except (ValueError, IndexError) as error:
                raise ValueError(f"{self.where(name)} makes no {name}: {error}") from error
            if (fitting := made.reshaped(shape)) is None:
                raise ValueError(
                    f"{self.where(name)} makes {name} of shape {made.shape}, and the metadata make it {shape}"
                )
            return fitting.part
        expected, count = place.stored_shape(shape), len(place.names)
        module, _, kind = name.rpartition(".")
        is_moved = self.norm_offset and module.endswith("norm") and kind == "weight"
        is_moved = is_moved and not module.endswith("linear_attn.norm")
        dtype = np.float32 if is_moved else dtype
        parts = [self._stored_part(one, place.number, expected, dtype) for one in place.names]
        part = parts[0] if count == 1 else alternating(parts, axis=1)
        part = turned(part) if place.is_turned else part
        if is_moved:
            return added(part, by_group(stored(np.full((1,), -self.norm_offset, np.float32)), shape))
        if (heads := self._turned_heads(name)) is None:
            return part
        if shape[0] % (2 * heads):
            raise ValueError(f"{self.where(name)} has {shape[0]} rows, which are no {heads} heads of an even size")
        return by_group(part, (_halves(shape[0], heads), *(1 for _ in shape[1:])))

    def _stored_part(self, stored_name: str, number: int | None, shape: tuple[int, ...], dtype: DTypeLike) -> Part:
        """Returns the values of a tensor of the file, or of a matrix of it, which must have that shape."""
        tensor, where = self.file.tensors[stored_name], self._where(stored_name)
        found = tensor.shape if number is None else tensor.shape[1:]
        if found != shape:
            # Axes of one element are in some files and not in others.
            same = ShapedPart(self._values(stored_name, tensor, number, dtype), found).reshaped(shape)
            if same is None or len(found) > 2:
                raise ValueError(f"{where} has shape {found}, and the metadata make it {shape}")
            return same.part
        if number is not None:
            return self._values(stored_name, tensor, number, dtype)
        return self._whole(stored_name, dtype).part

    def _whole(self, stored_name: str, dtype: DTypeLike) -> ShapedPart:
        """Returns the values of a tensor of the file. Vectors are in float32, because more is computed with them."""
        tensor, where = self.file.tensors[stored_name], self._where(stored_name)
        if len(tensor.shape) > 3 or tensor.shape[1:-1] == (1,):  # convolutions, and heads, with axes of one element
            shape = (*(size for size in tensor.shape[:-1] if size != 1), tensor.shape[-1])
            tensor = replace(tensor, shape=shape)
        if len(tensor.shape) < 3:
            exact = np.float32 if len(tensor.shape) == 1 else dtype
            return ShapedPart(self._values(stored_name, tensor, None, exact), tensor.shape)
        if len(tensor.shape) > 3 or tensor.shape[0] > _MOST_EXPERTS:
            raise ValueError(f"{where} has shape {tensor.shape}: stacks have {_MOST_EXPERTS} matrices at most")
        self._values(stored_name, tensor, 0, dtype)  # which checks the whole tensor

        # Matrices are looked at when they are read: of the two stacks of 128 in a layer of DeepSeek V3, 256 arrays are
        # made, and looking at all of them for each array took 0.3 s of CPU.
        def values(box: Box) -> np.ndarray:
            (first, *start), (_, *rest) = box.start, box.shape
            own = Box(tuple(start), tuple(rest))
            matrices = (self._values(stored_name, tensor, number, dtype) for number in range(first, box.stop[0]))
            return np.stack([matrix(own) for matrix in matrices])

        return ShapedPart(values, tensor.shape)


def values_of(
    tensor: GgufTensor,
    where: str,
    kind: BlockType,
    mapped: np.ndarray,
    number: int | None = None,
    dtype: DTypeLike = np.float32,
) -> Part:
    """Returns the values of a tensor in a mapped file, or of one matrix of a stack, in `dtype`. They are read later.

    Raises ValueError that begins with `where` if the tensor's rows are no blocks, or it goes beyond the file's end.
    """
    *rest, columns = tensor.shape
    if columns % kind.count:
        raise ValueError(f"{where} has rows of {columns} numbers, and its type has blocks of {kind.count}")
    row_bytes = columns // kind.count * kind.size
    size, left = math.prod(rest) * row_bytes, len(mapped) - tensor.offset
    if not 0 < size <= left:
        raise ValueError(f"{where} has {size} bytes, of which {max(left, 0)} are there: download it again")
    shape = rest if number is None else rest[1:]
    start = tensor.offset + (number or 0) * math.prod(shape) * row_bytes
    data = mapped[start : start + math.prod(shape) * row_bytes].reshape(-1, row_bytes)

    def values(box: Box) -> np.ndarray:
        (row, first), (rows, wanted) = box.start, box.shape
        begin, end = first // kind.count, -(-(first + wanted) // kind.count)
        found = kind.decode(np.ascontiguousarray(data[row : row + rows, begin * kind.size : end * kind.size]), dtype)
        skipped = first - begin * kind.count
        return np.ascontiguousarray(found[:, skipped : skipped + wanted])

    return values if shape else lambda box: values(Box((0, *box.start), (1, *box.shape)))[0]


def _halves(rows: int, num_heads: int) -> np.ndarray:
    """Returns the stored row of each row of a matrix whose heads are stored with their halves in turns."""
    numbers = np.arange(rows).reshape(num_heads, -1, 2)  # the stored rows: of each pair, one is of either half
    return numbers.swapaxes(1, 2).reshape(-1)


def _num_heads(file: GgufFile, key: str, default: int | None) -> int:
    """Returns the number of heads of layers that attend. A list has a number for each layer, which may be 0."""
    found = file.metadata.get(key, default)
    count = max(found, default=0) if isinstance(found, list) else found
    if type(count) is not int or count < 1:
        raise ValueError(f"{file.path} must have a number {key} above 0, or one for each layer, not {found!r}")
    return count


def _hf_name(name: str, architecture: GgufArchitecture) -> str:
    """Returns the name in a Hugging Face checkpoint, or the same name if the architecture has no such tensor."""
    body, _, kind = name.rpartition(".")
    outside, tensors = {**OUTSIDE, **architecture.outside}, architecture.tensors
    if body in outside:
        return f"{outside[body]}.{kind}"
    start, _, rest = body.partition(".")
    number, _, own = rest.partition(".")
    if start == "blk" and number.isdecimal():
        if (whole := tensors.get(f"{own}.{kind}")) is not None:
            return f"{architecture.prefix}layers.{number}.{whole}"
        if own in tensors:
            return f"{architecture.prefix}layers.{number}.{tensors[own]}.{kind}"
    return name


def _rebuilt(file: GgufFile, architecture: GgufArchitecture) -> dict[str, _StoredMatrix]:
    """Returns the tensors of layers that are made of others, where the file has all of these."""
    layers = dict.fromkeys(name.split(".")[1] for name in file.tensors if name.startswith("blk."))
    found: dict[str, _StoredMatrix] = {}
    for number in layers:
        for end, tensor in architecture.rebuilt.items():
            names = tuple(f"blk.{number}.{own}" for own in tensor.names)
            if all(name in file.tensors for name in names):
                found[f"{architecture.prefix}layers.{number}.{end}"] = _StoredMatrix(names, rebuilt=tensor)
    return found


def _factors(file: GgufFile, architecture: GgufArchitecture) -> dict[str, str]:
    """Returns the tensors that have the factors of those in NVFP4, by the names of these.

    A stack has one for each of its matrices. Gemma 4 has scales of its experts by the same name.
    """
    found: dict[str, str] = {}
    for name, tensor in file.tensors.items():
        factor = f"{name.removesuffix('.weight')}.scale"
        if tensor.kind == _NVFP4 and factor in file.tensors and factor.split(".", 2)[-1] not in architecture.tensors:
            found[name] = factor
    return found


def _numbers(file: GgufFile, architecture: GgufArchitecture) -> dict[str, float]:
    """Returns the tensors of one number that the metadata have for each layer. Raises ValueError for other lists."""
    found: dict[str, float] = {}
    count = file.metadata.get(f"{file.metadata['general.architecture']}.block_count")
    for end, key in architecture.numbers.items():
        values = file.metadata.get(key)
        if not isinstance(values, list) or len(values) != count or any(type(value) is not float for value in values):
            raise ValueError(f"{file.path} must have a list {key} of {count} numbers, one for each layer")
        found |= {f"{architecture.prefix}layers.{layer}.{end}": value for layer, value in enumerate(values)}
    return found


def _in_turn(file: GgufFile, names: tuple[str, ...], tensors: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the names of the tensors that one of a checkpoint has, in the order in which their rows take turns."""
    kinds = {name.split(".", 2)[-1]: name for name in names}
    if len(names) > 1 and not kinds.keys() <= tensors.keys():
        raise ValueError(f"{file.path} has the same tensor several times, as {' and '.join(names)}: convert it again")
    return tuple(kinds[kind] for kind in tensors if kind in kinds) if len(names) > 1 else names


def _stack_size(name: str, tensor: GgufTensor, count: Any) -> int:
    """Returns how many matrices a stack has, which the metadata say too: a file may state any shape."""
    if len(tensor.shape) != 3 or tensor.shape[0] != count or tensor.shape[0] > _MOST_EXPERTS:
        raise ValueError(f"{tensor.path}: tensor {name} has shape {tensor.shape}, and should have {count} matrices")
    return tensor.shape[0]
