"""Jamba: Mamba in most layers, attention without positions in the others, and experts in every other one."""

from collections.abc import Mapping
from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.expert_router import ExpertRouter
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.mamba import blocks_and_scan, mamba_sources, step_size
from jaxvllm.models.families.mamba2 import expanded
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.mamba import Mamba
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import (
    OuterNames,
    Source,
    attention_sources,
    expert_sources,
    gated_sources,
    named_norms,
    whole,
)


def jamba_spec(config: HfConfig) -> ModelSpec:
    config = config.with_defaults(num_key_value_heads=8, max_position_embeddings=262144, intermediate_size=14336)
    config.refuse({"mamba_inner_layernorms": (None, True)})
    usual, norm = UsualParts(config), RmsNorm(config.number("rms_norm_eps", 1e-6))
    mixer = Mamba(
        usual.hidden_size,
        *blocks_and_scan(config, expanded(config, "mamba_expand"), config.integer("mamba_d_state", 16)),
        step_size=step_size(config, "mamba_dt_rank"),
        conv_size=config.integer("mamba_d_conv", 4, least=2),
        has_conv_bias=config.flag("mamba_conv_bias", True),
        has_bias=config.flag("mamba_proj_bias", False),
        norm=norm,
    )
    full = Block(norm=norm, attention=usual.attention(norm), ffn=usual.gated_ffn())
    mamba, count = replace(full, attention=mixer), config.integer("num_experts", 16)
    ffn = full.ffn
    if count > 1:
        top_k = config.integer("num_experts_per_tok", 2)
        ffn = usual.experts(ExpertRouter(usual.hidden_size, count, top_k, is_normalized=False), usual.ffn_size)
    has_attention, has_experts = every(config, "attn_layer", 8, 4), every(config, "expert_layer", 2, 1)
    layers = (full if n in has_attention else mamba for n in range(usual.num_layers))
    return usual.model((replace(of, ffn=ffn) if n in has_experts else of for n, of in enumerate(layers)), norm)


def every(config: HfConfig, key: str, period: int, offset: int) -> range:
    """Returns the layers that come once in a period, which the config states with the first of them under `key`."""
    period, offset = config.integer(f"{key}_period", period), config.integer(f"{key}_offset", offset, least=0)
    if offset >= period:
        raise ValueError(f"config {key}_offset {offset} must be less than {key}_period {period}")
    return range(offset, config.integer("num_hidden_layers"), period)


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer."""
    decls, start = declare_layer(spec, layer), f"{prefix}feed_forward."
    names = {"attention_norm": "input_layernorm", "ffn_norm": "pre_ff_layernorm"}
    found = named_norms(decls, prefix, names)
    is_mamba = isinstance(spec.layers[layer].attention, Mamba)
    found |= mamba_sources(spec, layer, prefix, "mamba") if is_mamba else attention_sources(spec, layer, prefix)
    if "router" not in decls:
        return found | gated_sources(decls, start)
    router = whole(f"{start}router.weight", decls["router"].shape)
    return found | expert_sources(decls, f"{start}experts.") | {"router": router}


FAMILY = Family(
    "JambaForCausalLM",
    jamba_spec,
    layer_sources=sources,
    names=OuterNames(final_norm="final_layernorm"),
    understood=("num_experts",),
)
