"""Laguna: a gate for each query head, of which layers may have different numbers, and a rope for each kind of layer.

Experts, chosen by a sigmoid with a bias for the choice alone, follow the first layer.
"""

from collections.abc import Mapping
from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.expert_router import ExpertRouter
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.gemma3 import rope_entries
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import Source, sparse_projections, whole

# Values of these keys that change nothing. Others are refused.
NEUTRAL = {"gating": (None, True, "per-head"), "moe_apply_router_weight_on_input": (None, False)}


def laguna_spec(config: HfConfig) -> ModelSpec:
    config.refuse(NEUTRAL)
    config = config.with_defaults(head_dim=128, num_key_value_heads=8)
    usual, norm = UsualParts(config), RmsNorm(config.number("rms_norm_eps", 1e-6))
    has_bias, (of_full, of_sliding) = usual.attention_bias, rope_entries(config)
    sizes = usual.head_size, usual.max_position
    attention = replace(
        usual.attention(norm), qk_norm="head", head_gating="softplus", qkv_bias=has_bias, o_bias=has_bias
    )
    full = Block(
        norm=norm,
        attention=attention,
        ffn=usual.gated_ffn(),
        rope=config.rope(of_full or {"partial_rotary_factor": 0.5}, 500_000.0, *sizes),
    )
    sliding = replace(
        full, rope=config.rope(of_sliding, 10_000.0, *sizes), window=config.optional_integer("sliding_window", 512)
    )
    soft_cap = config.values.get("moe_router_logit_softcapping")
    router = ExpertRouter(
        usual.hidden_size,
        config.integer("num_experts", 256),
        config.integer("num_experts_per_tok", 8),
        scoring="sigmoid",
        scale=config.number("moe_routed_scaling_factor", 1.0),
        has_choice_bias=True,
        soft_cap=config.number("moe_router_logit_softcapping") if soft_cap else None,
    )
    sizes_of_experts = (
        config.integer("moe_intermediate_size", 512),
        config.integer("shared_expert_intermediate_size", 512),
    )
    experts = usual.experts(router, *sizes_of_experts)
    kinds = config.layer_types(["full_attention"] * usual.num_layers)

    def layer(kind: str, is_sparse: bool, num_heads: int) -> Block:
        own = sliding if kind == "sliding_attention" else full
        return replace(own, attention=replace(attention, num_heads=num_heads), ffn=experts if is_sparse else own.ffn)

    layers = map(layer, kinds, config.sparse_layers(first=1), _heads_of_layers(config))
    return replace(usual.model(layers, norm), max_position=usual.max_position)


def _heads_of_layers(config: HfConfig) -> list[int]:
    """Returns the number of query heads of each layer."""
    num_layers, num_heads = config.integer("num_hidden_layers"), config.integer("num_attention_heads")
    counts = config.values.get("num_attention_heads_per_layer")
    counts = [num_heads] * num_layers if counts is None else counts
    if not isinstance(counts, list) or len(counts) != num_layers or not all(type(n) is int and n > 0 for n in counts):
        raise ValueError(f"config num_attention_heads_per_layer must be {num_layers} numbers of heads, not {counts!r}")
    return counts


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer."""
    K, G, E = shape = declare_layer(spec, layer)["head_gates"].shape
    return dict(_MOST(spec, layer, prefix)) | {
        "head_gates": whole(f"{prefix}self_attn.g_proj.weight", (K * G, E), shape)
    }


_MOST = sparse_projections("shared_expert", router_choice="experts.e_score_correction_bias")
FAMILY = Family("LagunaForCausalLM", laguna_spec, layer_sources=sources, understood=("num_experts",))
