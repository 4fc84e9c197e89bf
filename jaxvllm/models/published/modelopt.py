"""ModelOpt: matrices in FP8 or NVFP4, in one checkpoint perhaps both."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from jaxvllm.models.declaration import Storage
from jaxvllm.models.forms.few_bits import StoredAs
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.published.encoding import Encoding
from jaxvllm.models.published.fp8 import Fp8
from jaxvllm.models.published.nvfp4 import BYTES, STORED_NVFP4, nvfp4_part
from jaxvllm.models.published.parts import Part
from jaxvllm.models.safetensors_files import WeightFiles

ALGORITHMS = ("FP8", "NVFP4", "MIXED_PRECISION")


@dataclass(frozen=True)
class ModelOpt(Encoding):
    """A matrix F8 has a scale beside it, and a matrix of bytes has scales in FP8 and `weight_scale_2`."""

    fp8: Fp8
    is_nvfp4: bool | None  # of the matrices of layers; None: some are, and some are in FP8

    @classmethod
    def read(cls, settings: HfConfig) -> Self:
        """Reads a quantization_config of ModelOpt. Raises ValueError for an algorithm that is not known."""
        algorithm = settings.choice("quant_algo", "none", ALGORITHMS)
        return cls(Fp8(None), None if algorithm == "MIXED_PRECISION" else algorithm == "NVFP4")

    def usual(self, storage: Storage) -> StoredAs | None:
        if self.is_nvfp4 is None:
            return None
        return STORED_NVFP4 if self.is_nvfp4 else self.fp8.usual(storage)

    @property
    def ends(self) -> Mapping[str, str]:
        return {**self.fp8.ends, ".weight_scale_2": ".weight"}

    def part(self, files: WeightFiles, name: str, shape: tuple[int, ...]) -> Part | None:
        header = files.header(name)
        if header is None or header.dtype not in BYTES or len(shape) != 2:
            return self.fp8.part(files, name, shape)
        return nvfp4_part(files, name, f"{name}_scale", f"{name}_scale_2", shape, divides=False)
