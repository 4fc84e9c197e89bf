"""EAGLE-3 and Medusa heads for the demo model in plain JAX, and their files with the names of vLLM's formats.

They are apart from the engine on purpose, so that the engine is compared with independent code.

EAGLE-3 (arXiv 2503.01840) is one decoder layer that guesses tokens one after the other. Position p reads token p and a
feature of position p - 1, and guesses token p + 1. Where the target has computed position p - 1, the feature is `fc` of
three of its residual states. After the last such position, the head's own output x stands in. Position 0 has nothing
before it and reads its own feature.

Medusa (arXiv 2401.10774) guesses several tokens at once from one state of the target: head i reads the state of position
p after the final norm, whose LM head gives token p + 1, and guesses token p + 2 + i.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from tools.demo_model import (
    MAX_POSITIONS,
    NORM_EPSILON,
    ROPE_THETA,
    Params,
    attention_bias,
    bfloat16,
    feed_forward,
    norm,
    rope,
    write_json,
    write_weights,
)
from tools.demo_tokenizer import VOCAB_SIZE

LAYER = "midlayer."
EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Eagle3Shape:
    """The sizes of an EAGLE-3 head (E, H, K, D, F), its draft vocabulary, and the target's layers that it reads.

    Number i among `aux_layers` means the residual stream after i layers.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    draft_vocab: int
    aux_layers: tuple[int, int, int]

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every trained tensor by its name in the file, stored `[out, in]`."""
        query, key = self.heads * self.head_size, self.kv_heads * self.head_size
        return {
            "fc.weight": (self.hidden, 3 * self.hidden),
            f"{LAYER}input_layernorm.weight": (self.hidden,),
            f"{LAYER}hidden_norm.weight": (self.hidden,),
            f"{LAYER}self_attn.q_proj.weight": (query, 2 * self.hidden),
            f"{LAYER}self_attn.k_proj.weight": (key, 2 * self.hidden),
            f"{LAYER}self_attn.v_proj.weight": (key, 2 * self.hidden),
            f"{LAYER}self_attn.o_proj.weight": (self.hidden, query),
            f"{LAYER}post_attention_layernorm.weight": (self.hidden,),
            f"{LAYER}mlp.gate_proj.weight": (self.ffn, self.hidden),
            f"{LAYER}mlp.up_proj.weight": (self.ffn, self.hidden),
            f"{LAYER}mlp.down_proj.weight": (self.hidden, self.ffn),
            "norm.weight": (self.hidden,),
            "lm_head.weight": (self.draft_vocab, self.hidden),
        }

    def init(self, seed: int, target: Params, draft_ids: np.ndarray) -> Params:
        """Makes float32 parameters: the target's LM head, an `fc` that passes the last state on, and random matrices."""
        rng = np.random.default_rng(seed)
        params: Params = {}
        for name, shape in self.tensors().items():
            if len(shape) == 1:
                value = np.ones(shape)
            else:
                # Branches that add to the residual stream start small.
                scale = 0.5 if "o_proj" in name or "down_proj" in name else 1.0
                value = rng.standard_normal(shape) * scale * shape[1] ** -0.5
            params[name] = jnp.asarray(value, jnp.float32)
        nothing = jnp.zeros((self.hidden, 2 * self.hidden), jnp.float32)
        params["fc.weight"] = jnp.concatenate([nothing, jnp.eye(self.hidden)], 1)
        # Copies, because training gives up the arrays that it is given.
        params["norm.weight"] = jnp.array(target["model.norm.weight"])
        params["lm_head.weight"] = target[EMBEDDING][draft_ids]
        return params


@dataclass(frozen=True)
class MedusaShape:
    """The sizes of Medusa heads: the target's hidden size, and how many tokens they guess."""

    hidden: int
    heads: int

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every tensor by its name in the file, stored `[out, in]`."""
        shapes: dict[str, tuple[int, ...]] = {}
        for head in range(self.heads):
            shapes[f"blocks.{head}.layers.0.weight"] = (self.hidden, self.hidden)
            shapes[f"blocks.{head}.layers.0.bias"] = (self.hidden,)
        return shapes

    def init(self) -> Params:
        """Makes float32 parameters of zeros: each head starts as the target's own LM head, as in the paper."""
        return {name: jnp.zeros(shape, jnp.float32) for name, shape in self.tensors().items()}


EAGLE3 = Eagle3Shape(hidden=192, heads=2, kv_heads=1, head_size=32, ffn=64, draft_vocab=1024, aux_layers=(1, 2, 3))
MEDUSA = MedusaShape(hidden=192, heads=4)


def eagle3_features(shape: Eagle3Shape, params: Params, states: Sequence[jax.Array]) -> jax.Array:
    """Computes features f32[..., E] from the target's residual states f32[..., E] after 0, 1, ..., L layers."""
    return jnp.concatenate([states[layer] for layer in shape.aux_layers], -1) @ params["fc.weight"].T


def features_before(features: jax.Array) -> jax.Array:
    """Returns the features f32[..., T, E] that positions of one document read: those of the positions before them."""
    return jnp.concatenate([features[..., :1, :], features[..., :-1, :]], -2)


def _eagle3_qkv(
    shape: Eagle3Shape, params: Params, embedded: jax.Array, features: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the query f32[..., T, K, H / K, D], key and value f32[..., T, K, D] of inputs f32[..., T, E]."""
    inputs = jnp.concatenate(
        [
            norm(embedded, params[f"{LAYER}input_layernorm.weight"]),
            norm(features, params[f"{LAYER}hidden_norm.weight"]),
        ],
        -1,
    )

    def heads(name: str) -> jax.Array:
        return (inputs @ params[f"{LAYER}self_attn.{name}_proj.weight"].T).reshape(
            *inputs.shape[:-1], -1, shape.head_size
        )

    query = rope(heads("q"), positions)
    grouped = query.reshape(*inputs.shape[:-1], shape.kv_heads, -1, shape.head_size)
    return grouped, rope(heads("k"), positions), heads("v")


def _eagle3_outputs(params: Params, features: jax.Array, mixed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes logits f32[..., T, draft vocabulary] and x f32[..., T, E] after attention f32[..., T, K, H / K, D]."""
    flat = mixed.reshape(*features.shape[:-1], -1)
    x = features + flat @ params[f"{LAYER}self_attn.o_proj.weight"].T
    x = x + feed_forward(params, LAYER, norm(x, params[f"{LAYER}post_attention_layernorm.weight"]))
    return norm(x, params["norm.weight"]) @ params["lm_head.weight"].T, x


@partial(jax.jit, static_argnums=0)
def eagle3_pass(
    shape: Eagle3Shape, params: Params, embedding: jax.Array, tokens: jax.Array, features: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Runs the head over the positions 0 to T - 1 of one document.

    `tokens` i32[T] are its tokens, `features` f32[T, E] what each position reads (of the position before it), and
    `embedding` f32[V, E] is the target's. Returns the logits f32[T, draft vocabulary] of the tokens 1 to T, and the
    output x f32[T, E], which is the feature that position p + 1 reads where the target has not computed position p.
    """
    length = tokens.shape[0]
    query, key, value = _eagle3_qkv(shape, params, embedding[tokens], features, jnp.arange(length))
    scores = jnp.einsum("tkgd,skd->kgts", query, key) * shape.head_size**-0.5
    seen = jnp.tril(jnp.ones((length, length), bool))
    mixed = jnp.einsum("kgts,skd->tkgd", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1), value)
    return _eagle3_outputs(params, features, mixed)


def eagle3_draft(
    shape: Eagle3Shape,
    params: Params,
    draft_ids: np.ndarray,
    embedding: jax.Array,
    tokens: Sequence[int],
    states: Sequence[jax.Array],
    count: int,
) -> list[int]:
    """Returns the greedy guesses for the `count` tokens after two `tokens` or more, computing all anew for each.

    `states` are the target's residual states f32[T - 1 or more, E] after 0, 1, ..., L layers: the last token is not
    computed yet. `draft_ids` i32[draft vocabulary] are the target's ids of the draft vocabulary.
    """
    computed = eagle3_features(shape, params, states)[: len(tokens) - 1]
    known = np.zeros(len(tokens) + count, np.int32)
    known[: len(tokens)] = tokens
    # As `features_before`, but the last token, whose own state is not computed, reads a real feature, too.
    features = jnp.concatenate([computed[:1], computed, jnp.zeros((count, shape.hidden))])
    for at in range(len(tokens), len(known)):
        # What stands after position `at` - 1 changes nothing before it, and one length compiles once.
        scored, x = eagle3_pass(shape, params, embedding, jnp.asarray(known), features)
        known[at] = draft_ids[int(jnp.argmax(scored[at - 1]))]
        features = features.at[at].set(x[at - 1])
    drafted: list[int] = known[len(tokens) :].tolist()
    return drafted


def eagle3_unrolled(
    shape: Eagle3Shape,
    params: Params,
    embedding: jax.Array,
    tokens: jax.Array,
    segments: jax.Array,
    states: Sequence[jax.Array],
    steps: int,
) -> list[jax.Array]:
    """Computes what the head guesses at every position as the drafted token 1, 2, ... `steps` ("training-time test").

    `tokens` i32[B, T] may hold several documents a row, told apart by `segments` i32[B, T]. Result s holds logits
    f32[B, T, draft vocabulary]: position p guesses token p + 1 as if the target had computed the positions before p - s
    only, and the drafts since then had been right. It means something where position p - s is in the same segment.
    """
    embedded = embedding[tokens]
    positions = jnp.arange(tokens.shape[1])
    first = jnp.concatenate([jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], 1)
    own = eagle3_features(shape, params, states)
    features = jnp.where(first[..., None], own, features_before(own))
    bias = attention_bias(segments)
    keys: list[jax.Array] = []
    values: list[jax.Array] = []
    outputs = []
    for step in range(steps):
        query, key, value = _eagle3_qkv(shape, params, embedded, features, positions)
        keys.append(key)
        values.append(value)
        # The keys of real features, of which the last `step` positions have none yet, ...
        hidden = jnp.where(positions[None, :] > positions[:, None] - step, -1e9, 0.0)
        scores = [jnp.einsum("btkgd,bskd->btkgs", query, keys[0]) + (bias + hidden)[:, :, None, None]]
        # ... and of position p - step + i the key of step i.
        drafted = [jnp.roll(keys[i], step - i, 1) for i in range(1, step + 1)]
        scores += [jnp.einsum("btkgd,btkd->btkg", query, one)[..., None] for one in drafted]
        shares = jax.nn.softmax(jnp.concatenate(scores, -1) * shape.head_size**-0.5, -1)
        mixed = jnp.einsum("btkgs,bskd->btkgd", shares[..., : tokens.shape[1]], values[0])
        for i in range(1, step + 1):
            share = shares[..., tokens.shape[1] + i - 1]
            mixed += share[..., None] * jnp.roll(values[i], step - i, 1)[:, :, :, None]
        scored, x = _eagle3_outputs(params, features, mixed)
        outputs.append(scored)
        features = features_before(x)
    return outputs


def medusa_logits(shape: MedusaShape, params: Params, embedding: jax.Array, states: jax.Array) -> list[jax.Array]:
    """Computes the logits f32[..., V] of each head from the target's states f32[..., E] after its final norm.

    Head i guesses token p + 2 + i from the state of position p. `embedding` f32[V, E] is the target's, which is its LM
    head, too.
    """
    scored = []
    for head in range(shape.heads):
        at = f"blocks.{head}.layers.0."
        x = states + jax.nn.silu(states @ params[at + "weight"].T + params[at + "bias"])
        scored.append(x @ embedding.T)
    return scored


def save_eagle3(folder: Path, shape: Eagle3Shape, params: Params, draft_ids: np.ndarray) -> None:
    """Writes `config.json` and `model.safetensors`: weights in bfloat16, and the map of the draft vocabulary.

    `d2t` i64[draft vocabulary] has the distance from each draft id to the target's id, and `t2d` bool[V] tells which of
    the target's tokens the draft vocabulary contains.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": VOCAB_SIZE,
        "draft_vocab_size": shape.draft_vocab, "hidden_size": shape.hidden, "num_hidden_layers": 1,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_size,
        "intermediate_size": shape.ffn, "hidden_act": "silu", "rms_norm_eps": NORM_EPSILON, "rope_theta": ROPE_THETA,
        "rope_scaling": None, "max_position_embeddings": MAX_POSITIONS, "tie_word_embeddings": False,
        "attention_bias": False, "mlp_bias": False,
        "eagle_config": {
            "use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(shape.aux_layers),
        },
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    write_json(folder / "config.json", config)
    t2d = np.zeros(VOCAB_SIZE, bool)
    t2d[draft_ids] = True
    d2t = draft_ids.astype(np.int64) - np.arange(shape.draft_vocab)
    write_weights(folder / "model.safetensors", bfloat16(params) | {"d2t": d2t, "t2d": t2d})


def load_eagle3(folder: Path, shape: Eagle3Shape) -> tuple[Params, np.ndarray]:
    """Loads the parameters of a saved head in float32, and the target's ids of its draft vocabulary."""
    stored = load_file(folder / "model.safetensors")
    params = {name: jnp.asarray(stored[name].astype(np.float32)) for name in shape.tensors()}
    return params, stored["d2t"] + np.arange(shape.draft_vocab)


def save_medusa(folder: Path, shape: MedusaShape, params: Params) -> None:
    """Writes `config.json` and `model.safetensors` in bfloat16. The LM head is the target's and is not in the file."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["MedusaModel"], "model_type": "medusa", "vocab_size": VOCAB_SIZE,
        "truncated_vocab_size": VOCAB_SIZE, "hidden_size": shape.hidden, "num_heads": shape.heads,
        "num_hidden_layers": 1, "medusa_fc_bias": True, "original_lm_head": True, "torch_dtype": "bfloat16",
    }  # fmt: skip
    write_json(folder / "config.json", config)
    write_weights(folder / "model.safetensors", bfloat16(params))


def load_medusa(folder: Path, shape: MedusaShape) -> Params:
    """Loads the parameters of saved heads in float32."""
    stored = load_file(folder / "model.safetensors")
    return {name: jnp.asarray(stored[name].astype(np.float32)) for name in shape.tensors()}
