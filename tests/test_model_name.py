"""What is wrong with a model's name is told before anything starts."""

import re
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from jaxvllm.cli import main
from jaxvllm.model_name import ASSETS, hub_patterns, local_directory, resolve
from pallas_kernels import extras


def test_names_on_the_hub_and_directories(tmp_path: Path) -> None:
    assert local_directory("demo") == ASSETS / "demo"
    assert local_directory("owner/name-1.5") is None
    (tmp_path / "config.json").write_text("{}")
    assert local_directory(str(tmp_path)) == tmp_path


def test_files_of_a_directory_are_chosen_by_their_kind(tmp_path: Path) -> None:
    names = ("M-Q4_K_M.gguf", "M-UD-Q4_K_XL.gguf", "m.q8_0.gguf", "BF16/M-BF16-00001-of-00002.gguf")
    for name in (*names, "BF16/M-BF16-00002-of-00002.gguf", "mmproj-M-BF16.gguf"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"GGUF")
    for kind, name in zip(("q4_k_m", "Q4_K_XL", "Q8_0", "bf16"), names, strict=True):
        assert local_directory(f"{tmp_path}:{kind}") == tmp_path / name
        assert local_directory(str(tmp_path / name)) == tmp_path / name
    for model in (f"{tmp_path}:Q4_K", f"{tmp_path}:Q5_0", str(tmp_path)):
        with pytest.raises(
            ValueError, match=r"must have one .gguf file.*, and has .*M-Q4_K_M.gguf, .*give one of these"
        ):
            local_directory(model)
    assert local_directory("owner/name:Q4_K_M") is None
    for name in names[1:]:
        (tmp_path / name).unlink()
    assert local_directory(str(tmp_path)) == tmp_path / names[0]


def test_only_files_of_a_kind_are_downloaded() -> None:
    names = [
        *("M-F16.gguf", "m.f16.gguf", "F16/M-F16-00001-of-00002.gguf", "f16.gguf", "x/F16.gguf"),
        *("M-BF16.gguf", "M-Q8_0.gguf", "F16.txt", "M-F16K.gguf", "BF16/M-BF16-00001-of-00002.gguf"),
    ]
    assert list(filter_repo_objects(names, allow_patterns=list(hub_patterns("F16")))) == names[:5]
    mixed = ["M-Q4_K_m.gguf", "M-Q4_K_M.gguf", "m-q4_k_m.gguf"]
    assert list(filter_repo_objects(mixed, allow_patterns=list(hub_patterns("Q4_K_m")))) == mixed


def test_a_kind_that_the_hub_lacks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing is downloaded, so there is not even a directory.
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"owner/name on the hub has no .gguf file of the kind Q4_k, q4_k, Q4_K: give"):
        resolve("owner/name:Q4_k")


@pytest.mark.parametrize("name", ["./nope", "../nope/x", "nope", "/nope", "a/b/c", "~nobody-has-this-name/x", ""])
def test_what_is_neither_is_told_by_a_server_that_does_not_listen(
    name: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["serve", name, "--port", "0"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("jaxvllm serve: ") and name in err and err.count("\n") == 1
    assert "listening" not in caplog.text


def test_a_directory_without_a_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape("has no config.json")):
        local_directory(str(tmp_path))


def test_what_to_install_is_named_for_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    command = extras.install_command("cpu")
    assert re.fullmatch(r"(uv pip install --python \S+|\S+ -m pip install) 'llvmlite>=[\d.]+'", command)

    def missing(name: str) -> list[str]:
        raise extras.PackageNotFoundError

    monkeypatch.setattr(extras, "requires", missing)
    assert extras.install_command("cpu").endswith("'.[cpu]'")
