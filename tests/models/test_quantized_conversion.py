"""A checkpoint that `convert` quantizes is the model that an engine makes when it rounds the matrices itself."""

import json
import os
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxvllm.cli.convert import main
from jaxvllm.models import checkpoint
from jaxvllm.models.families import model_spec
from jaxvllm.models.forms import Forms
from jaxvllm.models.forms.choice import FewBitsForms
from jaxvllm.models.published import published_encoding
from jaxvllm.models.safetensors_files import create_file, open_weights
from pallas_kernels.backend import REFERENCE
from tests.models.fixture import Fixture
from tests.models.published.test_stored_bits import decoded, kept
from tests.models.published.written import resized

pytestmark = pytest.mark.usefixtures("quick_fusions")


def in_groups(name: str) -> Fixture:
    """The fixture with matrices whose inputs 32 divides."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
    if name == "qwen3_moe":
        sizes |= {"moe_intermediate_size": 32}
    fixture = Fixture.load(name)
    old = {fixture.config[key]: size for key, size in sizes.items()}
    return resized(fixture, old, **sizes)


def run(model: Path, output: Path, *flags: str) -> int:
    return main(["--model", str(model), "--output", str(output), "--format", "compressed-tensors", *flags])


def in_shards(model: Path) -> None:
    """Divides the checkpoint into two files and an index, and adds two tensors that the index does not name."""
    files = open_weights(model)
    names = sorted(files.names)
    file_of = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(names)}
    tensors = {name: files.tensor(name, files.files["model.safetensors"].tensors[name].shape) for name in names}
    unnamed = {names[0]: tensors[names[0]] + 1, "model.unnamed.weight": tensors[names[0]]}
    for shard in sorted(set(file_of.values())):
        own = {name: tensors[name] for name in names if file_of[name] == shard}
        save_file(own if names[0] in own else own | unnamed, model / shard)
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))


@pytest.mark.parametrize("quantization", ["int8", "fp8", "int4_g32"])
def test_it_is_what_an_engine_rounds_to(quantization: str, tmp_path: Path) -> None:
    fixture = in_groups("qwen3_moe")
    model = fixture.write_checkpoint(tmp_path / "model")
    (model / "tokenizer.json").write_text("{}")
    output = tmp_path / "made" / "quantized"
    assert run(model, output, "--quantization", quantization) == 0
    assert {path.name for path in output.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    spec = model_spec(fixture.config)
    options: dict[str, Any] = {"dtype": jnp.float32, "layout": "separate"}
    engine = Forms.chosen(quantization, REFERENCE, may_turn=False, by_tile=True)
    rounded = checkpoint.load(model, spec, forms=engine, **options)
    read = checkpoint.load(output, spec, forms=Forms(stored=FewBitsForms(by_tile=True)), **options)
    assert kept(read) == kept(rounded) != set()
    chex.assert_trees_all_equal(decoded(read), decoded(rounded))


def test_files_become_files(tmp_path: Path) -> None:
    model = in_groups("qwen3").write_checkpoint(tmp_path / "model")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(model, whole, "-q", "int4_g32", "--dtype", "bfloat16") == 0
    in_shards(model)
    assert run(model, parts, "-q", "int4_g32", "--dtype", "bfloat16") == 0
    assert len(list(parts.glob("*.safetensors"))) == 2
    one, other = load_file(whole / "model.safetensors"), dict[str, Any]()
    for file in parts.glob("*.safetensors"):
        other |= load_file(file)
    chex.assert_trees_all_equal(one, other)
    assert {array.dtype.name for array in one.values()} == {"bfloat16", "int32", "int64"}
    assert checkpoint.read_config(parts)["dtype"] == "bfloat16"
    checkpoint.load(parts, model_spec(checkpoint.read_config(parts)), dtype=jnp.bfloat16, layout="separate")


def test_what_the_config_says_of_it(tmp_path: Path) -> None:
    model = in_groups("qwen3_moe").write_checkpoint(tmp_path / "model")
    said = {}
    for quantization in ("int8", "fp8", "int4_g32"):
        assert run(model, tmp_path / quantization, "-q", quantization) == 0
        config = json.loads((tmp_path / quantization / "config.json").read_text())
        said[quantization] = config.pop("quantization_config")
        assert config == json.loads((model / "config.json").read_text())
    assert [one["format"] for one in said.values()] == ["int-quantized", "float-quantized", "pack-quantized"]
    group = said["int4_g32"]["config_groups"]["group_0"]
    assert group["weights"].items() >= {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}.items()
    assert group["input_activations"] is None
    group = said["int8"]["config_groups"]["group_0"]
    assert group["weights"].items() >= {"num_bits": 8, "type": "int", "strategy": "channel"}.items()
    assert group["input_activations"]["strategy"] == "token"
    encodings = [published_encoding({"quantization_config": one}) for one in said.values()]
    assert [encoding and encoding.rounds_tokens for encoding in encodings] == [True, True, False]
    # Routers are never rounded.
    routers = {f"model.layers.{layer}.mlp.gate" for layer in (0, 2, 3)}
    assert set(said["int8"]["ignore"]) == {"lm_head", *routers}


def test_matrices_of_one_row_stay_as_they_are(tmp_path: Path) -> None:
    fixture = Fixture.load("qwen2_moe")
    model, output = fixture.write_checkpoint(tmp_path / "model"), tmp_path / "int8"
    assert run(model, output, "-q", "int8") == 0
    ignored = json.loads((output / "config.json").read_text())["quantization_config"]["ignore"]
    gates = [name for name in fixture.shapes if name.endswith("shared_expert_gate.weight")]
    assert gates and {name.removesuffix(".weight") for name in gates} <= set(ignored)
    written = load_file(output / "model.safetensors")
    chex.assert_trees_all_equal(*({name: one[name] for name in gates} for one in (written, fixture.weights())))


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this platform cannot do it")
def test_a_file_has_its_room_on_the_disk_before_it_is_written(tmp_path: Path) -> None:
    path, size = tmp_path / "model.safetensors", 1 << 20
    create_file(path, {"x": jax.ShapeDtypeStruct((size,), np.uint8)})
    assert path.stat().st_blocks * 512 >= size


def test_mistakes_cost_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = in_groups("qwen3").write_checkpoint(tmp_path / "model")
    stacks = Fixture.load("gpt_oss").write_checkpoint(tmp_path / "stacks")

    def refused(said: str, model: Path, *flags: str) -> None:
        assert run(model, tmp_path / "out", *flags) == 2
        captured = capsys.readouterr()
        assert said in captured.err and captured.err.startswith("jaxvllm convert: ")
        assert captured.err.count("\n") == 1 and not captured.out
        assert not (tmp_path / "out").exists()

    refused("needs --quantization: int8, fp8, int4, int4_g32", model)
    refused("mesh 1x2 is for orbax trees", model, "-q", "int8", "--mesh", "1x2")
    refused("an orbax tree has the weights in 16 or 32 bits", model, "-q", "int8", "--format", "orbax")
    refused("has no linear layer whose inputs are groups of 128", model, "-q", "int4")
    refused("has several matrices, and compressed-tensors stores each expert on its own", stacks, "-q", "int8")
    assert run(model, tmp_path / "int8", "-q", "int8") == 0
    capsys.readouterr()
    refused("is quantized already", tmp_path / "int8", "-q", "int8")
    refused("is not an empty directory", model, "-q", "int8", "--output", str(tmp_path / "int8"))
    (tmp_path / "int8" / "config.json").unlink()
    refused("delete it if a conversion was interrupted", model, "-q", "int8", "--output", str(tmp_path / "int8"))
