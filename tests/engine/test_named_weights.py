"""The name of a model's weights: every byte counts, and a file is read once for as long as it stays the same."""

from pathlib import Path

import pytest

from jaxvllm.engine import named_weights
from jaxvllm.engine.named_weights import FileDigests, NamedWeights, name_model
from jaxvllm.models import weights_name

SIZE = 3 << 20


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_name, "PIECE_BYTES", 1 << 20)


def write_model(directory: Path, content: bytes = bytes(SIZE)) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(content)
    (directory / "orbax" / "d").mkdir(parents=True)
    (directory / "orbax" / "d" / "0").write_bytes(b"array")
    return directory


def name(directory: Path, rest: str = "float32") -> str:
    return name_model([NamedWeights(directory)], rest, None).result()


def test_every_byte_of_every_file_counts(tmp_path: Path) -> None:
    first = name(write_model(tmp_path / "first"))
    assert name(write_model(tmp_path / "copy")) == first
    changed = write_model(tmp_path / "changed")
    # None of these places was among those that were looked at when a file was named by samples.
    for at in (65536 + 70, SIZE // 16 - 1, SIZE // 2 + 5000, SIZE - 1):
        content = bytearray(SIZE)
        content[at] = 1
        (changed / "model.safetensors").write_bytes(content)
        assert name(changed) != first
    (changed / "model.safetensors").write_bytes(bytes(SIZE))
    assert name(changed) == first and name(changed, "bfloat16") != first
    (changed / "orbax" / "d" / "0").write_bytes(b"arraz")
    assert name(changed) != first
    for content in (bytes(SIZE - 1), bytes(SIZE + 1), b""):
        (changed / "model.safetensors").write_bytes(content)
        assert name(changed) != first


def test_a_draft_and_random_weights_have_names_too(tmp_path: Path) -> None:
    model, draft = write_model(tmp_path / "model"), write_model(tmp_path / "draft", b"draft")
    both = name_model([NamedWeights(model), NamedWeights(draft)], "", None).result()
    (draft / "model.safetensors").write_bytes(b"draff")
    assert name_model([NamedWeights(model), NamedWeights(draft)], "", None).result() != both
    random = name_model([NamedWeights(model, has_weights=False)], "", None).result()
    (model / "model.safetensors").unlink()
    assert name_model([NamedWeights(model, has_weights=False)], "", None).result() == random


def test_a_gguf_file_has_the_config_and_the_weights(tmp_path: Path) -> None:
    files = [tmp_path / f"x-0000{number}-of-00002.gguf" for number in (1, 2)]
    for file in files:
        file.write_bytes(b"GGUF")
    first = name(files[0])
    files[1].write_bytes(b"GGUG")
    assert name(files[0]) != first
    random = name_model([NamedWeights(files[0], has_weights=False)], "float32", None).result()
    assert random == name(files[0])


def test_a_file_is_read_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_weights, "SETTLED_SECONDS", -1.0)
    path = write_model(tmp_path / "model") / "model.safetensors"
    read: list[Path] = []
    digest_of = named_weights.file_digest
    monkeypatch.setattr(named_weights, "file_digest", lambda path, run: (read.append(path), digest_of(path, run))[1])
    first = FileDigests(tmp_path / "cache").of(path)
    assert FileDigests(tmp_path / "cache").of(path) == first and read == [path]
    path.write_bytes(b"\1" + bytes(SIZE - 1))
    assert FileDigests(tmp_path / "cache").of(path) != first and len(read) == 2
    [directory] = (tmp_path / "cache").iterdir()
    directory.chmod(0o777)  # anybody may have written it
    FileDigests(tmp_path / "cache").of(path)
    assert len(read) == 3
    monkeypatch.setattr(named_weights, "SETTLED_SECONDS", 1e9)  # it may change in the same moment
    directory.chmod(0o700)
    path.write_bytes(b"\2" + bytes(SIZE - 1))
    for _ in range(2):
        FileDigests(tmp_path / "cache").of(path)
    assert len(read) == 5


def test_weights_that_cannot_be_read_have_no_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    future = name_model([NamedWeights(tmp_path)], "", None)
    assert isinstance(future.exception(), OSError)
    assert "no pages are exchanged" in caplog.text
