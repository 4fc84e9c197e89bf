"""GPTQ: integers of few bits, packed along the inputs, with a scale and a zero for each group of inputs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from jaxvllm.models.declaration import Storage
from jaxvllm.models.forms.few_bits import StoredAs
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.published.awq import group_size
from jaxvllm.models.published.encoding import WORDS, Encoding
from jaxvllm.models.published.parts import Part, by_group, integers, scaled, stored, turned, unpacked
from jaxvllm.models.safetensors_files import DTYPES, WeightFiles
from pallas_kernels.quantized_matmul.code import INT8, UINT4

BITS = (2, 4, 8)


@dataclass(frozen=True)
class Gptq(Encoding):
    """A matrix [out, in] is (q - z) * s, of q i32[in * bits / 32, out], z i32[groups, out * bits / 32] and s.

    bits: those of an integer, where the shape of q says nothing else
    group_size: how many inputs have one scale, or None for all; `g_idx` i32[in], if it is there, has the group of each
    added: what is added to the stored zeros
    is_in_order: whether the inputs of a group follow each other, as far as the config tells
    """

    bits: int
    group_size: int | None
    added: int
    is_in_order: bool = True

    @classmethod
    def read(cls, settings: HfConfig) -> Self:
        """Reads a quantization_config. Raises ValueError for packings that are not known."""
        if (bits := settings.integer("bits", 4)) not in BITS:
            raise ValueError(f"config bits of GPTQ must be one of {', '.join(map(str, BITS))}, not {bits}")
        version = settings.choice("checkpoint_format", "gptq", ("gptq", "gptq_v2"))
        # The first version stores zeros that are 1 less, and lets them wrap around.
        is_in_order = not settings.flag("desc_act", False)
        return cls(bits, group_size(settings), 1 if version == "gptq" else 0, is_in_order)

    def usual(self, storage: Storage) -> StoredAs | None:
        code, is_sorted = INT8 if self.bits == 8 else UINT4, self.group_size is not None and not self.is_in_order
        return StoredAs(code, self.group_size, "float16", has_zeros=True, is_sorted=is_sorted)

    @property
    def ends(self) -> Mapping[str, str]:
        return {f".{part}": ".weight" for part in ("qweight", "qzeros", "scales", "g_idx")}

    def part(self, files: WeightFiles, name: str, shape: tuple[int, ...]) -> Part | None:
        base = name.removesuffix(".weight")
        header = files.header(f"{base}.qweight")
        if len(shape) != 2 or header is None:
            return None
        rows, columns = shape
        # `dynamic` gives some layers other bits.
        found: dict[tuple[int, ...], int] = {(-(-columns * bits // 32), rows): bits for bits in BITS}
        bits = found.get(header.shape, self.bits)
        words = files.tensor(f"{base}.qweight", (-(-columns * bits // 32), rows), WORDS)
        step = self.group_size or columns
        groups = -(-columns // step)
        by_input: tuple[int, int | np.ndarray] = (1, step)
        if f"{base}.g_idx" in files:
            group_of = files.integers(f"{base}.g_idx", (columns,))
            if group_of.min() < 0 or group_of.max() >= groups:
                raise ValueError(
                    f"{files.where(f'{base}.g_idx')}: tensor {base}.g_idx has groups {group_of.min()} to "
                    f"{group_of.max()}: {columns} inputs in groups of {step} have the groups 0 to {groups - 1}"
                )
            # A checkpoint may state the usual order.
            by_input = by_input if np.array_equal(group_of, np.arange(columns) // step) else (1, group_of)
        scales = files.tensor(f"{base}.scales", (groups, rows), DTYPES)
        zeros = files.tensor(f"{base}.qzeros", (groups, -(-rows * bits // 32)), WORDS)
        return scaled(
            unpacked(words.T, integers(bits)),
            by_group(turned(stored(scales)), by_input),
            by_group(turned(unpacked(zeros, integers(bits, self.added) % 2**bits)), by_input),
        )
