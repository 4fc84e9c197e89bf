"""A converted checkpoint is the same model as its safetensors, whatever mesh wrote it and whatever mesh reads it."""

import gc
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file

from jaxvllm.models import checkpoint, orbax_tree
from jaxvllm.models.checkpoint import convert
from jaxvllm.models.families import model_spec
from jaxvllm.models.kv_scales import with_kv_scales
from jaxvllm.models.params import Layout, Params
from sharding.mesh import MeshShape
from sharding.placement import make_mesh
from tests.models.fixture import Fixture

pytestmark = pytest.mark.usefixtures("quick_fusions")


def mesh(size: int) -> Mesh:
    return make_mesh(MeshShape(1, size), jax.devices())


def write(name: str, directory: Path) -> Path:
    """The fixture with two layers and an FFN that divides over 8 devices: enough of it, in little time."""
    fixture = Fixture.load(name)
    size = fixture.config["intermediate_size"]
    wider = -(-size // 8) * 8
    sizes = {size: wider, 2 * size: 2 * wider}
    shapes = {
        tensor: [sizes.get(n, n) for n in shape] if ".mlp." in tensor else shape
        for tensor, shape in fixture.shapes.items()
        if not tensor.startswith("model.layers.") or tensor.split(".")[2] in "01"
    }
    config = fixture.config | {"intermediate_size": wider, "num_hidden_layers": 2}
    config.pop("layer_types", None)
    return replace(fixture, config=config, shapes=shapes).write_checkpoint(directory / name)


def load(directory: Path, size: int = 1, layout: Layout = "separate", dtype: Any = jnp.float32) -> Params:
    spec = model_spec(checkpoint.read_config(directory))
    return checkpoint.load(directory, spec, dtype=dtype, layout=layout, mesh=mesh(size))


def check_same(got: Params, expected: Params) -> None:
    chex.assert_trees_all_equal(got, expected)
    for mine, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert mine.sharding == other.sharding and mine.dtype == other.dtype


# Seven query heads over one KV head, and a vocabulary that nothing divides; fused projections; biases.
@pytest.mark.parametrize(
    ("name", "written_on", "read_on"), [("llama", 8, (1, 4)), ("phi3", 1, (1, 2)), ("llama-bias", 2, (4,))]
)
def test_any_mesh_reads_what_any_mesh_wrote(
    name: str, written_on: int, read_on: tuple[int, ...], tmp_path: Path
) -> None:
    model = write(name, tmp_path)
    convert(model, tmp_path / "out", dtype="auto", mesh=mesh(written_on))
    for size in read_on:
        check_same(load(tmp_path / "out", size), load(model, size))


def test_a_converted_model_has_no_scales_of_keys_and_values(tmp_path: Path) -> None:
    model = write("qwen3", tmp_path)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.self_attn.k_scale"] = np.asarray(0.5, np.float32)
    save_file(tensors, model / "model.safetensors")
    convert(model, tmp_path / "out", dtype="auto", mesh=mesh(1))
    spec = with_kv_scales(model_spec(checkpoint.read_config(model)))
    params = checkpoint.load(tmp_path / "out", spec, dtype=jnp.float32, layout="stacked", mesh=mesh(2))
    scales = params["layers"]["kv_scales"]
    assert (np.asarray(scales) == 1).all() and {shard.data.shape[1] for shard in scales.addressable_shards} == {
        scales.shape[1] // 2
    }
    with pytest.raises(ValueError, match="orbax has no scales of keys and values, which int8 needs"):
        checkpoint.load(tmp_path / "out", spec, dtype=jnp.float32, layout="stacked", needs_kv_scales=True)


def test_norms_over_all_heads_and_replicas(tmp_path: Path) -> None:
    model = write("olmo2", tmp_path)
    convert(model, tmp_path / "out", dtype="auto", mesh=make_mesh(MeshShape(2, 4), jax.devices()))
    check_same(load(tmp_path / "out", 4), load(model, 4))


def test_dtypes_and_stacked_layers(tmp_path: Path) -> None:
    model = write("qwen3", tmp_path)
    convert(model, tmp_path / "out", dtype="bfloat16", mesh=mesh(1))
    assert checkpoint.config_dtype(checkpoint.read_config(tmp_path / "out")) == "bfloat16"
    narrow = load(model, 2, "stacked", jnp.bfloat16)
    check_same(load(tmp_path / "out", 2, "stacked", jnp.bfloat16), narrow)
    wide = load(tmp_path / "out", 2, "stacked")
    assert {x.dtype for x in jax.tree.leaves(wide)} == {jnp.dtype(jnp.float32)}
    chex.assert_trees_all_equal(jax.tree.map(lambda x: x.astype(jnp.bfloat16), wide), narrow)


@pytest.mark.parametrize(("batch", "reads"), [(1, 2), (orbax_tree.BATCH_BYTES, 1)])
def test_small_arrays_are_read_together(
    converted: Path, batch: int, reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import orbax.checkpoint as ocp

    expected, read = load(converted), []
    restore = ocp.Checkpointer.restore

    def counted(*args: Any, **options: Any) -> Any:
        read.append(restore(*args, **options))
        return read[-1]

    monkeypatch.setattr(ocp.Checkpointer, "restore", counted)
    monkeypatch.setattr(orbax_tree, "BATCH_BYTES", batch)
    check_same(load(converted), expected)
    # Two layers of each name in them, and what is outside.
    assert len(read) == reads * len(expected["layers"][0]) + len(expected) - 1


def test_arrays_are_split_on_disk(tmp_path: Path) -> None:
    convert(write("llama", tmp_path), tmp_path / "out", dtype="auto", mesh=mesh(4))
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        found = checkpointer.metadata((tmp_path / "out" / "orbax").absolute()).item_metadata.tree
    # 131 rows and one KV head do not divide by 4: the hidden size, 84, does.
    assert found["embed"].storage.chunk_shape == (131, 21)
    assert found["layers.1.qkv"].storage.chunk_shape == (1, 9 * 12, 21)
    assert found["layers.1.down"].storage.chunk_shape == (84, 30)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("converted")
    convert(write("llama", directory), directory / "out", dtype="auto", mesh=mesh(1))
    return directory / "out"


def refused(directory: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load(directory)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 130}, r"orbax: array embed has shape \(131, 84\), and the config makes it \(130, 84\)"),
        ({"num_hidden_layers": 3}, r"orbax lacks the array layers\.2\.qkv, which should have shape \(1, 108, 84\)"),
        ({"num_hidden_layers": 1}, r"orbax: unexpected array layers\.1\.attention_norm"),
        ({"attention_bias": True}, r"orbax lacks the array layers\.0\.qkv_bias"),
    ],
)
def test_configs_that_do_not_fit(converted: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    shutil.copytree(converted, tmp_path / "out")
    config = checkpoint.read_config(converted) | change
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    refused(tmp_path / "out", message)


# Threads of tensorstore that come too late with the same complaint.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_damaged_trees(converted: Path, tmp_path: Path) -> None:
    for name in ("_METADATA", "manifest.ocdbt", "d"):
        directory = tmp_path / name.strip("_")
        shutil.copytree(converted, directory)
        victim = directory / "orbax" / name
        shutil.rmtree(victim) if victim.is_dir() else victim.unlink()
        refused(directory, f"{directory}/orbax is not a complete orbax tree: convert the model again")
    empty = tmp_path / "empty"
    shutil.copytree(converted, empty)
    shutil.rmtree(empty / "orbax")
    (empty / "orbax").mkdir()
    refused(empty, "orbax is not a complete orbax tree")


# Threads of tensorstore that come too late with the same complaint.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_damaged_array(converted: Path, tmp_path: Path) -> None:
    directory = tmp_path / "out"
    shutil.copytree(converted, directory)
    for file in (directory / "orbax").rglob("d/*"):
        if file.stat().st_size > 100_000:
            file.write_bytes(file.read_bytes()[:50_000])
    refused(directory, r"orbax: array .* cannot be read \(.*\): convert the model again")
    gc.collect()  # what orbax left waiting complains when it is collected: here, and not in the next test


def test_arrays_of_integers_are_refused(converted: Path, tmp_path: Path) -> None:
    params = load(converted)
    params["embed"] = params["embed"].astype(jnp.int32)
    shutil.copyfile(converted / "config.json", tmp_path / "config.json")
    orbax_tree.save(tmp_path / "orbax", params)
    refused(tmp_path, "array embed has dtype int32: supported are bfloat16, float16, float32")


def test_safetensors_need_no_orbax(converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    load(write("llama", tmp_path))
    with pytest.raises(NotImplementedError, match="pip install .*orbax-checkpoint>="):
        load(converted)
