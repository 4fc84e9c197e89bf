"""MLX: integers of 2 to 8 bits with a scale and a bias for each group of inputs, MXFP4, MXFP8 and NVFP4."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from jaxvllm.models.declaration import Storage
from jaxvllm.models.forms.few_bits import StoredAs
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.published.encoding import FP8, Encoding
from jaxvllm.models.published.mxfp4 import STORED_MXFP4, STORED_MXFP8, fp4_pairs, mxfp_part
from jaxvllm.models.published.nvfp4 import BYTES, GROUP, STORED_NVFP4
from jaxvllm.models.published.parts import (
    Codes,
    Part,
    ScaledCodes,
    added,
    bit_fields,
    by_group,
    integers,
    scaled,
    stored,
    unpacked,
)
from jaxvllm.models.safetensors_files import DTYPES, WeightFiles
from pallas_kernels.quantized_matmul.code import UINT4, UINT5, UINT6, UINT8, Code

GROUPS = (32, 64, 128)
# The bits, the groups, and how matrices are stored, of the modes other than affine.
FLOATS: Mapping[str, tuple[int, int, StoredAs]] = {
    "mxfp4": (4, 32, STORED_MXFP4),
    "mxfp8": (8, 32, STORED_MXFP8),
    "nvfp4": (4, 16, STORED_NVFP4),
}
# Integers of two and three bits are held in four, because no form has fewer.
_CODES: Mapping[int, Code] = {2: UINT4, 3: UINT4, 4: UINT4, 5: UINT5, 6: UINT6, 8: UINT8}
BITS = tuple(_CODES)
_WORDS: Mapping[str, np.dtype] = {"U32": np.dtype(np.uint32)}
_NUMBERS: Mapping[int, np.dtype] = {4: np.dtype(np.uint8), 8: FP8["F8_E4M3"]}  # how words of so many bits are read
_OF_NVFP4: Mapping[str, np.dtype] = {"U8": FP8["F8_E4M3"]}


@dataclass(frozen=True)
class Mlx(Encoding):
    """A matrix [out, in] is q * s + b, of q u32[out, in * bits / 32], the lowest bits first, and s and b [out, groups].

    The embedding and the LM head may be such matrices. Layers may have other bits and groups than the config states
    for most: the shapes of the tensors say them as well. In modes other than affine q has floating-point numbers, s has
    bytes, and there is no b. The layout is that of mlx-lm (`utils.py`) and of `mlx.core.quantize`.

    first: how most matrices are stored
    """

    first: StoredAs

    @classmethod
    def read(cls, settings: HfConfig) -> Self:
        """Reads the `quantization` of a config. Raises ValueError for bits, groups or a mode that are not known."""
        for layer in (settings.values, *(value for value in settings.values.values() if isinstance(value, dict))):
            of_layer = HfConfig(layer)
            mode = of_layer.choice("mode", "affine", ("affine", *FLOATS))
            bits, group, _ = FLOATS.get(mode, (4, 64, None))
            for key, default, known in (
                ("bits", bits, (bits,) if mode in FLOATS else BITS),
                ("group_size", group, (group,) if mode in FLOATS else GROUPS),
            ):
                if of_layer.integer(key, default) not in known:
                    allowed = ", ".join(map(str, known))
                    raise ValueError(f"config {key} of MLX must be one of {allowed} in mode {mode}, not {layer[key]}")
        if (found := FLOATS.get(str(settings.values.get("mode")))) is not None:
            return cls(found[2])
        code, group = _CODES[settings.integer("bits", 4)], settings.integer("group_size", 64)
        # Numbers of groups have the model's dtype, which is bfloat16 or float16 in nearly all checkpoints.
        return cls(StoredAs(code, group, "bfloat16", has_mins=True))

    def usual(self, storage: Storage) -> StoredAs | None:
        return self.first

    @property
    def has_tables(self) -> bool:
        return True

    @property
    def ends(self) -> Mapping[str, str]:
        return {".scales": ".weight", ".biases": ".weight"}

    def part(self, files: WeightFiles, name: str, shape: tuple[int, ...]) -> Part | None:
        header = files.header(name)
        if header is None or header.dtype not in _WORDS or len(shape) != 2:
            return None
        rows, columns = shape
        widths = [bits for bits in BITS if columns * bits % 32 == 0]
        found: dict[tuple[int, ...], int] = {(rows, columns * bits // 32): bits for bits in widths}
        if (bits := found.get(header.shape)) is None:
            shapes = " or ".join(map(str, found))
            raise ValueError(
                f"{files.where(name)}: tensor {name} has shape {header.shape}: a matrix of shape {shape} has {shapes}"
            )
        words = files.tensor(name, header.shape, _WORDS)
        base = name.removesuffix(".weight")
        scales = files.header(f"{base}.scales")
        if scales is not None and scales.dtype in BYTES:
            if bits not in _NUMBERS:
                where = f"{files.where(name)}: tensor {name}"
                raise ValueError(f"{where} has integers of {bits} bits, and scales of floating-point numbers of 4 or 8")
            numbers = words.view(_NUMBERS[bits])
            if bits == 4 and scales.shape == (rows, columns // GROUP):
                if columns % GROUP:
                    where = f"{files.where(name)}: {base}.scales"
                    raise ValueError(f"{where} has groups of {GROUP}, and the config {columns} inputs")
                found_scales = files.tensor(f"{base}.scales", scales.shape, _OF_NVFP4)
                return scaled(unpacked(numbers, fp4_pairs()), by_group(stored(found_scales), (1, GROUP)))
            return mxfp_part(files, numbers, f"{base}.scales", (rows, columns))
        grids: dict[tuple[int, ...], int] = {
            (rows, columns // group): group for group in GROUPS if columns % group == 0
        }
        group = grids.get(scales.shape, GROUPS[0]) if scales is not None else GROUPS[0]
        grid = rows, columns // group
        scale, bias = (files.tensor(f"{base}.{part}", grid, DTYPES) for part in ("scales", "biases"))
        codes, of_groups = _integers(words.view(np.uint8), bits), by_group(stored(scale), (1, group))
        if scale.dtype != bias.dtype:  # forms hold both in one dtype
            return added(scaled(codes, of_groups), by_group(stored(bias), (1, group)))
        return ScaledCodes(codes, of_groups, None, mins=by_group(stored(bias), (1, group), -1))


def _integers(data: np.ndarray, bits: int) -> Codes:
    """Returns the integers that rows of bytes hold."""
    if 8 % bits:
        return bit_fields(data, bits)
    found = stored(data) if bits == 8 else unpacked(data, integers(bits))
    assert isinstance(found, Codes), bits
    return found
