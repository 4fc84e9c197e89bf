"""Models of the Qwen3 family with random weights, in any size, for benchmarks."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file


def qwen3(
    layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, head_size: int, vocab: int, **others: Any
) -> dict[str, Any]:
    """Returns a config.json, in which `others` replace what all models have."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "bfloat16",
    } | others


def qwen3_moe(
    layers: int,
    hidden: int,
    ffn: int,
    experts: int,
    top_k: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    vocab: int,
    **others: Any,
) -> dict[str, Any]:
    """Returns a config.json whose layers all have experts of size `ffn`, of which a token chooses `top_k`."""
    of_experts = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": ffn,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return qwen3(layers, hidden, ffn, heads, kv_heads, head_size, vocab, **(of_experts | others))


def qwen3_600m(**others: Any) -> dict[str, Any]:
    """Returns the config.json of the size of Qwen3 0.6B."""
    return qwen3(28, 1024, 3072, 16, 8, 128, 151_936, tie_word_embeddings=True, **others)


MODEL_S = qwen3(8, 384, 2048, 6, 2, 64, 4096, max_position_embeddings=1024, rope_theta=1e4, torch_dtype="float32")
MODEL_EXPERTS = qwen3_moe(
    8, 512, 256, 32, 4, 8, 2, 64, 4096, max_position_embeddings=1024, rope_theta=1e4, torch_dtype="float32"
)


def write_model(directory: Path, config: dict[str, Any]) -> None:
    """Writes a checkpoint without weights. Its tokenizer has a word for each of the first tokens: t0, t1, ..."""
    vocabulary = {f"t{token}": token for token in range(min(4096, config["vocab_size"]))}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"},
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))


def weight_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor of a checkpoint of `config`, by name."""
    hidden, ffn, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    of_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv_heads, hidden),
        "self_attn.v_proj": (kv_heads, hidden),
        "self_attn.o_proj": (hidden, heads),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
    }
    networks = ["mlp"]
    if num_experts := config.get("num_experts"):
        ffn = config["moe_intermediate_size"]
        of_layer["mlp.gate"] = (num_experts, hidden)
        networks = [f"mlp.experts.{expert}" for expert in range(num_experts)]
    for network in networks:
        of_layer |= {f"{network}.{name}_proj": (ffn, hidden) for name in ("gate", "up")}
        of_layer[f"{network}.down_proj"] = (hidden, ffn)
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    return shapes


def random_weights(config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of a checkpoint of `config` in the dtype that it states, the same in every call.

    Norms are ones. Matrices keep the variance of what they multiply, so that tokens depend on every layer, and two
    engines that choose the same ones run the same model.
    """
    random = np.random.default_rng(0)
    dtype = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}[config["torch_dtype"]]
    for name, shape in weight_shapes(config).items():
        tensor = np.ones(shape, np.float32)
        if len(shape) == 2:
            tensor = random.standard_normal(shape, np.float32) / np.float32(shape[1] ** 0.5)
        yield name, tensor.astype(dtype, copy=False)


def write_weights(directory: Path, config: dict[str, Any]) -> None:
    """Writes the `random_weights` of `config`."""
    save_file(dict(random_weights(config)), directory / "model.safetensors")
