"""Tiny random draft heads on disk, and the model that they belong to."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from jaxvllm.models.families.llama import llama_spec
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.params import Params
from tests.models.seeded_weights import seeded_weights

E, V = 16, 40  # of the model
CONFIG: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": E,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 64,
}
TARGET = llama_spec(HfConfig(CONFIG | {"num_hidden_layers": 8}))
OF_TARGET = {
    name: array.astype(np.float64)
    for name, array in seeded_weights({"embed_tokens": [V, E], "lm_head": [V, E]}, 1, 0.0).items()
}


def layer_shapes(config: Mapping[str, Any], prefix: str, size_in: int) -> dict[str, list[int]]:
    """The tensors of a decoder layer, of which attention reads `size_in`."""
    hidden, ffn, D = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    H, K = config["num_attention_heads"] * D, config["num_key_value_heads"] * D
    shapes = {
        "input_layernorm.weight": [hidden],
        "post_attention_layernorm.weight": [hidden],
        "self_attn.q_proj.weight": [H, size_in],
        "self_attn.k_proj.weight": [K, size_in],
        "self_attn.v_proj.weight": [K, size_in],
        "self_attn.o_proj.weight": [hidden, H],
        "mlp.gate_proj.weight": [ffn, hidden],
        "mlp.up_proj.weight": [ffn, hidden],
        "mlp.down_proj.weight": [hidden, ffn],
    }
    if config.get("attention_bias"):
        shapes |= {f"self_attn.{x}_proj.bias": shapes[f"self_attn.{x}_proj.weight"][:1] for x in "qkvo"}
    if config.get("mlp_bias"):
        shapes |= {f"mlp.{x}_proj.bias": shapes[f"mlp.{x}_proj.weight"][:1] for x in ("gate", "up", "down")}
    return {prefix + name: shape for name, shape in shapes.items()}


def write_head(
    directory: Path, config: Mapping[str, Any], shapes: Mapping[str, list[int]], **integers: np.ndarray
) -> dict[str, np.ndarray]:
    """Writes a head, and returns its tensors in float64."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    tensors = seeded_weights(shapes, 7, 0.0)
    save_file(tensors | integers, directory / "model.safetensors")
    return {name: array.astype(np.float64) for name, array in tensors.items()}


def of_target(own: Params) -> Params:
    """The parameters of the model as far as heads read them, with those of a head."""
    return {
        "embed": jnp.asarray(OF_TARGET["embed_tokens"], jnp.float32),
        "lm_head": jnp.asarray(OF_TARGET["lm_head"], jnp.float32),
        "draft": own,
    }
