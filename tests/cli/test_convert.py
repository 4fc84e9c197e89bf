"""`jaxvllm convert`, as a user types it."""

import json
import subprocess
import sys
from pathlib import Path

import chex
import jax.numpy as jnp
import pytest

from jaxvllm.cli.convert import main
from jaxvllm.models import checkpoint, orbax_tree
from jaxvllm.models.families import model_spec
from tests.models.fixture import Fixture
from tests.waiting import PATIENCE


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = Fixture.load("mistral").write_checkpoint(tmp_path / "model")
    for name in ("generation_config.json", "tokenizer.json", "model.safetensors.index.json"):
        (directory / name).write_text("{}")
    return directory


def test_the_directory_is_a_model(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "made" / "on the way"
    assert main(["--model", str(model), "--output", str(output), "--mesh", "1x2", "--dtype", "bfloat16"]) == 0
    assert f"--model {output}" in capsys.readouterr().out
    assert {path.name for path in output.iterdir()} == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "orbax",
    }
    config = checkpoint.read_config(output)
    assert config == json.loads((model / "config.json").read_text()) | {"dtype": "bfloat16"}
    both = (
        checkpoint.load(path, model_spec(config), dtype=jnp.bfloat16, layout="separate") for path in (output, model)
    )
    chex.assert_trees_all_equal(*both)


def test_mistakes_cost_one_line_and_exit_code_2(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(said: str, **options: object) -> None:
        flags = {"model": model, "output": tmp_path / "out"} | options
        assert main([word for name, value in flags.items() for word in (f"--{name}", str(value))]) == 2
        captured = capsys.readouterr()
        assert said in captured.err and captured.err.startswith("jaxvllm convert: ")
        assert captured.err.count("\n") == 1 and not captured.out
        assert not (tmp_path / "out").exists()

    refused("/no/such/place", model="/no/such/place")
    refused("mesh 1x9 needs 9 devices", mesh="1x9")
    refused("'axb' is not DxM", mesh="axb")
    refused("mesh 4x2 would hold 4 copies of the model: give 1x8", mesh="4x2")
    refused("mesh 0x1 has an empty axis", mesh="0x1")
    refused("is not an empty directory: give another, nothing is overwritten", output=model)
    refused("is not an empty directory", output=model / "config.json")
    refused("Not a directory", output=model / "config.json" / "out")
    (model / "orbax").mkdir()
    refused("is an orbax tree already", model=model)
    (model / "orbax").rmdir()
    (model / "model.safetensors").unlink()
    refused("needs a weight_map", model=model)


def test_what_an_interrupted_run_leaves_is_no_model(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    arguments = ["--model", str(model), "--output", str(output)]

    def interrupted(directory: Path, params: object) -> None:
        directory.with_name("orbax.unfinished").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(orbax_tree, "save", interrupted)
    assert main(arguments) == 130
    assert {path.name for path in output.iterdir()} == {"generation_config.json", "tokenizer.json", "orbax.unfinished"}
    assert main(arguments) == 2
    assert "or delete it if a conversion was interrupted" in capsys.readouterr().err
    (output / "thesis.tex").write_text("")
    assert main(arguments) == 2
    assert "delete" not in capsys.readouterr().err


def test_help_is_quick_and_needs_no_device() -> None:
    code = "import sys\nfrom jaxvllm.cli.convert import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "assert not {'jax', 'orbax'} & set(sys.modules), 'help imports them'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert "--output" in done.stdout
