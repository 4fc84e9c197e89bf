"""AFMoE (Trinity): gated attention, norms before and after attention and FFN, and positions in windowed layers alone.

Dense layers come first, then experts, chosen by a sigmoid with a bias for the choice alone.
"""

from collections.abc import Mapping
from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.expert_router import ExpertRouter
from jaxvllm.models.families.cohere import with_positions_in_windows
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import (
    Source,
    expert_sources,
    gated_ffn_sources,
    gated_sources,
    named_norms,
    rows_of_heads,
    whole,
    with_biases,
)

NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "ffn_norm": "pre_mlp_layernorm",
    "ffn_post_norm": "post_mlp_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}
# Values of these keys that change nothing. Others are refused.
NEUTRAL = {
    "score_func": (None, "sigmoid"),
    "route_norm": (None, True),
    "n_group": (None, 1),
    "topk_group": (None, 1),
    "num_expert_groups": (None, 1),
    "num_limited_groups": (None, 1),
}


def afmoe_spec(config: HfConfig) -> ModelSpec:
    config.refuse(NEUTRAL)
    config = config.with_defaults(head_dim=128)
    usual, norm = UsualParts(config), RmsNorm(config.number("rms_norm_eps", 1e-5))
    dense = Block(
        norm=norm,
        placement="sandwich",
        attention=replace(usual.head_normed_attention(norm), gated=True),
        ffn=usual.gated_ffn(),
        rope=usual.rope(),
    )
    router = ExpertRouter(
        usual.hidden_size,
        config.integer("num_experts", 64),
        config.integer("num_experts_per_tok", 6),
        scoring="sigmoid",
        added=1e-20,
        scale=config.number("route_scale", 1.0),
        has_choice_bias=True,
    )
    size = config.integer("moe_intermediate_size", 1408)
    experts = usual.experts(router, size, size * config.integer("num_shared_experts", 2, least=0))
    kinds = config.layer_types_by_period(usual.num_layers, config.integer("global_attn_every_n_layers", 4))
    windows = config.windows(kinds, config.optional_integer("sliding_window", 1024))
    first = config.integer("num_dense_layers", 1, least=0)
    layers = enumerate(with_positions_in_windows(dense, windows))
    return replace(
        usual.model((layer if number < first else replace(layer, ffn=experts) for number, layer in layers), norm),
        embed_scale=usual.hidden_size**0.5 if config.flag("mup_enabled", False) else 1.0,
    )


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer."""
    decls, start = declare_layer(spec, layer), f"{prefix}mlp."
    found = named_norms(decls, prefix, NORMS) | with_biases(decls, prefix, {"o": "self_attn.o_proj"})
    found |= {key: _qkv(spec, layer, f"{prefix}self_attn.", key) for key in ("qkv", "qkv_bias") if key in decls}
    if "router" not in decls:
        return found | gated_ffn_sources(spec, layer, prefix)
    found |= expert_sources(decls, f"{start}experts.")
    if "shared_gate_up" in decls:
        found |= gated_sources(decls, f"{start}shared_experts.", "shared_")
    tensors = {"router": "router.gate.weight", "router_choice": "expert_bias"}
    return found | {key: whole(start + name, decls[key].shape) for key, name in tensors.items()}


def _qkv(spec: ModelSpec, layer: int, prefix: str, key: str) -> tuple[Source, ...]:
    """Returns the sources of queries, gates, keys and values, or of their biases, which gates do not have.

    Our array has the gate of a query head after it, and the checkpoint has a tensor of all gates.
    """
    attention, (K, _, *tail) = spec.layers[layer].attention, declare_layer(spec, layer)[key].shape
    D, H, kind = attention.head_size, attention.num_heads, "bias" if key.endswith("bias") else "weight"
    zeros = (0,) * len(tail)

    def of_heads(name: str, first: int) -> list[Source]:
        shape, view = (H * D, *tail), (1, D, *tail)
        places = [divmod(head, H // K) for head in range(H)]
        return [
            Source(f"{prefix}{name}.{kind}", shape, (k, first + 2 * g * D, *zeros), view, slice(n * D, (n + 1) * D))
            for n, (k, g) in enumerate(places)
        ]

    gates = of_heads("gate_proj", D) if kind == "weight" else []
    keys_at = 2 * H // K * D
    keys, values = (
        rows_of_heads(f"{prefix}{letter}_proj.{kind}", (K, D, *tail), keys_at + place * D)
        for place, letter in enumerate("kv")
    )
    return (*of_heads("q_proj", 0), *gates, keys, values)


FAMILY = Family("AfmoeForCausalLM", afmoe_spec, layer_sources=sources, understood=("num_experts",))
