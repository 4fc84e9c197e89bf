"""Tells where the models of tunix 0.1.7 keep the tensors of a checkpoint, family by family.

tunix keeps matrices as `[in, out]`, with heads apart. An order of dimensions names D, the hidden size, N query heads,
K KV heads, and H, the size of a head, or I and O, what goes in and out. The tables come from tunix's own loaders,
tunix/models/*/params.py and params_safetensors.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Kept:
    """A tensor as a model keeps it: in a parameter, or one item of it, perhaps with its dimensions in another order.

    path: of the parameter, within its layer or, outside of the layers, within the model
    order: of its dimensions, and of those of the tensor while heads are apart: `dnh->nhd`. Empty: they are the same
    item: the number along the first dimension, of parameters that have several tensors
    """

    path: str
    order: str = ""
    item: int | None = None

    def tensor(self, array: jax.Array, expert: int | None) -> jax.Array:
        """Returns the tensor, heads apart. A parameter of all experts has that of `expert` at its number."""
        item = self.item if expert is None else expert
        array = array if item is None else array[item]
        return jnp.einsum(self.order, array) if self.order else array


# By the name of a tensor, the ways to keep it. The one whose parameter is there counts.
Table = dict[str, tuple[Kept, ...]]


@dataclass(frozen=True)
class TunixFamily:
    """The models of one class of tunix's whose checkpoints have one of the architectures.

    model: the name of the class
    outer: the tensors outside of the layers, whose names are told without `model.`
    layer: the tensors of a layer, whose names are told without `model.layers.N.`. A star is the number of an expert
    rope: called with a model and the number of a layer. Returns the base with which the layer rotates, and the number
        that its angles are divided by, whatever its config says
    """

    architectures: tuple[str, ...]
    model: str
    outer: Table
    layer: Table
    rope: Callable[[Any, int], tuple[float, float]]


def _norms(ends: str, names: Mapping[str, str]) -> Table:
    return {f"{name}.weight": (Kept(f"{path}.{ends}"),) for name, path in names.items()}


_EMBEDDING: Table = {"embed_tokens.weight": (Kept("embedder.input_embedding"),)}
_OUTER = _EMBEDDING | _norms("w", {"norm": "final_norm"}) | {"lm_head.weight": (Kept("lm_head.w", "dv->vd"),)}
_FFN: Table = {
    f"mlp.{name}.weight": (Kept(f"mlp.{name}.kernel", "io->oi"),) for name in ("gate_proj", "up_proj", "down_proj")
}
_LLAMA = {
    **{f"self_attn.{name}.weight": (Kept(f"attn.{name}.w", "dnh->nhd"),) for name in ("q_proj", "k_proj", "v_proj")},
    "self_attn.o_proj.weight": (Kept("attn.o_proj.w", "nhd->dnh"),),
    **_norms("w", {name: name for name in ("input_layernorm", "post_attention_layernorm")}),
}
_QWEN3 = _LLAMA | _norms("w", {"self_attn.q_norm": "attn.q_norm", "self_attn.k_norm": "attn.k_norm"})
_BIASES: Table = {f"self_attn.{letter}_proj.bias": (Kept(f"attn.{letter}_bias"),) for letter in "qkv"}
_EXPERTS: Table = {
    "mlp.gate.weight": (Kept("mlp.router.kernel", "io->oi"),),
    **{
        f"mlp.experts.*.{name}.weight": (Kept(f"mlp.{name}", "io->oi"),)
        for name in ("gate_proj", "up_proj", "down_proj")
    },
}
# Where there are as many KV heads as query heads, one parameter has all three.
_GEMMA = {
    "self_attn.q_proj.weight": (Kept("attn.q_einsum.w", "ndh->nhd"), Kept("attn.qkv_einsum.w", "ndh->nhd", 0)),
    "self_attn.k_proj.weight": (Kept("attn.kv_einsum.w", "kdh->khd", 0), Kept("attn.qkv_einsum.w", "ndh->nhd", 1)),
    "self_attn.v_proj.weight": (Kept("attn.kv_einsum.w", "kdh->khd", 1), Kept("attn.qkv_einsum.w", "ndh->nhd", 2)),
    "self_attn.o_proj.weight": (Kept("attn.attn_vec_einsum.w", "nhd->dnh"),),
    **_FFN,
}
_GEMMA_OUTER = _EMBEDDING | _norms("scale", {"norm": "final_norm"})
_SANDWICH = {
    "input_layernorm": "pre_attention_norm",
    "pre_feedforward_layernorm": "pre_ffw_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def _always(base: float) -> Callable[[Any, int], tuple[float, float]]:
    return lambda model, layer: (base, 1.0)


# The attention of Llama 3 and Qwen 3 does not pass the base of its config on, and no model scales as Llama 3.1 does.
FAMILIES = (
    TunixFamily(("LlamaForCausalLM",), "Llama3", _OUTER, _LLAMA | _FFN, _always(1e6)),
    TunixFamily(
        ("Qwen2ForCausalLM",),
        "Qwen2",
        _OUTER,
        _LLAMA | _FFN | _BIASES,
        lambda model, layer: (model.config.rope_theta, 1.0),
    ),
    TunixFamily(("Qwen3ForCausalLM",), "Qwen3", _OUTER, _QWEN3 | _FFN, _always(1e6)),
    TunixFamily(("Qwen3MoeForCausalLM",), "Qwen3", _OUTER, _QWEN3 | _EXPERTS, _always(1e6)),
    TunixFamily(
        ("GemmaForCausalLM",),
        "Gemma",
        _GEMMA_OUTER,
        # The second norm of a Llama is the one before the FFN.
        _GEMMA | _norms("scale", {"input_layernorm": "pre_attention_norm", "post_attention_layernorm": "pre_ffw_norm"}),
        _always(1e4),
    ),
    TunixFamily(
        ("Gemma2ForCausalLM",),
        "Gemma",
        _GEMMA_OUTER,
        _GEMMA | _norms("scale", _SANDWICH | {"post_attention_layernorm": "post_attn_norm"}),
        _always(1e4),
    ),
    TunixFamily(
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        "Gemma3",
        _GEMMA_OUTER,
        _GEMMA
        | _norms("scale", _SANDWICH | {"post_attention_layernorm": "post_attention_norm"})
        | _norms("scale", {"self_attn.q_norm": "attn._query_norm", "self_attn.k_norm": "attn._key_norm"}),
        lambda model, layer: (
            model.layers[layer].attn.rope_base_frequency,
            model.layers[layer].attn.rope_scale_factor,
        ),
    ),
)


def find_tunix_family(model: Any, architecture: str) -> TunixFamily:
    """Returns the family of a model. Raises ValueError that lists all of them for a model that has none."""
    name = type(model).__name__
    for family in FAMILIES:
        if family.model == name and architecture in family.architectures:
            return family
    mapped = ", ".join(f"{family.model} for {family.architectures[0]}" for family in FAMILIES)
    raise ValueError(
        f"tunix's {name} is not mapped to an engine of {architecture}: mapped are {mapped}. Give TunixActor.of(llm) to "
        "tunix, which trains whatever the engine serves"
    )
