"""compressed-tensors: FP8, int8, packed integers and NVFP4, with scales for a matrix, rows, groups or blocks."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from jaxvllm.models.declaration import Storage
from jaxvllm.models.forms.few_bits import StoredAs
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.published.encoding import (
    EXPONENTS,
    FP8,
    WORDS,
    Encoding,
    block_scales,
    grid_of,
    usual_blocks,
    with_input_scale,
)
from jaxvllm.models.published.fp8 import block_size
from jaxvllm.models.published.mxfp4 import BLOCK, STORED_MXFP4, STORED_MXFP8, mxfp_part
from jaxvllm.models.published.nvfp4 import BYTES, GROUP, STORED_NVFP4, nvfp4_part
from jaxvllm.models.published.parts import Part, by_group, integers, scaled, stored, turned, unpacked
from jaxvllm.models.safetensors_files import WeightFiles
from pallas_kernels.quantized_matmul.code import E4M3, INT8, UINT4

FORMATS = (
    "float-quantized",
    "naive-quantized",
    "int-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
    "dense",
)
PACKED_BITS = (4, 8)
_BYTES: Mapping[str, np.dtype] = {"I8": np.dtype(np.int8)}


@dataclass(frozen=True)
class CompressedTensors(Encoding):
    """A matrix is one tensor of bytes, or numbers packed in words or bytes, with scales and perhaps zeros beside it.

    The config says in its targets and in `ignore` how each layer is stored. The shapes of the tensors say that as well.

    blocks: the rows and columns that have one scale, besides whole rows and whole matrices
    first: how layers of the first group are stored
    """

    blocks: tuple[tuple[int, int], ...]
    first: StoredAs | None

    @classmethod
    def read(cls, settings: HfConfig) -> Self:
        """Reads a quantization_config. Raises ValueError that names a format which is not known.

        Activations are rounded where it says that each token is, and where a matrix has a scale for them.
        """
        settings.choice("format", "dense", FORMATS)
        for key in ("sparsity_config", "transform_config"):
            value = settings.nested(key).values
            if value and value.get("format") != "dense":
                raise ValueError(f"config {key} = {value!r} is not supported: it changes the model")
        blocks, ways = [], []
        for group in settings.nested("config_groups").values.values():
            weights = _weights(group)
            ways.append(replace(_way(weights), rounds_tokens=_rounds_tokens(group, weights)))
            if (block := block_size(weights, "block_structure")) is not None:
                blocks.append(block)
            if (size := weights.optional_integer("group_size", least=-1)) is not None and size > 0:
                blocks.append((1, size))
        # Files do not tell which group a matrix belongs to, so tokens are rounded for all of them or for none.
        rounds = all(way.rounds_tokens for way in ways if way.is_by_row or way.code == E4M3)
        first = replace(ways[0], rounds_tokens=rounds and ways[0].rounds_tokens) if ways else None
        return cls(tuple(dict.fromkeys(blocks)), first)

    def usual(self, storage: Storage) -> StoredAs | None:
        return self.first

    @property
    def rounds_tokens(self) -> bool:
        return self.first is not None and self.first.rounds_tokens

    @property
    def ends(self) -> Mapping[str, str]:
        others = ("packed", "scale", "zero_point", "shape", "g_idx", "global_scale")
        of_inputs = (".input_scale", ".input_global_scale")
        return {f".weight_{other}": ".weight" for other in others} | dict.fromkeys(of_inputs, ".weight")

    def part(self, files: WeightFiles, name: str, shape: tuple[int, ...]) -> Part | None:
        if len(shape) != 2:
            return None
        header, packed = files.header(name), f"{name}_packed"
        if header is None:
            return self._packed(files, name, shape) if packed in files else None
        if header.dtype not in {**FP8, **_BYTES}:
            return None
        scales, block = block_scales(files, f"{name}_scale", shape, (*self.blocks, *usual_blocks(shape)))
        zeros, zero_point = None, f"{name}_zero_point"
        if zero_point in files:
            zeros = by_group(stored(files.tensor(zero_point, grid_of(shape, block), _BYTES)), block)
        part = scaled(stored(files.tensor(name, shape, {**FP8, **_BYTES})), scales, zeros)
        return with_input_scale(part, files, name)

    def _packed(self, files: WeightFiles, name: str, shape: tuple[int, ...]) -> Part:
        """Returns the values of a matrix in NVFP4 or MXFP4, or of integers u packed in words along a row.

        Lowest bits come first. Integers stand for (u - z) * scale, where z is the middle, or packed along the columns.
        """
        rows, columns = shape
        packed, zero_point, order = f"{name}_packed", f"{name}_zero_point", f"{name}_g_idx"
        header = files.header(packed)
        if header and header.dtype in BYTES:
            scales_header = files.header(f"{name}_scale")
            if scales_header and scales_header.dtype in EXPONENTS:
                numbers = files.tensor(packed, (rows, columns // 2), BYTES)
                return mxfp_part(files, numbers, f"{name}_scale", (rows, columns))
            return nvfp4_part(files, packed, f"{name}_scale", f"{name}_global_scale", (rows, columns), divides=True)
        widths: dict[tuple[int, ...], int] = {(rows, -(-columns * bits // 32)): bits for bits in PACKED_BITS}
        bits = widths.get(header.shape, PACKED_BITS[0]) if header else PACKED_BITS[0]
        words = files.tensor(packed, (rows, -(-columns * bits // 32)), WORDS)
        scales, block = block_scales(files, f"{name}_scale", shape, (*self.blocks, *usual_blocks(shape)))
        if order in files:
            raise ValueError(f"{files.where(order)}: {order} is not supported: take a checkpoint without actorder")
        if zero_point not in files:
            return scaled(unpacked(words, integers(bits, -(2 ** (bits - 1)))), scales)
        grid = grid_of(shape, block)
        zeros = files.tensor(zero_point, (-(-grid[0] * bits // 32), grid[1]), WORDS)
        by_row = by_group(turned(unpacked(zeros.T, integers(bits))), block)
        return scaled(unpacked(words, integers(bits)), scales, by_row)


def _way(weights: HfConfig) -> StoredAs:
    """Returns how matrices with these settings are stored."""
    block = block_size(weights, "block_structure")
    size = weights.optional_integer("group_size", least=-1) if block is None else block[1]
    is_float = weights.values.get("type") == "float"
    if is_float and weights.values.get("num_bits") == 4:
        return STORED_NVFP4 if size == GROUP else STORED_MXFP4
    if is_float and size == BLOCK and weights.values.get("scale_dtype") == "torch.uint8":
        return STORED_MXFP8
    code = E4M3 if is_float else UINT4 if weights.values.get("num_bits") == 4 else INT8
    has_zeros = weights.values.get("symmetric") is False
    return StoredAs(code, size if size is not None and size > 0 else None, "bfloat16", has_zeros)


def _rounds_tokens(group: Mapping[str, Any], weights: HfConfig) -> bool:
    """Returns whether a group of the config says that tokens are rounded as rows of its weights are."""
    tokens = group.get("input_activations")
    if not isinstance(tokens, dict) or tokens.get("dynamic") is not True:
        return False
    if (block := block_size(weights, "block_structure")) is None:
        is_alike = tokens.get("strategy") == "token"
    else:
        is_alike = tokens.get("strategy") == "group" and tokens.get("group_size") == block[1]
    return is_alike and all(tokens.get(key) == weights.values.get(key) for key in ("num_bits", "type"))


def _weights(group: Any) -> HfConfig:
    """Returns what a group of the config says about its weights. Raises ValueError where that is not known."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise ValueError(f"config config_groups must have groups with weights, not {group!r}")
    if "format" in group:
        HfConfig(group).choice("format", "dense", FORMATS)
    settings = HfConfig(weights)
    kind = settings.choice("type", "int", ("int", "float"))
    # Floating-point numbers of four bits have groups of 16 (NVFP4) or 32 (MXFP4).
    known = PACKED_BITS if kind == "int" or weights.get("group_size") in (GROUP, BLOCK) else (8,)
    if settings.integer("num_bits", 8) not in known:
        raise ValueError(f"config num_bits of type {kind} must be {' or '.join(map(str, known))}, not {weights!r}")
    return settings
