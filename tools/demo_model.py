"""The demo model in plain JAX: a Llama decoder to train with, its simple decoding loop, and its Hugging Face files.

It is apart from the engine on purpose, so that the engine is compared with independent code.
"""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from tools.demo_tokenizer import BOS, CHAT_TEMPLATE, END, PAD, VOCAB_SIZE, token_id

Params = dict[str, jax.Array]
MAX_POSITIONS = 1024
ROPE_THETA = 10000.0
NORM_EPSILON = 1e-5


@dataclass(frozen=True)
class ModelShape:
    """The sizes of one Llama decoder (E, L, H, K, D, F)."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every tensor by its Hugging Face name, stored `[out, in]`."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB_SIZE, self.hidden)}
        query, key = self.heads * self.head_size, self.kv_heads * self.head_size
        for layer in range(self.layers):
            at = f"model.layers.{layer}."
            shapes |= {
                f"{at}input_layernorm.weight": (self.hidden,),
                f"{at}self_attn.q_proj.weight": (query, self.hidden),
                f"{at}self_attn.k_proj.weight": (key, self.hidden),
                f"{at}self_attn.v_proj.weight": (key, self.hidden),
                f"{at}self_attn.o_proj.weight": (self.hidden, query),
                f"{at}post_attention_layernorm.weight": (self.hidden,),
                f"{at}mlp.gate_proj.weight": (self.ffn, self.hidden),
                f"{at}mlp.up_proj.weight": (self.ffn, self.hidden),
                f"{at}mlp.down_proj.weight": (self.hidden, self.ffn),
            }
        return shapes | {"model.norm.weight": (self.hidden,)}

    def init(self, seed: int) -> Params:
        """Makes random float32 parameters: norms 1, matrices normal with variance 1 / inputs, embeddings with 0.02."""
        rng = np.random.default_rng(seed)
        params: Params = {}
        for name, shape in self.tensors().items():
            if len(shape) == 1:
                value = np.ones(shape)
            else:
                scale = 0.02 if "embed" in name else shape[1] ** -0.5
                # Branches that add to the residual stream start small, so that depth does not add variance.
                scale *= (2 * self.layers) ** -0.5 if "o_proj" in name or "down_proj" in name else 1.0
                value = rng.standard_normal(shape) * scale
            params[name] = jnp.asarray(value, jnp.float32)
        return params


DEMO = ModelShape(hidden=192, layers=4, heads=6, kv_heads=2, head_size=32, ffn=512)
DRAFT = ModelShape(hidden=96, layers=2, heads=3, kv_heads=1, head_size=32, ffn=192)


def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Divides x f32[..., E] by its root mean square and multiplies with weight f32[E]."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + NORM_EPSILON) * weight


def rope(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotates halves: x f32[..., N, D] with one position for each leading index of `positions`."""
    half = x.shape[-1] // 2
    angles = positions[..., None, None].astype(jnp.float32) * ROPE_THETA ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    low, high = x[..., :half], x[..., half:]
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


def _qkv(shape: ModelShape, params: Params, at: str, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, ...]:
    def heads(name: str, count: int) -> jax.Array:
        return (x @ params[f"{at}self_attn.{name}_proj.weight"].T).reshape(*x.shape[:-1], count, shape.head_size)

    query, key = heads("q", shape.heads), heads("k", shape.kv_heads)
    return rope(query, positions), rope(key, positions), heads("v", shape.kv_heads)


def feed_forward(params: Params, at: str, x: jax.Array) -> jax.Array:
    """Computes the gated feed-forward f32[..., E] of the layer whose tensors' names begin with `at`."""
    gate = jax.nn.silu(x @ params[f"{at}mlp.gate_proj.weight"].T)
    return (gate * (x @ params[f"{at}mlp.up_proj.weight"].T)) @ params[f"{at}mlp.down_proj.weight"].T


def attention_bias(segments: jax.Array) -> jax.Array:
    """Returns the bias f32[B, T, T] of scores: 0 where a token (row) sees another of its segment i32[B, T], else -1e9."""
    causal = jnp.tril(jnp.ones((segments.shape[1], segments.shape[1]), bool))
    return jnp.where(causal & (segments[:, :, None] == segments[:, None, :]), 0.0, -1e9)


def residual_states(
    shape: ModelShape, params: Params, tokens: jax.Array, segments: jax.Array
) -> tuple[list[jax.Array], jax.Array]:
    """Computes the states f32[B, T, E] of tokens i32[B, T]. A token attends to earlier ones of its segment i32[B, T].

    The first result has the residual stream after 0, 1, ..., L layers. The second is the last of them after the final
    norm, which the LM head reads.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    bias = attention_bias(segments)[:, None, None]
    x = params["model.embed_tokens.weight"][tokens]
    states = [x]
    group = shape.heads // shape.kv_heads
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        normed = norm(x, params[at + "input_layernorm.weight"])
        query, key, value = _qkv(shape, params, at, normed, positions)
        query = query.reshape(*tokens.shape, shape.kv_heads, group, shape.head_size)
        scores = jnp.einsum("btkgd,bskd->bkgts", query, key) * shape.head_size**-0.5 + bias
        mixed = jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(scores, -1), value)
        x = x + mixed.reshape(*tokens.shape, -1) @ params[at + "self_attn.o_proj.weight"].T
        x = x + feed_forward(params, at, norm(x, params[at + "post_attention_layernorm.weight"]))
        states.append(x)
    return states, norm(x, params["model.norm.weight"])


def logits(shape: ModelShape, params: Params, tokens: jax.Array, segments: jax.Array) -> jax.Array:
    """Computes logits f32[B, T, V] of tokens i32[B, T]. A token attends to earlier ones of its segment i32[B, T]."""
    return residual_states(shape, params, tokens, segments)[1] @ params["model.embed_tokens.weight"].T


@partial(jax.jit, static_argnums=(0, 4))
def _decode(
    shape: ModelShape,
    params: Params,
    prompts: jax.Array,
    lengths: jax.Array,
    total: int,
    temperature: jax.Array,
    key: jax.Array,
) -> jax.Array:
    rows = prompts.shape[0]
    group = shape.heads // shape.kv_heads
    cache = jnp.zeros((shape.layers, 2, rows, shape.kv_heads, total, shape.head_size), jnp.float32)

    def step(carry: tuple[jax.Array, jax.Array], position: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        cache, sampled = carry
        token = jnp.where(position < lengths, prompts[:, position], sampled)
        x = params["model.embed_tokens.weight"][token]
        seen = jnp.arange(total) <= position
        for layer in range(shape.layers):
            at = f"model.layers.{layer}."
            normed = norm(x, params[at + "input_layernorm.weight"])
            query, new_key, value = _qkv(shape, params, at, normed, jnp.full((rows,), position))
            cache = cache.at[layer, 0, :, :, position].set(new_key).at[layer, 1, :, :, position].set(value)
            query = query.reshape(rows, shape.kv_heads, group, shape.head_size)
            scores = jnp.einsum("bkgd,bksd->bkgs", query, cache[layer, 0]) * shape.head_size**-0.5
            weights = jax.nn.softmax(jnp.where(seen, scores, -1e9), -1)
            mixed = jnp.einsum("bkgs,bksd->bkgd", weights, cache[layer, 1]).reshape(rows, -1)
            x = x + mixed @ params[at + "self_attn.o_proj.weight"].T
            x = x + feed_forward(params, at, norm(x, params[at + "post_attention_layernorm.weight"]))
        scored = norm(x, params["model.norm.weight"]) @ params["model.embed_tokens.weight"].T
        noise = jax.random.gumbel(jax.random.fold_in(key, position), scored.shape)
        chosen = jnp.argmax(scored + temperature * noise, -1).astype(jnp.int32)
        return (cache, chosen), token

    start = (cache, jnp.zeros((rows,), jnp.int32))
    return jax.lax.scan(step, start, jnp.arange(total))[1].T


def decode(
    shape: ModelShape,
    params: Params,
    prompts: list[list[int]],
    max_tokens: int,
    end: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[list[int]]:
    """Returns the tokens that follow each prompt, without `end`.

    They are greedy at temperature 0, and otherwise sampled from the whole distribution with `seed`.
    """
    longest = max(map(len, prompts))
    total = min(MAX_POSITIONS, longest + max_tokens)
    padded = np.zeros((len(prompts), total), np.int32)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = prompt
    lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
    tokens = np.asarray(
        _decode(
            shape,
            params,
            jnp.asarray(padded),
            jnp.asarray(lengths),
            total,
            jnp.float32(temperature),
            jax.random.key(seed),
        )
    )
    outputs = []
    for row, prompt in zip(tokens.tolist(), prompts, strict=True):
        new = row[len(prompt) : len(prompt) + max_tokens]
        outputs.append(new[: new.index(end)] if end in new else new)
    return outputs


def write_json(path: Path, value: object) -> None:
    """Writes a JSON file as the ones of Hugging Face look."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def bfloat16(params: Params) -> dict[str, np.ndarray]:
    """Returns the parameters as they are stored."""
    return {name: np.asarray(value).astype(ml_dtypes.bfloat16) for name, value in params.items()}


def write_weights(path: Path, weights: dict[str, np.ndarray]) -> None:
    """Writes a safetensors file."""
    save_file(weights, path, metadata={"format": "pt"})
    # safetensors makes the file readable for its owner only, but other users read an installed package.
    path.chmod(0o644)


def save(folder: Path, shape: ModelShape, params: Params, tokenizer: Tokenizer) -> None:
    """Writes a Hugging Face checkpoint: configuration, tokenizer with chat template, weights in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    bos, end, pad = (token_id(tokenizer, token) for token in (BOS, END, PAD))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB_SIZE,
        "hidden_size": shape.hidden, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_size, "intermediate_size": shape.ffn,
        "hidden_act": "silu", "rms_norm_eps": NORM_EPSILON, "rope_theta": ROPE_THETA, "rope_scaling": None,
        "max_position_embeddings": MAX_POSITIONS, "tie_word_embeddings": True, "attention_bias": False,
        "mlp_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True,
        "bos_token_id": bos, "eos_token_id": end, "pad_token_id": pad, "torch_dtype": "bfloat16",
    }  # fmt: skip
    write_json(folder / "config.json", config)
    generation = {
        "bos_token_id": bos,
        "eos_token_id": end,
        "pad_token_id": pad,
        "do_sample": True,
        "temperature": 0.7,
    }
    write_json(folder / "generation_config.json", generation)
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": END, "pad_token": PAD,
            "add_bos_token": True, "model_max_length": MAX_POSITIONS, "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )  # fmt: skip
    tokenizer.save(str(folder / "tokenizer.json"))
    write_weights(folder / "model.safetensors", bfloat16(params))


def load(folder: Path, shape: ModelShape) -> Params:
    """Loads the parameters of a saved checkpoint in float32."""
    stored = load_file(folder / "model.safetensors")
    return {name: jnp.asarray(stored[name].astype(np.float32)) for name in shape.tensors()}
