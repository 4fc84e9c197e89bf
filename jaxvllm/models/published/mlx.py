"""MLX: integers of 2 to 8 bits, packed along the inputs, with a scale and a bias for each group of inputs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.published.encoding import Encoding
from jaxvllm.models.published.parts import Part, added, bit_fields, by_group, integers, scaled, stored, unpacked
from jaxvllm.models.safetensors_files import DTYPES, WeightFiles

BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)
_WORDS: Mapping[str, np.dtype] = {"U32": np.dtype(np.uint32)}


@dataclass(frozen=True)
class Mlx(Encoding):
    """A matrix [out, in] is q * s + b, of q u32[out, in * bits / 32], the lowest bits first, and s and b [out, groups].

    The embedding and the LM head may be such matrices. Layers may have other bits and groups than the config states
    for most: the shapes of the tensors say them as well. The layout is that of mlx-lm (`utils.py`).
    """

    @classmethod
    def read(cls, settings: HfConfig) -> Self:
        """Reads the `quantization` of a config. Raises ValueError for bits, groups or a mode that are not known."""
        for layer in (settings.values, *(value for value in settings.values.values() if isinstance(value, dict))):
            of_layer = HfConfig(layer)
            of_layer.choice("mode", "affine", ("affine",))
            for key, default, known in (("bits", 4, BITS), ("group_size", 64, GROUPS)):
                if of_layer.integer(key, default) not in known:
                    allowed = ", ".join(map(str, known))
                    raise ValueError(f"config {key} of MLX must be one of {allowed}, not {layer[key]}")
        return cls()

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
        grids: dict[tuple[int, ...], int] = {
            (rows, columns // group): group for group in GROUPS if columns % group == 0
        }
        group = grids.get(scales.shape, GROUPS[0]) if scales is not None else GROUPS[0]
        parts = (files.tensor(f"{base}.{part}", (rows, columns // group), DTYPES) for part in ("scales", "biases"))
        scale, bias = (by_group(stored(part), (1, group)) for part in parts)
        bytes_of = words.view(np.uint8)
        codes = unpacked(bytes_of, integers(bits)) if 8 % bits == 0 else bit_fields(bytes_of, bits)
        return added(scaled(codes, scale), bias)
