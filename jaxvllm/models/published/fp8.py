"""FP8: a matrix of floating-point numbers of eight bits, with scales for its parts (DeepSeek, Qwen)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from jaxvllm.models.declaration import Storage
from jaxvllm.models.forms.few_bits import StoredAs
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.published.encoding import FP8, Encoding, block_scales, usual_blocks, with_input_scale
from jaxvllm.models.published.parts import Part, scaled, stored
from jaxvllm.models.safetensors_files import WeightFiles
from pallas_kernels.quantized_matmul.code import E4M3


@dataclass(frozen=True)
class Fp8(Encoding):
    """A tensor F8 of any number of matrices, and beside it the scales of its blocks, by which they are multiplied.

    block: the rows and columns of a block (128 by 128), or None for one scale a matrix, or a row
    rounds_groups: whether the columns of a block are also the inputs of a token that are rounded together
    """

    block: tuple[int, int] | None
    rounds_groups: bool = False

    @classmethod
    def read(cls, settings: HfConfig) -> Self:
        """Reads a quantization_config. Raises ValueError for blocks that are none."""
        block = block_size(settings, "weight_block_size")
        return cls(block, block is not None and settings.values.get("activation_scheme") == "dynamic")

    @property
    def ends(self) -> Mapping[str, str]:
        return {
            "_scale_inv": "",
            ".weight_scale": ".weight",
            ".input_scale": ".weight",
            ".activation_scale": ".weight",
            "_activation_scale": "",
        }

    def usual(self, storage: Storage) -> StoredAs | None:
        group = None if self.block is None else self.block[1]
        return StoredAs(E4M3, group, "float32", rounds_tokens=self.rounds_tokens)

    @property
    def rounds_tokens(self) -> bool:
        return self.rounds_groups

    def part(self, files: WeightFiles, name: str, shape: tuple[int, ...]) -> Part | None:
        header = files.header(name)
        if header is None or header.dtype not in FP8 or len(shape) < 2:
            return None
        values = files.tensor(name, shape, FP8)
        # Values are multiplied by a `scale_inv`, too, whatever its name says.
        inverse, scale = f"{name}_scale_inv", f"{name}_scale"
        blocks = usual_blocks(shape) if self.block is None else [(*(1,) * (len(shape) - 2), *self.block)]
        scales, _ = block_scales(files, scale if scale in files else inverse, shape, blocks)
        return with_input_scale(scaled(stored(values), scales), files, name)


def block_size(settings: HfConfig, key: str) -> tuple[int, int] | None:
    """Returns the rows and columns of a block that `key` states, or None if it states none."""
    value = settings.values.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
        raise ValueError(f"config {key} must be two positive integers, not {value!r}")
    return value[0], value[1]
