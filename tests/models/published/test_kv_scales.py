"""Scales of keys and values in a checkpoint, under every name that they are published with."""

import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxvllm.models import checkpoint
from jaxvllm.models.families import model_spec
from jaxvllm.models.kv_scales import KV_SCALE_ENDS, with_kv_scales
from jaxvllm.models.spread import Spread
from sharding.mesh import MeshShape
from sharding.placement import make_mesh
from tests.models.fixture import Fixture
from tests.models.published.written import write_model

LLAMA = Fixture.load("llama")
K = LLAMA.config["num_key_value_heads"]
FP8 = {"quant_method": "fp8"}
PASSED_OVER = ("q_proj.output_scale", "prob_output_scale")
ONE, OTHER = np.float32(0.25), np.float32(0.5)


def written(directory: Path, scales: dict[str, Any], settings: dict[str, Any] | None = None) -> Path:
    """A Llama, of whose first layer these are scales; the others have none."""
    config = LLAMA.config | ({} if settings is None else {"quantization_config": settings})
    tensors = {f"model.layers.0.self_attn.{name}": np.asarray(array) for name, array in scales.items()}
    return write_model(directory, config, LLAMA.weights() | tensors)


def loaded(directory: Path, layout: Any = "separate", mesh: Any = None, **options: Any) -> Any:
    spec = with_kv_scales(model_spec(LLAMA.config))
    return checkpoint.load(directory, spec, dtype="float32", layout=layout, mesh=mesh, **options)


@pytest.mark.parametrize("settings", [None, FP8], ids=["plain", "fp8"])
@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ({"k_scale": ONE, "v_scale": [OTHER], "q_scale": ONE, "prob_scale": ONE}, (ONE, OTHER)),
        ({"k_proj.k_scale": ONE, "v_proj.v_scale": OTHER, "k_zero_point": ONE}, (ONE, OTHER)),
        ({"qkv_proj.k_scale": ONE, "qkv_proj.v_scale": OTHER}, (ONE, OTHER)),
        ({"k_cache.scale": ONE, "v_cache.scale": OTHER, "q.scale": ONE}, (ONE, OTHER)),
        (
            {"k_proj.output_scale": ONE, "v_proj.output_scale": OTHER} | dict.fromkeys(PASSED_OVER, ONE),
            (ONE, OTHER),
        ),
        ({"attn.kv_scale": ONE}, (ONE, ONE)),
        ({"attn.k_scale": OTHER}, (OTHER, OTHER)),
    ],
)
def test_one_scale_for_all_heads(
    names: dict[str, Any], expected: tuple[float, float], settings: dict[str, Any] | None, tmp_path: Path
) -> None:
    scales = {name: np.asarray(value, np.float32) for name, value in names.items()}
    first, *others = loaded(written(tmp_path, scales, settings))["layers"]
    np.testing.assert_array_equal(first["kv_scales"], np.tile(expected, (K, 1)))
    assert all((layer["kv_scales"] == 1).all() for layer in others)
    # Without pages in eight bits there is nothing to scale, and the model is the same.
    plain = checkpoint.load(tmp_path, model_spec(LLAMA.config), dtype="float32", layout="separate")
    assert set(plain["layers"][0]) == set(first) - {"kv_scales"}


@pytest.mark.parametrize("shape", [(K,), (K, 1, 1)])
def test_scales_of_heads_go_where_their_heads_are(shape: tuple[int, ...], tmp_path: Path) -> None:
    keys, values = np.random.default_rng(0).uniform(0.1, 1, (2, K)).astype(np.float32)
    path = written(tmp_path, {"k_scale": keys.reshape(shape), "v_scale": values.reshape(shape)})
    one = loaded(path, "stacked")["layers"]["kv_scales"]
    np.testing.assert_array_equal(one[0], np.stack([keys, values], axis=1))
    assert one.dtype == np.float32 and (np.asarray(one[1:]) == 1).all()
    # On twice as many devices as there are heads each head has two copies, and its scales have them too.
    mesh = make_mesh(MeshShape(1, 2 * K), jax.devices())
    copies = loaded(path, "stacked", mesh)["layers"]["kv_scales"]
    np.testing.assert_array_equal(copies, np.repeat(one, 2, axis=1))
    assert {shard.data.shape for shard in copies.addressable_shards} == {(len(one), 1, 2)}
    spread = Spread.on(with_kv_scales(model_spec(LLAMA.config)), mesh)
    assert spread.shard.layers[0].declare()["kv_scales"].shape == (1, 2)


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({"k_scale": np.ones(K + 1, np.float32)}, rf"k_scale has shape \({K + 1},\), and should be one scale or {K}"),
        ({"k_scale": ONE, "k_proj.k_scale": OTHER}, "are both scales of the same keys"),
        ({"k_scale": np.int64(1)}, "k_scale has dtype I64"),
        (
            {"k_scale": ONE, "v_scale": np.float32(0)},
            r"model.safetensors: tensor .*\.v_scale has a scale of 0\.0: scales",
        ),
        ({"k_scale": np.float32(-1)}, "k_scale has a scale of -1.0"),
        ({"k_scale": np.asarray([1] * (K - 1) + [np.nan], np.float32)}, "k_scale has a scale of nan"),
        ({"kv_scale": np.float32(np.inf)}, "kv_scale has a scale of inf"),
    ],
)
def test_other_scales_are_refused(scales: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        loaded(written(tmp_path, scales))


def test_layers_without_scales_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    count = LLAMA.config["num_hidden_layers"]
    with caplog.at_level(logging.WARNING):
        params = loaded(written(tmp_path, {}))
        loaded(written(tmp_path / "one", {"k_scale": ONE}))
    assert f"{count} of {count} layers have no k_scale or v_scale" in caplog.text
    assert f"{count - 1} of {count} layers have no k_scale or v_scale" in caplog.text
    assert all((layer["kv_scales"] == 1).all() for layer in params["layers"])


def test_where_scales_are_needed_every_layer_must_have_some(tmp_path: Path) -> None:
    path = written(tmp_path, {"k_scale": ONE})
    missing = "{0}: layer {1} has no scale of its keys and values, such as model.layers.{1}.self_attn.k_scale"
    with pytest.raises(ValueError, match=missing.format("model.safetensors", 1)):
        loaded(path, needs_kv_scales=True)
    with pytest.raises(ValueError, match=missing.format("the given weights", 0)):
        loaded(path, needs_kv_scales=True, tensors=LLAMA.weights())


def test_no_other_tensor_is_taken_for_a_scale() -> None:
    names = Fixture.load("gemma3n").shapes
    assert any("output_scale" in name for name in names)
    assert not any(name.endswith(KV_SCALE_ENDS) for name in names)
