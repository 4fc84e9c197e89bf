"""bitsandbytes: four bits that number the values of a table (NF4, FP4), with a scale for each block; or int8."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from jaxvllm.models.declaration import Storage
from jaxvllm.models.forms.few_bits import StoredAs
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.published.encoding import Encoding
from jaxvllm.models.published.parts import Part, added, by_group, in_rows, scaled, stored, unpacked
from jaxvllm.models.safetensors_files import WeightFiles
from pallas_kernels.quantized_matmul.code import FP4, INT8, NF4

TYPES = ("nf4", "fp4")
_BLOCK = 64  # which bitsandbytes has unless it is told another one
_MOST = 4096  # the largest block of bitsandbytes
_BYTES: Mapping[str, np.dtype] = {"U8": np.dtype(np.uint8)}
_SIGNED: Mapping[str, np.dtype] = {"I8": np.dtype(np.int8)}
_FLOATS: Mapping[str, np.dtype] = {"F32": np.dtype(np.float32)}


@dataclass(frozen=True)
class BitsAndBytes(Encoding):
    """A matrix of four bits is one row of bytes with a table and scales; one of int8 has a scale for each row.

    In four bits, rows follow each other without gaps, the higher four bits of a byte are the first, and a block of 64
    has one scale (`absmax`), which may itself be a byte that numbers the values of a second table. In int8 a value is
    q * SCB / 127. The layout is that of bitsandbytes 0.50 (`functional.py`, `backends/default/ops.py`).

    first: how most matrices are stored
    """

    first: StoredAs

    @classmethod
    def read(cls, settings: HfConfig) -> Self:
        """Reads a quantization_config. Raises ValueError unless it states four bits or eight.

        The files say which matrices are quantized, and how.
        """
        if not any(settings.flag(key, False) for key in ("load_in_4bit", "load_in_8bit")):
            raise ValueError("config quantization_config of bitsandbytes must state load_in_4bit or load_in_8bit")
        if settings.flag("load_in_8bit", False):
            return cls(StoredAs(INT8, None, "float32"))
        kind = settings.choice("bnb_4bit_quant_type", "fp4", TYPES)
        # The config does not state the size of blocks.
        return cls(StoredAs(NF4 if kind == "nf4" else FP4, _BLOCK, "float32"))

    def usual(self, storage: Storage) -> StoredAs | None:
        return self.first

    @property
    def ends(self) -> Mapping[str, str]:
        tables = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
        states = tuple(f"quant_state.bitsandbytes__{kind}" for kind in TYPES)
        return {f".weight.{part}": ".weight" for part in tables + states} | {
            ".SCB": ".weight",
            ".weight_format": ".weight",
        }

    def part(self, files: WeightFiles, name: str, shape: tuple[int, ...]) -> Part | None:
        header = files.header(name)
        if header is None or len(shape) != 2:
            return None
        if header.dtype in _SIGNED:
            return _int8(files, name, shape)
        return _four_bits(files, name, shape) if header.dtype in _BYTES else None


def _int8(files: WeightFiles, name: str, shape: tuple[int, ...]) -> Part:
    base, (rows, columns) = name.removesuffix(".weight"), shape
    order = f"{base}.weight_format"
    if (header := files.header(order)) is not None:
        numbers = files.tensor(order, header.shape if header.shape == (1,) else (), _BYTES)
        if numbers.any():
            raise ValueError(f"{files.where(order)}: tensor {order} must be 0, which means rows, not {numbers}")
    scales = files.tensor(f"{base}.SCB", (rows,), _FLOATS).reshape(rows, 1) * np.float32(1 / 127)
    return scaled(stored(files.tensor(name, shape, _SIGNED)), by_group(stored(scales), (1, columns)))


def _four_bits(files: WeightFiles, name: str, shape: tuple[int, ...]) -> Part:
    state = _State.read(files, name, shape)
    columns, size = shape[1], shape[0] * shape[1]
    # Where blocks cross from one row to the next, whole rows are decoded.
    rows, width = shape if columns % state.block == 0 else (1, size)
    data = files.tensor(name, (-(-size // 2), 1), _BYTES).reshape(rows, -1)
    numbers = files.tensor(f"{name}.quant_map", (16,), _FLOATS)
    values = np.arange(256)
    pairs = np.stack([numbers[values >> 4], numbers[values & 15]], axis=1)
    scales = by_group(state.scales(files, name, rows, -(-width // state.block)), (1, state.block))
    part = scaled(unpacked(data, pairs), scales)
    return part if rows == shape[0] else in_rows(part, columns)


@dataclass(frozen=True)
class _State:
    """The sizes of the blocks of a matrix, and the offset of its scales if these are quantized, too."""

    block: int
    nested_block: int
    offset: float | None

    @classmethod
    def read(cls, files: WeightFiles, name: str, shape: tuple[int, ...]) -> Self:
        """Reads the JSON that a tensor of bytes holds. Raises ValueError that names it if it is not for this matrix."""
        found = [f"{name}.quant_state.bitsandbytes__{kind}" for kind in TYPES]
        stored_name = next((one for one in found if one in files), found[0])
        header = files.header(stored_name)
        data = files.tensor(stored_name, header.shape if header is not None else (1,), _BYTES)
        try:
            values: Any = json.loads(data.tobytes())
            settings = HfConfig(values if isinstance(values, dict) else {})
            if settings.values.get("shape") != list(shape):
                raise ValueError(f"its shape is {settings.values.get('shape')}, and the config makes it {list(shape)}")
            block, nested = settings.integer("blocksize", least=2), settings.integer("nested_blocksize", 256)
            offset = settings.values.get("nested_offset")
            is_nested = f"{name}.nested_absmax" in files
            if block % 2 or max(block, nested) > _MOST or (is_nested and type(offset) not in (int, float)):
                raise ValueError(f"blocks must be even and at most {_MOST}, and nested scales need nested_offset")
            return cls(block, nested, float(offset or 0) if is_nested else None)
        except (ValueError, OverflowError, RecursionError) as error:
            where = f"{files.where(stored_name)}: {stored_name}"
            raise ValueError(f"{where} is not the state of {name}: {error}") from error

    def scales(self, files: WeightFiles, name: str, rows: int, columns: int) -> Part:
        """Returns the scales of `rows` of `columns` blocks each."""
        count = rows * columns
        if self.offset is None:
            return stored(files.tensor(f"{name}.absmax", (count,), _FLOATS).reshape(rows, columns))
        codes = files.tensor(f"{name}.absmax", (count,), _BYTES).reshape(1, count)
        table = files.tensor(f"{name}.nested_quant_map", (256,), _FLOATS).reshape(256, 1)
        outer = files.tensor(f"{name}.nested_absmax", (-(-count // self.nested_block),), _FLOATS).reshape(1, -1)
        offset = np.full((1, 1), self.offset, np.float32)
        values = scaled(unpacked(codes, table), by_group(stored(outer), (1, self.nested_block)))
        return in_rows(added(values, by_group(stored(offset), (1, count))), columns)
