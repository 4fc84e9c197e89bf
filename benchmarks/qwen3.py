"""Models of the Qwen3 family with random weights, in any size, for benchmarks."""

import json
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


def write_weights(directory: Path, config: dict[str, Any]) -> None:
    """Writes random weights of `config`, whose embeddings are tied, in the dtype that it states."""
    hidden, ffn, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    of_layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv_heads, hidden),
        "self_attn.v_proj": (kv_heads, hidden),
        "self_attn.o_proj": (hidden, heads),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    random = np.random.default_rng(0)
    dtype = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}[config["torch_dtype"]]
    tensors = {
        name: (random.standard_normal(shape, np.float32) * np.float32(0.02)).astype(dtype, copy=False)
        for name, shape in shapes.items()
    }
    save_file(tensors, directory / "model.safetensors")
