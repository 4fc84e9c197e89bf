"""Bamba: Mamba-2 in most layers, and in the others attention whose rope turns half of each head."""

from collections.abc import Mapping
from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.mamba2 import expanded, groups_and_scan, limited, mamba2_sources
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.mamba2 import Mamba2
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import OuterNames, Source, attention_sources, gated_sources, named_norms


def bamba_spec(config: HfConfig) -> ModelSpec:
    config = config.with_defaults(num_key_value_heads=8, max_position_embeddings=262144, intermediate_size=14336)
    rope = {"partial_rotary_factor": 0.5} | config.rope_parameters()
    usual = UsualParts(replace(config, values=dict(config.values) | {"rope_parameters": rope}))
    norm, has_bias, ffn = RmsNorm(config.number("rms_norm_eps", 1e-5)), usual.attention_bias, usual.gated_ffn()
    attention = replace(usual.attention(norm), qkv_bias=has_bias, o_bias=has_bias)
    full = Block(norm=norm, attention=attention, ffn=ffn, rope=usual.rope())
    mamba = Block(norm=norm, attention=bamba_mixer(config, norm, expanded(config, "mamba_expand")), ffn=ffn)
    numbers = config.values.get("attn_layer_indices") or []
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
        raise ValueError(f"config attn_layer_indices must be a list of layers, not {numbers!r}")
    return usual.model((full if n in numbers else mamba for n in range(usual.num_layers)), norm)


def bamba_mixer(config: HfConfig, norm: RmsNorm, width: int) -> Mamba2:
    """Returns the Mamba-2 of a config that names its sizes as Bamba does. Its heads have that width together."""
    # The convolution has the activation of the FFNs, and ours knows one.
    config.refuse({"hidden_act": (None, "silu", "swish")})
    hidden_size, heads = config.integer("hidden_size"), config.integer("mamba_n_heads", 128)
    is_auto = config.values.get("mamba_d_head") in (None, "auto")
    size = width // heads if is_auto else config.integer("mamba_d_head")
    if heads * size != width:
        raise ValueError(f"config mamba_n_heads {heads} of mamba_d_head {size} must be the {width} channels of Mamba-2")
    mixer = Mamba2(
        hidden_size,
        *groups_and_scan(config, "mamba_n_groups", 1, heads, size, config.integer("mamba_d_state", 256)),
        conv_size=config.integer("mamba_d_conv", 4, least=2),
        norm=norm,
        has_conv_bias=config.flag("mamba_conv_bias", True),
        has_bias=config.flag("mamba_proj_bias", False),
    )
    return limited(mixer, config)


def mixer_sources(spec: ModelSpec, layer: int, prefix: str) -> dict[str, tuple[Source, ...]]:
    """Returns the sources of attention or Mamba-2."""
    if isinstance(spec.layers[layer].attention, Mamba2):
        return mamba2_sources(spec, layer, prefix, "mamba")
    return attention_sources(spec, layer, prefix)


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer."""
    decls, names = declare_layer(spec, layer), {"attention_norm": "input_layernorm", "ffn_norm": "pre_ff_layernorm"}
    ffn = gated_sources(decls, f"{prefix}feed_forward.")
    return named_norms(decls, prefix, names) | mixer_sources(spec, layer, prefix) | ffn


FAMILY = Family("BambaForCausalLM", bamba_spec, layer_sources=sources, names=OuterNames(final_norm="final_layernorm"))
