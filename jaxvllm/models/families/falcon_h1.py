"""Falcon-H1: Mamba-2 beside attention in every layer, both of one norm, and a multiplier for nearly every matrix."""

from collections.abc import Mapping
from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.families.bamba import bamba_mixer
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.mamba2 import expanded, mamba2_sources
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.mamba2 import Mamba2, Multipliers
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.params import declare_layer
from jaxvllm.models.scaled_ffn import ScaledFfn
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import OuterNames, Source, attention_sources, gated_sources, named_norms


def falcon_h1_spec(config: HfConfig) -> ModelSpec:
    config.refuse({"mamba_use_mlp": (None, True), "attn_layer_indices": (None,)})
    config = config.with_defaults(num_key_value_heads=8, max_position_embeddings=8192, intermediate_size=14336)
    usual, norm, has_bias = UsualParts(config), RmsNorm(config.number("rms_norm_eps", 1e-5)), config_bias(config)
    gate, down = multipliers(config, "mlp_multipliers", 2)
    plain, attention = usual.gated_ffn(), usual.attention(norm)
    # What multiplies the input of attention multiplies queries, keys and values.
    into, keys = config.number("attention_in_multiplier", 1.0), config.number("key_multiplier", 1.0)
    layer = Block(
        norm=norm,
        attention=replace(attention, scale=attention.scale * keys * into**2, qkv_bias=has_bias, o_bias=has_bias),
        attention_scale=config.number("attention_out_multiplier", 1.0) * into,
        beside=mixer(config, norm),
        ffn=ScaledFfn(plain.hidden_size, plain.size, plain.activation, plain.bias, gate_scale=gate, out_scale=down),
        rope=usual.rope(),
    )
    return replace(
        usual.model([layer] * usual.num_layers, norm),
        embed_scale=config.number("embedding_multiplier", 1.0),
        logit_scale=config.number("lm_head_multiplier", 1.0),
    )


def config_bias(config: HfConfig) -> bool:
    """Returns whether attention has biases, which its multiplier would not multiply."""
    has_bias, into = config.flag("attention_bias", False), config.number("attention_in_multiplier", 1.0)
    if has_bias and into != 1:
        raise ValueError(f"config attention_bias is not supported with attention_in_multiplier {into}")
    return has_bias


def mixer(config: HfConfig, norm: RmsNorm) -> Mamba2:
    has_bias = config.flag("mamba_proj_bias", False)
    if config.flag("projectors_bias", False) != has_bias:
        raise ValueError(f"config projectors_bias must be as mamba_proj_bias, which is {has_bias}")
    width = config.optional_integer("mamba_d_ssm", 1024) or expanded(config, "mamba_expand")
    gates, x, b, c, steps = multipliers(config, "ssm_multipliers", 5)
    into, out = config.number("ssm_in_multiplier", 1.0), config.number("ssm_out_multiplier", 1.0)
    mixer = replace(
        bamba_mixer(config, norm, width),
        gates_last=config.flag("mamba_norm_before_gate", True),
        multipliers=Multipliers(gates=gates, x=x, b=b, c=c, steps=steps, input=into, output=out),
    )
    return mixer if config.flag("mamba_rms_norm", False) else replace(mixer, norm=None)


def multipliers(config: HfConfig, key: str, count: int) -> tuple[float, ...]:
    """Returns the numbers that the config lists under `key`, or as many ones."""
    found = config.values.get(key)
    found = [1.0] * count if found is None else found
    if not isinstance(found, list | tuple) or len(found) != count or not all(type(of) in (int, float) for of in found):
        raise ValueError(f"config {key} must be a list of {count} numbers, not {found!r}")
    return tuple(float(of) for of in found)


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer."""
    decls, names = declare_layer(spec, layer), {"attention_norm": "input_layernorm", "ffn_norm": "pre_ff_layernorm"}
    found = named_norms(decls, prefix, names) | attention_sources(spec, layer, prefix)
    return found | mamba2_sources(spec, layer, prefix, "mamba") | gated_sources(decls, f"{prefix}feed_forward.")


FAMILY = Family(
    "FalconH1ForCausalLM", falcon_h1_spec, layer_sources=sources, names=OuterNames(final_norm="final_layernorm")
)
