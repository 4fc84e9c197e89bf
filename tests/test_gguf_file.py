"""A GGUF file is checked before anything is made of its numbers."""

import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from jaxvllm.gguf_file import GgufFile


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(pairs: int, tensors: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs)


def test_metadata_and_tensors_are_those_that_were_written(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("words", ["a", "東", ""])
    writer.add_array("scores", [0.5, -1.0])
    writer.add_uint64("large", 2**60)
    writer.add_int8("small", -3)
    writer.add_bool("truth", True)
    writer.add_float64("exact", 0.1)
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(5, dtype=np.float16)}
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile.open(path)
    expected = {
        "words": ["a", "東", ""],
        "scores": [0.5, -1.0],
        "large": 2**60,
        "small": -3,
        "truth": True,
        "exact": 0.1,
    }
    assert file.metadata == {"general.architecture": "llama"} | expected
    without = GgufFile.open(path, has_texts=False)
    assert without.metadata == file.metadata | {"words": []} and without.tensors == file.tensors
    data = path.read_bytes()
    assert file.tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        tensor = file.tensors[name]
        assert tensor.shape == array.shape
        assert data[tensor.offset :].startswith(array.tobytes())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"GG", "its first word takes 4 bytes, and 2 are left"),
        (b"PK\3\4" + bytes(40), "is not a GGUF file"),
        (header(0, version=1), "has version 1 of GGUF: known are 2 and 3"),
        (header(2**60), f"says that it has {2**60} pairs of metadata, for which 0 bytes are too few"),
        (header(0, tensors=2**60), f"says that it has {2**60} tensors"),
        (header(1) + struct.pack("<Q", 2**60) + bytes(99), "a key goes beyond the end"),
        (header(1) + text("k") + struct.pack("<I", 77) + bytes(9), "k has the type 77, which does not exist"),
        (header(1) + text("k") + struct.pack("<IIQ", 9, 8, 2**60), f"has {2**60} strings of k"),
        (header(1) + text("k") + struct.pack("<IIQ", 9, 6, 2**62), f"has {2**62} numbers of k"),
        (header(1) + text("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(99), "k is an array of the type 9"),
        (header(1) + text("k") + struct.pack("<IQ", 8, 9) + b"short", "k goes beyond the end"),
        (header(1) + text("k") + struct.pack("<IQ", 8, 1) + b"\xff", "k is not UTF-8"),
        (header(1) + text("k") + struct.pack("<IIQ", 9, 8, 2) + text("a") + bytes(7), "k goes beyond the end"),
        (header(1) + text("k") + struct.pack("<IIQ", 9, 8, 1) + struct.pack("<Q", 2**63), "k goes beyond the end"),
        (header(2) + 2 * (text("k") + struct.pack("<IB", 7, 1)), "it has k twice"),
        (header(1) + text("general.alignment") + struct.pack("<II", 4, 3), "alignment is 3, and no power of two"),
        (header(0, 1) + text("t") + struct.pack("<I", 2**31) + bytes(99), "tensor t is there twice, or has 2147483648"),
        (header(0, 1) + text("t") + struct.pack("<IQ", 2, 7) + bytes(8), "tensor t takes 4 bytes, and 0 are left"),
    ],
)
def test_what_is_damaged_is_told_with_the_file(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    for has_texts in (True, False):
        with pytest.raises(ValueError, match=rf"x\.gguf.*{message}"):
            GgufFile.open(path, has_texts)


def test_arrays_have_so_many_numbers_at_most(tmp_path: Path) -> None:
    path, count = tmp_path / "x.gguf", 2**24 + 1
    path.write_bytes(header(1) + text("k") + struct.pack("<IIQ", 9, 0, count))
    os.truncate(path, 2**25)  # which takes no room on the disk
    with pytest.raises(ValueError, match=f"x.gguf: k has {count} numbers: arrays have {2**24} at most"):
        GgufFile.open(path)


def test_all_files_of_a_split_model_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "x-00001-of-00002.gguf").write_bytes(header(0))
    with pytest.raises(ValueError, match=r"is one of 2 files, of which x-00002-of-00002.gguf is not there"):
        GgufFile.open(tmp_path / "x-00001-of-00002.gguf")
    (tmp_path / "x-00000-of-00000.gguf").write_bytes(header(0))
    with pytest.raises(ValueError, match="has a number of a file that is not one of 0"):
        GgufFile.open(tmp_path / "x-00000-of-00000.gguf")
    (tmp_path / "x-00002-of-00002.gguf").write_bytes(header(0))
    assert GgufFile.open(tmp_path / "x-00002-of-00002.gguf").path.name == "x-00001-of-00002.gguf"
    count = header(1) + text("split.tensors.count") + struct.pack("<II", 4, 3)
    (tmp_path / "x-00001-of-00002.gguf").write_bytes(count)
    with pytest.raises(ValueError, match="says that its files have 3 tensors, and they have 0"):
        GgufFile.open(tmp_path / "x-00001-of-00002.gguf")
