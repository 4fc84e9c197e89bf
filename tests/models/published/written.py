"""Writes checkpoints as they are published, and says what their tensors mean."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import ml_dtypes
import numpy as np

from jaxvllm.models import checkpoint
from jaxvllm.models.families import model_spec
from jaxvllm.models.published import published_encoding
from jaxvllm.models.published.encoded_files import EncodedFiles
from jaxvllm.models.safetensors_files import open_weights
from jaxvllm.models.weight_names import Source
from tests.models.fixture import Fixture

NAMES = {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "int8": "I8",
    "uint8": "U8",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
}
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def write_tensors(directory: Path, tensors: Mapping[str, np.ndarray]) -> Path:
    """Writes model.safetensors byte by byte: the library's writer for NumPy does not know all of these dtypes."""
    directory.mkdir(parents=True, exist_ok=True)
    header, data = {}, b""
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": NAMES[array.dtype.name], "shape": array.shape, "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return directory


def write_model(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    write_tensors(directory, tensors)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def encoded(directory: Path, settings: Mapping[str, Any]) -> EncodedFiles:
    """The tensors of a directory, read by a quantization_config."""
    encoding = published_encoding({"quantization_config": settings})
    assert encoding is not None
    return EncodedFiles.of(open_weights(directory), encoding)


def check_values(tensors: EncodedFiles, name: str, expected: np.ndarray) -> None:
    """Every element of a matrix, and of boxes that begin and end anywhere, is exactly as expected."""
    assert tensors.names == {name}
    fill = tensors.fill(Source(name, expected.shape, (0,) * expected.ndim, expected.shape))
    for index in (tuple(slice(0, size) for size in expected.shape), *_boxes(expected.shape)):
        out = np.full(expected[index].shape, np.nan, np.float32)
        fill(out, tuple(part.start for part in index))
        np.testing.assert_array_equal(out, expected[index])


def _boxes(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    stream = np.random.default_rng(0)
    for _ in range(12):
        ends = [sorted(stream.choice(size + 1, 2, replace=False)) for size in shape]
        yield tuple(slice(int(start), int(stop)) for start, stop in ends)


def check_model(
    directory: Path,
    fixture: Fixture,
    settings: Mapping[str, Any],
    matrix: Callable[[tuple[int, int]], tuple[Mapping[str, np.ndarray], np.ndarray]],
    of: str = "",
) -> None:
    """A model of quantized matrices is the model of the same values in float32.

    matrix: the stored tensors of one named x_proj, and its values
    of: what is in the names of the matrices that are quantized
    """
    published: dict[str, np.ndarray] = {}
    plain = fixture.weights()
    for name, weight in plain.items():
        if weight.ndim != 2 or of not in name:
            published[name] = weight
            continue
        tensors, plain[name] = matrix((weight.shape[0], weight.shape[1]))
        own = name.removesuffix(".weight")
        published |= {own + stored.removeprefix("x_proj"): array for stored, array in tensors.items()}
    config = fixture.config
    one = write_model(directory / "published", {**config, **settings}, published)
    other = write_model(directory / "plain", config, plain)
    spec = model_spec(config)
    options: dict[str, Any] = {"dtype": "float32", "layout": "separate"}
    chex.assert_trees_all_equal(checkpoint.load(one, spec, **options), checkpoint.load(other, spec, **options))


def by_block(scales: np.ndarray, shape: tuple[int, ...], block: tuple[int, ...]) -> np.ndarray:
    """The scale of each element, by repeating and cutting."""
    for axis, step in enumerate(block):
        scales = np.repeat(scales, step, axis)
    return scales[tuple(map(slice, shape))]


def fp8_checkpoint(directory: Path, fixture: Fixture, block: tuple[int, int]) -> tuple[Path, Path]:
    """The projections of a model in FP8, and the same numbers in bfloat16: two checkpoints."""
    published: dict[str, np.ndarray] = {}
    plain: dict[str, np.ndarray] = {}
    for name, weight in fixture.weights().items():
        plain[name] = published[name] = weight.astype(ml_dtypes.bfloat16)
        if weight.ndim == 2 and "_proj" in name:
            grid = tuple(-(-size // step) for size, step in zip(weight.shape, block, strict=True))
            scales = np.random.default_rng(len(name)).uniform(1e-3, 2e-3, grid).astype(np.float32)
            spread = by_block(scales, weight.shape, block)
            published |= {name: (weight / spread).astype(E4M3), f"{name}_scale_inv": scales}
            plain[name] = (published[name].astype(np.float32) * spread).astype(ml_dtypes.bfloat16)
    settings = {"quant_method": "fp8", "weight_block_size": list(block), "activation_scheme": "dynamic"}
    config = fixture.config | {"torch_dtype": "bfloat16"}
    return (
        write_model(directory / "published", config | {"quantization_config": settings}, published),
        write_model(directory / "plain", config, plain),
    )


def resized(fixture: Fixture, sizes: Mapping[int, int], of: str = "", **config: Any) -> Fixture:
    """The fixture with other sizes, in the tensors whose names have `of`."""
    shapes = {name: [sizes.get(n, n) for n in shape] if of in name else shape for name, shape in fixture.shapes.items()}
    return replace(fixture, shapes=shapes, config=fixture.config | config)
