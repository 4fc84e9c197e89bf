"""Draft heads in NumPy and float64, from the papers and the published formats, by the names of their tensors.

Position i of a sequence is the pair of token i + 1 and what the model thought of token i, as in the papers.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

Tensors = Mapping[str, np.ndarray]


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def rotated(x: np.ndarray, theta: float) -> np.ndarray:
    """x [T, H, D] at positions 0, 1, ..., in halves."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def linear(t: Tensors, name: str, x: np.ndarray) -> np.ndarray:
    return x @ t[f"{name}.weight"].T + t.get(f"{name}.bias", 0)


def layer(t: Tensors, config: Mapping[str, Any], prefix: str, x: np.ndarray, h: np.ndarray) -> np.ndarray:
    """Adds to x [T, E] the attention over `h`, and the FFN over the norm of the sum."""
    H, K, D = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    T, eps = len(h), config["rms_norm_eps"]
    q = linear(t, f"{prefix}self_attn.q_proj", h).reshape(T, H, D)
    k = linear(t, f"{prefix}self_attn.k_proj", h).reshape(T, K, D)
    v = linear(t, f"{prefix}self_attn.v_proj", h).reshape(T, K, D)
    if f"{prefix}self_attn.q_norm.weight" in t:
        q = rms_norm(q, t[f"{prefix}self_attn.q_norm.weight"], eps)
        k = rms_norm(k, t[f"{prefix}self_attn.k_norm.weight"], eps)
    q, k = rotated(q, config["rope_theta"]), rotated(k, config["rope_theta"])
    out = np.zeros((T, H, D))
    for head in range(H):
        scores = q[:, head] @ k[:, head * K // H].T / np.sqrt(D)
        scores[np.triu_indices(T, 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, head * K // H]
    x = x + linear(t, f"{prefix}self_attn.o_proj", out.reshape(T, H * D))
    h = rms_norm(x, t[f"{prefix}post_attention_layernorm.weight"], eps)
    gated = silu(linear(t, f"{prefix}mlp.gate_proj", h)) * linear(t, f"{prefix}mlp.up_proj", h)
    return x + linear(t, f"{prefix}mlp.down_proj", gated)


def eagle(t: Tensors, config: Mapping[str, Any], embedding: np.ndarray, features: np.ndarray) -> np.ndarray:
    """What the head thinks [T, E]: its hidden states, and its features."""
    x = linear(t, "fc", np.concatenate([embedding, features], -1))
    for number in range(config["num_hidden_layers"]):
        norm = f"layers.{number}.input_layernorm.weight"
        h = rms_norm(x, t[norm], config["rms_norm_eps"]) if number else x
        x = layer(t, config, f"layers.{number}.", x, h)
    return x


def eagle3_features(t: Tensors, config: Mapping[str, Any], states: np.ndarray) -> np.ndarray:
    """The features [T, E] of the model's states [N, T, E']."""
    eps = config["rms_norm_eps"]
    if config.get("fc_norm"):
        states = np.stack([rms_norm(state, t[f"fc_norm.{i}.weight"], eps) for i, state in enumerate(states)])
    x = np.concatenate(list(states), -1)
    if config.get("norm_before_fc"):
        x = rms_norm(x, t["input_norm.weight"], eps)
    return linear(t, "fc", x)


def eagle3(
    t: Tensors, config: Mapping[str, Any], embedding: np.ndarray, features: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states for the LM head, and the next features, both [T, E]."""
    eps = config["rms_norm_eps"]
    names = [f"layers.{number}." for number in range(config["num_hidden_layers"])]
    if "midlayer.hidden_norm.weight" in t:
        names[0] = "midlayer."
    normed = rms_norm(features, t[f"{names[0]}hidden_norm.weight"], eps)
    h = np.concatenate([rms_norm(embedding, t[f"{names[0]}input_layernorm.weight"], eps), normed], -1)
    x = layer(t, config, names[0], normed if config.get("norm_before_residual") else features, h)
    for name in names[1:]:
        x = layer(t, config, name, x, rms_norm(x, t[f"{name}input_layernorm.weight"], eps))
    hidden = rms_norm(x, t["norm.weight"], eps)
    return hidden, hidden if config.get("norm_output") else x


def mtp(
    t: Tensors,
    config: Mapping[str, Any],
    names: tuple[str, str, str, str],
    prefix: str,
    embedding: np.ndarray,
    features: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states for the LM head, and the next features, both [T, E].

    names: of the norms of embeddings and features, of what joins them, and of the last norm
    MiMo (`input_proj`) joins them the other way round, and its features are what is before the last norm.
    """
    of_embedding, of_feature, join, last = names
    eps = config["rms_norm_eps"]
    parts = [
        rms_norm(embedding, t[f"{prefix}{of_embedding}.weight"], eps),
        rms_norm(features, t[f"{prefix}{of_feature}.weight"], eps),
    ]
    x = linear(t, f"{prefix}{join}", np.concatenate(parts[::-1] if join == "input_proj" else parts, -1))
    x = layer(t, config, prefix, x, rms_norm(x, t[f"{prefix}input_layernorm.weight"], eps))
    hidden = rms_norm(x, t[f"{prefix}{last}.weight"], eps)
    return hidden, x if join == "input_proj" else hidden


def spread_over(logits: np.ndarray, ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """Logits over some tokens become logits over all: the others are impossible."""
    whole = np.full((len(logits), vocab_size), -np.inf)
    whole[:, ids] = logits
    return whole
