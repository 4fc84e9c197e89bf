"""AWQ: integers of four bits, packed along the outputs, with a scale and a zero for each group of inputs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from jaxvllm.models.declaration import Storage
from jaxvllm.models.forms.few_bits import StoredAs
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.published.encoding import WORDS, Encoding
from jaxvllm.models.published.parts import Part, by_group, integers, scaled, stored, turned, unpacked
from jaxvllm.models.safetensors_files import DTYPES, WeightFiles
from pallas_kernels.quantized_matmul.code import UINT4

BITS, PER_WORD = 4, 8
# The place in a word of each of its eight columns: the place j has column (0, 2, 4, 6, 1, 3, 5, 7)[j].
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class Awq(Encoding):
    """A matrix [out, in] is (q - z) * s, with q i32[in, out / 8], z i32[in / group, out / 8] and s [in / group, out].

    group_size: how many inputs have one scale, or None for all
    """

    group_size: int | None

    @classmethod
    def read(cls, settings: HfConfig) -> Self:
        """Reads a quantization_config. Raises ValueError for packings that are not known."""
        if (bits := settings.integer("bits", BITS)) != BITS:
            raise ValueError(f"config bits of AWQ must be {BITS}, not {bits}")
        version = str(settings.values.get("version", "gemm")).lower()
        if version != "gemm":
            raise ValueError(f"config version of AWQ must be gemm, not {version!r}")
        return cls(group_size(settings))

    def usual(self, storage: Storage) -> StoredAs | None:
        return StoredAs(UINT4, self.group_size, "float16", has_zeros=True)

    @property
    def ends(self) -> Mapping[str, str]:
        return {".qweight": ".weight", ".qzeros": ".weight", ".scales": ".weight"}

    def part(self, files: WeightFiles, name: str, shape: tuple[int, ...]) -> Part | None:
        base = name.removesuffix(".weight")
        if len(shape) != 2 or f"{base}.qweight" not in files:
            return None
        rows, columns = shape
        step = self.group_size or columns
        words, groups = -(-rows // PER_WORD), -(-columns // step)
        values = files.tensor(f"{base}.qweight", (columns, words), WORDS)
        zeros = files.tensor(f"{base}.qzeros", (groups, words), WORDS)
        scales = files.tensor(f"{base}.scales", (groups, rows), DTYPES)
        table = integers(BITS)
        return turned(
            scaled(
                unpacked(values, table, _PLACES),
                by_group(stored(scales), (step, 1)),
                by_group(unpacked(zeros, table, _PLACES), (step, 1)),
            )
        )


def group_size(settings: HfConfig) -> int | None:
    """Returns how many inputs have one scale. -1, which is stated for all of them, is None."""
    size = settings.integer("group_size", 128, least=-1)
    if size == 0:
        raise ValueError("config group_size must be a positive integer, or -1 for all inputs, not 0")
    return None if size < 0 else size
