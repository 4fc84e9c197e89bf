"""The embedded EAGLE-3 and Medusa heads are small, fit the model, and have the names and shapes of vLLM's formats."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

ASSETS = Path(__file__).resolve().parents[2] / "jaxvllm" / "assets"
LIMIT = 900_000
heads = pytest.mark.parametrize("name", ["demo-eagle3", "demo-medusa"])


def config(name: str) -> dict[str, Any]:
    return json.loads((ASSETS / name / "config.json").read_text())


def stored(name: str) -> dict[str, np.ndarray]:
    return load_file(ASSETS / name / "model.safetensors")


@heads
def test_size_is_under_the_limit(name: str) -> None:
    assert sum(path.stat().st_size for path in (ASSETS / name).iterdir()) <= LIMIT


@heads
def test_head_fits_the_model(name: str) -> None:
    for field in ("hidden_size", "vocab_size", "torch_dtype"):
        assert config(name)[field] == config("demo")[field]


@heads
def test_weights_are_finite_and_were_trained(name: str) -> None:
    for key, value in stored(name).items():
        if key not in ("d2t", "t2d"):
            assert value.dtype == ml_dtypes.bfloat16, key
            assert np.isfinite(value.astype(np.float32)).all(), key
            assert value.astype(np.float32).std() > 0, key


def test_eagle3_has_the_declared_shapes() -> None:
    given = config("demo-eagle3")
    hidden, ffn = given["hidden_size"], given["intermediate_size"]
    query = given["num_attention_heads"] * given["head_dim"]
    key = given["num_key_value_heads"] * given["head_dim"]
    layer = {
        "input_layernorm": (hidden,),
        "hidden_norm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (query, 2 * hidden),
        "self_attn.k_proj": (key, 2 * hidden),
        "self_attn.v_proj": (key, 2 * hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    shapes: dict[str, tuple[int, ...]] = {f"midlayer.{part}.weight": shape for part, shape in layer.items()}
    shapes |= {
        "fc.weight": (hidden, 3 * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (given["draft_vocab_size"], hidden),
        "d2t": (given["draft_vocab_size"],),
        "t2d": (given["vocab_size"],),
    }
    assert {name: value.shape for name, value in stored("demo-eagle3").items()} == shapes
    layers = given["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert len(layers) == 3
    assert max(layers) <= config("demo")["num_hidden_layers"]


def test_eagle3_maps_its_vocabulary_both_ways() -> None:
    tensors = stored("demo-eagle3")
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (np.int64, np.bool_)
    ids = np.arange(len(tensors["d2t"])) + tensors["d2t"]
    np.testing.assert_array_equal(ids, np.flatnonzero(tensors["t2d"]))
    assert config("demo")["eos_token_id"] in ids


def test_medusa_has_the_declared_shapes() -> None:
    given = config("demo-medusa")
    hidden = given["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(given["num_heads"]):
        shapes |= {f"blocks.{head}.layers.0.weight": (hidden, hidden), f"blocks.{head}.layers.0.bias": (hidden,)}
    assert {name: value.shape for name, value in stored("demo-medusa").items()} == shapes
    assert given["num_hidden_layers"] == 1
    assert given["original_lm_head"] is True
