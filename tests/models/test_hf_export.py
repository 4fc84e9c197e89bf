"""The writer of checkpoints is the inverse of their readers, for every family: the same names, and each number."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxvllm.models import checkpoint, hf_export
from jaxvllm.models.families import find_family, model_spec
from jaxvllm.models.held_tensors import HeldTensors
from jaxvllm.models.hf_export import HfExport, write_checkpoint
from jaxvllm.models.params import Layout
from jaxvllm.models.spread import Spread
from sharding.mesh import MeshShape
from sharding.placement import make_mesh
from tests.models.fixture import NAMES, Fixture

pytestmark = pytest.mark.usefixtures("quick_fusions")

# Tokens beyond those that a layer's embedding knows share one row of it, and which one was changed nobody can tell.
REFUSED = ("gemma3n",)


def arrays(fixture: Fixture, layout: Layout = "separate", mesh: str = "1x1") -> tuple[dict, Spread]:
    spec, devices = model_spec(fixture.config), make_mesh(MeshShape.parse(mesh), jax.devices())
    params = checkpoint.load(
        Path(),
        spec,
        dtype=jnp.float32,
        layout=layout,
        mesh=devices,
        hf_config=fixture.config,
        tensors=fixture.weights(),
    )
    return params, Spread.on(spec, devices)


def assert_same(found: dict[str, np.ndarray], fixture: Fixture) -> None:
    expected = fixture.weights()
    family, tied = find_family(fixture.config), "lm_head.weight" if fixture.config.get("tie_word_embeddings") else None
    others = {name for name in expected if name.startswith(family.foreign) or name.endswith(family.redundant)} | {tied}
    assert found.keys() <= expected.keys() and expected.keys() - found.keys() <= others
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


@pytest.mark.parametrize("name", NAMES)
def test_every_number_of_every_family(name: str) -> None:
    fixture = Fixture.load(name)
    family = find_family(fixture.config)
    params, spread = arrays(fixture)
    if name.split("-")[0] in REFUSED:
        with pytest.raises(NotImplementedError, match=f"checkpoints of {family.architecture} cannot be written yet"):
            HfExport.of(spread, family)
        return
    assert_same(HfExport.of(spread, family, HeldTensors(fixture.weights())).tensors(params), fixture)


@pytest.mark.parametrize("name", ["qwen2", "gemma3", "gpt_oss"])
def test_what_a_mesh_has_added_is_left_out(name: str) -> None:
    """Copies of KV heads, rows that fill the vocabulary up, and stacks of layers."""
    fixture = Fixture.load(name)
    params, spread = arrays(fixture, "stacked", "1x4")
    assert_same(HfExport.of(spread, find_family(fixture.config)).tensors(params), fixture)


def test_a_written_directory_is_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fixture = Fixture.load("gemma3")
    model = fixture.write_checkpoint(tmp_path / "model")
    (model / "tokenizer.json").write_text("{}")
    params, spread = arrays(fixture)
    doubled = jax.tree.map(lambda x: (2 * x).astype(ml_dtypes.bfloat16), params)
    monkeypatch.setattr(hf_export, "FILE_BYTES", 20_000)
    write_checkpoint(doubled, spread, model, tmp_path / "new")
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and (tmp_path / "new" / "tokenizer.json").read_text() == "{}"
    files = sorted((tmp_path / "new").glob("*.safetensors"))
    assert len(files) > 1
    found = {name: array for file in files for name, array in load_file(file).items()}
    for name, array in found.items():
        np.testing.assert_array_equal(array, (2 * fixture.weights()[name]).astype(ml_dtypes.bfloat16), err_msg=name)
    # And it is read as any other.
    again = checkpoint.load(tmp_path / "new", spread.spec, dtype=jnp.bfloat16, layout="separate")
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(doubled), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match="is not an empty directory"):
        write_checkpoint(doubled, spread, model, tmp_path / "new")
