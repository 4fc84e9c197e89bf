"""Converts a checkpoint to one whose matrices are quantized, in the format of compressed-tensors."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxvllm.gguf_file import is_gguf
from jaxvllm.models.checkpoint import CONFIG, check_empty, companions, read_config
from jaxvllm.models.families import find_family, model_spec
from jaxvllm.models.hf_weights import StoredWeights
from jaxvllm.models.params import declare_layer
from jaxvllm.models.published import published_encoding
from jaxvllm.models.published.compressed_scheme import CompressedScheme
from jaxvllm.models.safetensors_files import DTYPES, INDEX, INTEGERS, WeightFiles, create_file, open_weights
from jaxvllm.models.spec import ModelSpec

_DTYPES = {**DTYPES, **INTEGERS}


def convert_quantized(model: Path, output: Path, *, quantization: str, dtype: str) -> None:
    """Writes the model of directory `model` into `output`, its layers rounded to `quantization`, others in `dtype`.

    Each file of the checkpoint becomes a file of the same name, and the host holds one matrix at a time. `auto` is the
    dtype that each tensor has. Raises ValueError when `output` has anything in it, or when the model cannot be read, is
    quantized already, or has no matrix that can be rounded so; all of these are found before any weight is read.
    """
    if is_gguf(model):
        raise ValueError(f"{model} is a GGUF file: convert takes a directory, whose tokenizer it copies, too")
    config = read_config(model)
    if published_encoding(config) is not None:
        raise ValueError(f"{model} is quantized already: give a checkpoint of the same model in 16 or 32 bits")
    copied, files = companions(model), open_weights(model)
    check_empty(output, {file.name for file in copied} | {INDEX, *files.files})
    plan = _Plan.of(files, config, CompressedScheme.named(quantization), dtype)
    output.mkdir(parents=True, exist_ok=True)
    for file in copied:
        shutil.copyfile(file, output / file.name)
    for name, declared in plan.declared.items():
        plan.write(name, create_file(output / name, declared))
    if len(plan.declared) > 1:
        file_of = {tensor: name for name, declared in plan.declared.items() for tensor in declared}
        (output / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": file_of}, indent=2), encoding="utf-8")
    # The config comes last: if anything went wrong before, the directory has none and is not taken for a model.
    written = config | {"quantization_config": plan.scheme.settings(list(plan.ignored))}
    if dtype != "auto":
        written["dtype"] = dtype
    (output / CONFIG).write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class _Plan:
    """Says what becomes of each tensor of a checkpoint.

    rounded: the names of those that are rounded
    ignored: the modules of the other matrices of layers, and the LM head
    declared: the tensors to be written, by file and name
    """

    files: WeightFiles
    scheme: CompressedScheme
    rounded: frozenset[str]
    ignored: tuple[str, ...]
    declared: Mapping[str, Mapping[str, jax.ShapeDtypeStruct]]

    @classmethod
    def of(cls, files: WeightFiles, config: Mapping[str, Any], scheme: CompressedScheme, dtype: str) -> Self:
        """Reads the headers alone. Raises ValueError if no matrix can be rounded, or a tensor has an unknown dtype."""
        spec = model_spec(config)
        weights = StoredWeights.of(files, find_family(config), spec)
        matrices = _matrices(weights, spec)
        rounded = frozenset(name for name, shape in matrices.items() if scheme.fits(shape))
        if not rounded:
            raise ValueError(
                f"{files.directory} has no linear layer whose inputs are groups of {scheme.stored.group}: give another "
                "quantization"
            )
        declared: dict[str, dict[str, jax.ShapeDtypeStruct]] = {name: {} for name in files.files}
        outside = {source.name for sources in weights.outer.values() for source in sources}
        ignored = ["lm_head"]
        for name, file in files.file_of.items():
            tensor = files.tensor(name, files.files[file].tensors[name].shape, _DTYPES)
            if name in rounded:
                base = name.removesuffix("weight")
                declared[file] |= {base + end: part for end, part in scheme.declare(tensor.shape).items()}
                continue
            is_float = tensor.dtype in DTYPES.values()
            kept = jnp.dtype(dtype) if is_float and dtype != "auto" else tensor.dtype
            declared[file][name] = jax.ShapeDtypeStruct(tensor.shape, kept)
            if tensor.ndim == 2 and name.endswith(".weight") and name not in outside:
                ignored.append(name.removesuffix(".weight"))
        return cls(files, scheme, rounded, tuple(ignored), declared)

    def write(self, file: str, into: Mapping[str, np.ndarray]) -> None:
        """Fills the arrays of one file."""
        for name, header in self.files.files[file].tensors.items():
            if self.files.file_of.get(name) != file:
                continue  # the index names another file for it, or none
            tensor = self.files.tensor(name, header.shape, _DTYPES)
            if name not in self.rounded:
                into[name][...] = tensor
                continue
            base = name.removesuffix("weight")
            for end, part in self.scheme.encoded(tensor).items():
                into[base + end][...] = part


def _matrices(weights: StoredWeights, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors that are matrices of linear layers, by name.

    Raises ValueError where one tensor has several: compressed-tensors stores each expert on its own.
    """
    found: dict[str, tuple[int, ...]] = {}
    for layer, arrays in enumerate(weights.layers):
        decls = declare_layer(spec, layer)
        # An array that declares a dtype, such as a router, is never rounded.
        linear = (
            source
            for name, sources in arrays.items()
            for source in sources
            if decls[name].storage in ("matrix", "experts") and decls[name].dtype is None
        )
        for source in linear:
            if len(source.shape) > 2:
                raise ValueError(
                    f"{weights.tensors.where(source.name)}: tensor {source.name} of shape {source.shape} has several "
                    "matrices, and compressed-tensors stores each expert on its own: give such a checkpoint"
                )
            if len(source.shape) == 2 and not source.is_turned and source.name.endswith(".weight"):
                found[source.name] = source.shape
    return found
