"""What is wrong with a model's name is told before anything starts."""

import re
from pathlib import Path

import pytest

from jaxvllm.cli import main
from jaxvllm.model_name import ASSETS, local_directory
from pallas_kernels import extras


def test_names_on_the_hub_and_directories(tmp_path: Path) -> None:
    assert local_directory("demo") == ASSETS / "demo"
    assert local_directory("owner/name-1.5") is None
    (tmp_path / "config.json").write_text("{}")
    assert local_directory(str(tmp_path)) == tmp_path


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
