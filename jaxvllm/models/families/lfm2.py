"""LFM2, dense: gated short convolutions in most layers, and attention in the others."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.ffn import Ffn, GatedFfn
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.params import declare_layer
from jaxvllm.models.short_conv import ShortConv
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import (
    OuterNames,
    Source,
    attention_sources,
    gated_sources,
    named_norms,
    rows_of_heads,
    whole,
    with_biases,
)

_CONV, _FULL = "conv", "full_attention"
# Devices share the channels of a convolution in so many blocks, or in a part of them that divides the hidden size.
_MOST_BLOCKS = 8


def lfm2_spec(config: HfConfig) -> ModelSpec:
    num_layers = config.integer("num_hidden_layers")
    full = config.values.get("full_attn_idxs")
    full = list(range(num_layers)) if full is None else full
    if not isinstance(full, list) or not all(type(number) is int for number in full):
        raise ValueError(f"config full_attn_idxs must be a list of layers, not {full!r}")
    kinds = config.layer_types([_FULL if n in full else _CONV for n in range(num_layers)], (_FULL, _CONV))
    return hybrid_spec(config, kinds, [GatedFfn(config.integer("hidden_size"), ffn_size(config))] * num_layers)


def ffn_size(config: HfConfig) -> int:
    """Returns the inner size of the FFN, of which two thirds, times a factor, are filled up to a multiple."""
    size = config.integer("block_ff_dim", config.integer("intermediate_size", 12288))
    if not config.flag("block_auto_adjust_ff_dim", True):
        return size
    size, factor = int(2 * size / 3), config.optional_number("block_ffn_dim_multiplier", 1.0)
    if factor is None:
        return size
    multiple = config.integer("block_multiple_of", 256)
    return multiple * -(-int(factor * size) // multiple)


def hybrid_spec(config: HfConfig, kinds: Sequence[str], ffns: Sequence[Ffn]) -> ModelSpec:
    """Returns the spec of an LFM2 with layers of these kinds and FFNs."""
    config.refuse({"block_use_swiglu": (None, True), "use_pos_enc": (None, True)})
    tied = config.flag("tie_embedding", config.flag("tie_word_embeddings", True))
    config = config.with_defaults(max_position_embeddings=128_000, rope_theta=1e6, num_key_value_heads=8)
    config = replace(config, values=dict(config.values) | {"tie_word_embeddings": tied})
    usual, norm = UsualParts(config), RmsNorm(config.number("norm_eps", 1e-5))
    E = usual.hidden_size
    num_blocks = math.gcd(E, _MOST_BLOCKS)
    size, has_bias = config.integer("conv_L_cache", 3, least=2), config.flag("conv_bias", False)
    attention = replace(usual.attention(norm), qk_norm="head")
    full = Block(norm=norm, attention=attention, ffn=ffns[0], rope=usual.rope())
    conv = Block(norm=norm, attention=ShortConv(E, num_blocks, E // num_blocks, size, has_bias), ffn=ffns[0])
    layers = zip(kinds, ffns, strict=True)
    return usual.model((replace(full if kind == _FULL else conv, ffn=ffn) for kind, ffn in layers), norm)


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer."""
    names = ("w1", "w3", "w2")
    return mixer_sources(spec, layer, prefix) | gated_sources(
        declare_layer(spec, layer), f"{prefix}feed_forward.", names=names
    )


def mixer_sources(spec: ModelSpec, layer: int, prefix: str) -> dict[str, tuple[Source, ...]]:
    """Returns the sources of a layer but for its FFN."""
    decls, mixer = declare_layer(spec, layer), spec.layers[layer].attention
    norms = {"attention_norm": "operator_norm", "ffn_norm": "ffn_norm"}
    norms |= {f"{letter}_norm": f"self_attn.{letter}_layernorm" for letter in "qk"}
    found = named_norms(decls, prefix, norms)
    if not isinstance(mixer, ShortConv):
        return found | attention_sources(spec, layer, prefix, "self_attn.out_proj")
    K, C, E = mixer.num_groups, mixer.block_size, spec.hidden_size
    found |= with_biases(decls, prefix, {"conv_out": "conv.out_proj"})
    found["conv_taps"] = whole(f"{prefix}conv.conv.weight", (E, 1, mixer.conv_size), decls["conv_taps"].shape)
    if mixer.has_bias:
        found["conv_taps_bias"] = whole(f"{prefix}conv.conv.bias", (E,), (K, C))
    for key, kind in (("conv_in", "weight"), ("conv_in_bias", "bias")):
        if key in decls:
            # The tensor lists B, C and x of all channels.
            tail, name = decls[key].shape[2:], f"{prefix}conv.in_proj.{kind}"
            found[key] = tuple(rows_of_heads(name, (K, C, *tail), part * C, part * E, 3 * E) for part in range(3))
    return found


FAMILY = Family("Lfm2ForCausalLM", lfm2_spec, layer_sources=sources, names=OuterNames(final_norm="embedding_norm"))
