"""Step 3, which transformers does not have, computes what a NumPy version computes in float64."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.models import checkpoint
from jaxvllm.models.families import model_spec
from tests.models.fixture import Fixture
from tests.models.heads.reference import linear, rms_norm, rotated, silu
from tests.models.test_families_sharded import check_fixture

E, H, D, RANK, EXPERTS, TOP_K = 32, 4, 8, 20, 5, 2
CONFIG: dict[str, Any] = {
    "architectures": ["Step3TextForCausalLM"],
    "vocab_size": 61,
    "hidden_size": E,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": H,
    "num_attention_groups": 1,
    "head_dim": D,
    "share_q_dim": RANK,
    "max_position_embedding": 32,
    "rope_theta": 1000.0,
    "rms_norm_eps": 1e-4,
    "moe_num_experts": EXPERTS,
    "moe_top_k": TOP_K,
    "moe_intermediate_size": 12,
    "share_expert_dim": 16,
    "moe_layers_enum": "1,2",
}
LOADED: dict[str, Any] = {"dtype": jnp.float32, "layout": "separate"}
PROMPTS = [[7], np.random.default_rng(2).integers(0, 61, 19).tolist()]


def shapes() -> dict[str, list[int]]:
    found = {"model.embed_tokens.weight": [61, E], "model.norm.weight": [E], "lm_head.weight": [61, E]}
    for layer in range(3):
        parts = {"input_layernorm": [E], "post_attention_layernorm": [E], "self_attn.inter_norm": [RANK]}
        parts |= {"self_attn.q_proj": [RANK, E], "self_attn.wq": [H * D, RANK], "self_attn.o_proj": [E, H * D]}
        parts |= {f"self_attn.{letter}_proj": [D, E] for letter in "kv"}
        for ffn, size in (("share_expert", 16),) if layer else (("mlp", 40),):
            parts |= {f"{ffn}.{name}_proj": [size, E] for name in ("gate", "up")} | {f"{ffn}.down_proj": [E, size]}
        if layer:
            parts |= {f"moe.{name}_proj": [EXPERTS, 12, E] for name in ("gate", "up")}
            parts |= {"moe.down_proj": [EXPERTS, E, 12], "moe.gate": [EXPERTS, E]}
        found |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    return found


def gated(t: Mapping[str, np.ndarray], prefix: str, x: np.ndarray) -> np.ndarray:
    return linear(t, f"{prefix}down_proj", silu(linear(t, f"{prefix}gate_proj", x)) * linear(t, f"{prefix}up_proj", x))


def attention(t: Mapping[str, np.ndarray], prefix: str, x: np.ndarray) -> np.ndarray:
    T = len(x)
    latent = rms_norm(linear(t, f"{prefix}q_proj", x), t[f"{prefix}inter_norm.weight"], CONFIG["rms_norm_eps"])
    q = rotated(linear(t, f"{prefix}wq", latent).reshape(T, H, D), CONFIG["rope_theta"])
    k = rotated(linear(t, f"{prefix}k_proj", x).reshape(T, 1, D), CONFIG["rope_theta"])[:, 0]
    scores = np.einsum("qhd,kd->hqk", q, k) / np.sqrt(D)
    scores[:, *np.triu_indices(T, 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("hqk,kd->qhd", weights, linear(t, f"{prefix}v_proj", x))
    return linear(t, f"{prefix}o_proj", out.reshape(T, H * D))


def experts(t: Mapping[str, np.ndarray], prefix: str, x: np.ndarray) -> np.ndarray:
    """Each counts as much as in the softmax over all, which is not normalized again."""
    logits = linear(t, f"{prefix}gate", x)
    scores = np.exp(logits - logits.max(-1, keepdims=True))
    scores /= scores.sum(-1, keepdims=True)
    out = np.zeros_like(x)
    for token, row in enumerate(x):
        for expert in np.argsort(-scores[token])[:TOP_K]:
            gate, up, down = (t[f"{prefix}{name}_proj.weight"][expert] for name in ("gate", "up", "down"))
            out[token] += scores[token, expert] * (down @ (silu(gate @ row) * (up @ row)))
    return out


def reference(weights: Mapping[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """The logits f64[T, V] of one sequence."""
    t = {name: array.astype(np.float64) for name, array in weights.items()}
    x, eps = t["model.embed_tokens.weight"][tokens], CONFIG["rms_norm_eps"]
    for number in range(3):
        start = f"model.layers.{number}."
        x = x + attention(t, f"{start}self_attn.", rms_norm(x, t[f"{start}input_layernorm.weight"], eps))
        h = rms_norm(x, t[f"{start}post_attention_layernorm.weight"], eps)
        if number:
            x = x + gated(t, f"{start}share_expert.", h) + experts(t, f"{start}moe.", h)
        else:
            x = x + gated(t, f"{start}mlp.", h)
    return linear(t, "lm_head", rms_norm(x, t["model.norm.weight"], eps))


def fixture() -> Fixture:
    one = Fixture("step3", CONFIG, 32, PROMPTS, [], np.zeros(0), shapes(), seed=4, norm_offset=0.0)
    logits = np.stack([reference(one.weights(), prompt)[-1] for prompt in PROMPTS])
    return replace(one, logits=logits, greedy=logits.argmax(-1, keepdims=True).tolist())


@pytest.mark.parametrize("size", [1, 4])
def test_logits_are_those_of_the_reference(size: int, tmp_path: Path) -> None:
    check_fixture(fixture(), size, "stacked", tmp_path)


def test_inside_the_multimodal_checkpoint(tmp_path: Path) -> None:
    plain, spec = fixture(), model_spec(CONFIG)
    text = {key: value for key, value in CONFIG.items() if key != "architectures"}
    config = {"architectures": ["Step3VLForConditionalGeneration"], "text_config": text | {"moe_layers_enum": [1, 2]}}
    assert model_spec(config) == spec
    more = {"vision_model.conv1.weight": [2, 2], "vit_large_projector.weight": [2, 2]}
    beside = replace(plain, config=config, shapes=plain.shapes | more)
    trees = [
        checkpoint.load(one.write_checkpoint(tmp_path / one.config["architectures"][0]), spec, **LOADED)
        for one in (plain, beside)
    ]
    chex.assert_trees_all_equal(*trees)


@pytest.mark.parametrize("change", [{"num_attention_groups": 2}, {"attention_bias": True}, {"hidden_act": "gelu"}])
def test_what_no_step3_has_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        model_spec(CONFIG | change)
