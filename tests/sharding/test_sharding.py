"""Mesh shapes, the table of axes, and parameters that come out split."""

import subprocess
import sys

import jax
import pytest
from jax.sharding import PartitionSpec

from sharding.mesh import MeshShape
from sharding.placement import make_mesh
from sharding.rules import partition_spec


def test_shapes_are_parsed() -> None:
    assert MeshShape.parse("2x4") == MeshShape(data=2, model=4)
    assert str(MeshShape.parse("1x8")) == "1x8"
    assert MeshShape(2, 4).num_devices == 8


@pytest.mark.parametrize("text", ["", "8", "1x", "x", "1x2x3", "1X8", "-1x8", "1.0x2", "²x1", " 1x8"])
def test_other_texts_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match="is not DxM: write replicas") as caught:
        MeshShape.parse(text)
    assert "\n" not in str(caught.value)


def test_empty_axes_are_refused() -> None:
    with pytest.raises(ValueError, match="mesh 0x8 has an empty axis"):
        MeshShape.parse("0x8")


def test_more_devices_than_there_are() -> None:
    with pytest.raises(ValueError, match="mesh 1x99 needs 99 devices"):
        make_mesh(MeshShape(1, 99), jax.devices())


def test_axes_become_mesh_axes() -> None:
    assert partition_spec(("layers", "kv_heads", None, "embed")) == PartitionSpec(None, "model", None, None)


def test_collisions_and_unknown_axes_are_refused() -> None:
    with pytest.raises(ValueError, match="two axes of .* over the mesh axis 'model'"):
        partition_spec(("heads", "vocab"))
    with pytest.raises(ValueError, match="unknown logical axis 'time'.*vocab, embed"):
        partition_spec(("time",))


SPLIT = """
import jax, numpy as np, jax.numpy as jnp, tempfile, pathlib
from jaxvllm.models import checkpoint
from jaxvllm.models.families import model_spec
from sharding.mesh import MeshShape
from sharding.placement import make_mesh, place
from tests.models.dense import dense_logits
from tests.models.fixture import Fixture

fixture = Fixture.load("phi3")
config = fixture.config | {"vocab_size": 140}
fixture.shapes["lm_head.weight"][0] = fixture.shapes["model.embed_tokens.weight"][0] = 140
spec = model_spec(config, fixture.max_model_len)
directory = fixture.write_checkpoint(pathlib.Path(tempfile.mkdtemp()))
(directory / "config.json").write_text(__import__("json").dumps(config))
mesh = make_mesh(MeshShape(1, 2), jax.devices())
whole = checkpoint.load(directory, spec, dtype=jnp.float32, layout="stacked")
logits = dense_logits(whole, spec, fixture.prompts[3])
for layout in ("separate", "stacked"):
    split = checkpoint.load(directory, spec, dtype=jnp.float32, layout=layout, place=place(mesh))
    qkv = split["layers"][0]["qkv"] if layout == "separate" else split["layers"]["qkv"]
    assert qkv.addressable_shards[0].data.size * 2 == qkv.size
    got = jax.jit(lambda p: dense_logits(p, spec, fixture.prompts[3]))(split)
    np.testing.assert_allclose(np.asarray(got), np.asarray(logits), atol=1e-4)
print("same")
"""


def test_a_checkpoint_lands_in_shards_and_computes_the_same() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SPLIT],
        capture_output=True,
        text=True,
        env={"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu", "PYTHONPATH": "."},
    )
    assert done.stdout == "same\n", done.stderr
