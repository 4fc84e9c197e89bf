"""Writes the embedded model in the forms in which checkpoints are published: GGUF, NF4, AWQ's layout, MXFP4, NVFP4.

Numbers are rounded to the nearest: nothing is calibrated on any text, as real AWQ does.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxvllm.model_name import DEMO_MODEL
from jaxvllm.models.safetensors_files import create_file, open_weights
from pallas_kernels.quantized_matmul import code

NF4_BLOCK = 64
AWQ_GROUP = 64  # 128, which is usual, does not divide the model's 192
NF4 = code.NF4.table[:16]
E2M1 = np.array((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), np.float32)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each place in a word


def demo_weights() -> dict[str, np.ndarray]:
    """Returns the tensors of the embedded model in float32."""
    files = open_weights(DEMO_MODEL)
    headers = {name: files.header(name) for name in files.names}
    return {name: files.tensor(name, header.shape).astype(np.float32) for name, header in headers.items() if header}


def write_gguf(path: Path, kind: str) -> float:
    """Writes a GGUF file whose layers have that type of ggml, and returns the bits of a weight of the layers."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    from tests.gguf_files import demo_tokenizer, write_gguf

    own = GGMLQuantizationType[kind]
    config = json.loads((DEMO_MODEL / "config.json").read_text())

    def kind_of(name: str) -> GGMLQuantizationType:
        return own if name.startswith("blk.") else GGMLQuantizationType.F32

    write_gguf(path, config, demo_weights(), kind_of, more=demo_tokenizer(DEMO_MODEL))
    count, size = GGML_QUANT_SIZES[own]
    return 8 * size / count


def write_nf4(directory: Path) -> float:
    """Writes a checkpoint as bitsandbytes does, with scales in float32. Returns the bits of a weight of the layers."""
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    return _write(directory, settings, _nf4)


def _nf4(name: str, matrix: np.ndarray) -> Mapping[str, np.ndarray]:
    blocks = matrix.reshape(-1, NF4_BLOCK)
    largest = np.abs(blocks).max(-1)
    middles = (NF4[1:] + NF4[:-1]) / 2
    codes = np.searchsorted(middles, blocks / np.maximum(largest, 1e-30)[:, None]).astype(np.uint8).reshape(-1)
    state = {"quant_type": "nf4", "blocksize": NF4_BLOCK, "dtype": "float32", "shape": matrix.shape}
    return {
        name: (codes[::2] << 4 | codes[1::2])[:, None],
        f"{name}.absmax": largest,
        f"{name}.quant_map": NF4,
        f"{name}.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }


def write_awq(directory: Path) -> float:
    """Writes a checkpoint in AWQ's layout, integers with zeros. Returns the bits of a weight of the layers."""
    settings = {"quant_method": "awq", "bits": 4, "group_size": AWQ_GROUP, "zero_point": True, "version": "gemm"}
    return _write(directory, settings, _awq)


def _awq(name: str, matrix: np.ndarray) -> Mapping[str, np.ndarray]:
    by_group = matrix.reshape(len(matrix), -1, AWQ_GROUP)
    least, largest = np.minimum(by_group.min(-1), 0), np.maximum(by_group.max(-1), 0)
    scales = ((largest - least) / 15).astype(np.float16)
    steps = scales.astype(np.float32)
    zeros = np.clip(np.round(-least / steps), 0, 15)
    codes = np.clip(np.round(by_group / steps[..., None]) + zeros[..., None], 0, 15).reshape(matrix.shape)
    base = name.removesuffix(".weight")
    return {f"{base}.qweight": _words(codes.T), f"{base}.qzeros": _words(zeros.T), f"{base}.scales": scales.T.copy()}


def _words(codes: np.ndarray) -> np.ndarray:
    """Returns i32[rows, columns / 8] of codes [rows, columns] of four bits."""
    of_words = codes.astype(np.uint32).reshape(len(codes), -1, 8)
    places = (of_words[..., column] << np.uint32(4 * place) for place, column in enumerate(_AWQ_ORDER))
    words: np.ndarray = np.bitwise_or.reduce(list(places)).view(np.int32)
    return words


def write_mxfp4(directory: Path) -> float:
    """Writes a checkpoint in MXFP4 as MLX does. Returns the bits of a weight of the layers."""
    return _write(directory, {"group_size": 32, "bits": 4, "mode": "mxfp4"}, _mxfp4)


def _mxfp4(name: str, matrix: np.ndarray) -> Mapping[str, np.ndarray]:
    by_group = matrix.reshape(len(matrix), -1, 32)
    largest = np.maximum(np.abs(by_group).max(-1), 2.0**-100)
    exponents = np.ceil(np.log2(largest / E2M1[-1]))  # no number is beyond the largest
    words = _e2m1(by_group / np.exp2(exponents)[..., None], matrix.shape).view(np.uint32)
    return {name: words, f"{name.removesuffix('.weight')}.scales": (exponents + 127).astype(np.uint8)}


def write_nvfp4(directory: Path) -> float:
    """Writes a checkpoint in NVFP4 as ModelOpt does. Returns the bits of a weight of the layers."""
    return _write(directory, {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, _nvfp4)


def _nvfp4(name: str, matrix: np.ndarray) -> Mapping[str, np.ndarray]:
    by_group = matrix.reshape(len(matrix), -1, 16)
    largest = np.abs(by_group).max(-1) / E2M1[-1]
    last = largest.max() / np.float32(448)  # the largest scale becomes the largest number e4m3
    scales = np.maximum(largest / last, 2.0**-9).astype(ml_dtypes.float8_e4m3fn)
    values = by_group / (scales.astype(np.float32) * last)[..., None]
    return {
        name: _e2m1(values, matrix.shape),
        f"{name}_scale": scales,
        f"{name}_scale_2": np.array(last, np.float32),
    }


def _e2m1(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Returns u8[out, in / 2] of the nearest numbers e2m1, the first of two in the lower bits."""
    codes = np.searchsorted((E2M1[1:] + E2M1[:-1]) / 2, np.abs(values)) + 8 * (values < 0)
    codes = codes.astype(np.uint8).reshape(shape)
    packed: np.ndarray = codes[:, ::2] | codes[:, 1::2] << 4
    return packed


def _write(
    directory: Path, settings: Mapping[str, Any], encode: Callable[[str, np.ndarray], Mapping[str, np.ndarray]]
) -> float:
    """Writes the embedded model with the matrices of its layers encoded, and returns the bits of their weights."""
    shutil.copytree(DEMO_MODEL, directory)
    tensors: dict[str, np.ndarray] = {}
    num_bytes = num_weights = 0
    for name, weight in demo_weights().items():
        if weight.ndim == 2 and ".layers." in name:
            encoded = encode(name, weight)
            num_bytes += sum(array.nbytes for array in encoded.values())
            num_weights += weight.size
            tensors |= encoded
        else:
            tensors[name] = weight
    for name, into in create_file(directory / "model.safetensors", tensors).items():
        into[...] = tensors[name]
    key = "quantization_config" if "quant_method" in settings else "quantization"  # MLX states no method
    config = json.loads((DEMO_MODEL / "config.json").read_text()) | {key: dict(settings)}
    (directory / "config.json").write_text(json.dumps(config))
    return 8 * num_bytes / num_weights
