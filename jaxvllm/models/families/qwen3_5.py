"""Qwen 3.5, dense and text only, alone or inside the multimodal checkpoint.

Three layers of linear attention, by the gated delta rule, to each layer of attention, whose outputs are gated and whose
rope turns the first quarter of a head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.mtp_format import OF_QWEN
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.ffn import Ffn
from jaxvllm.models.gated_delta import GatedDelta, GatedDeltaNet
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import (
    Source,
    attention_sources,
    gated_ffn_sources,
    named_norms,
    norm_sources,
    rows_of_heads,
    with_biases,
)

_LINEAR, _FULL = "linear_attention", "full_attention"


def qwen3_5_spec(config: HfConfig) -> ModelSpec:
    usual = UsualParts(config)
    return hybrid_spec(config, [usual.gated_ffn()] * usual.num_layers)


def hybrid_spec(config: HfConfig, ffns: Sequence[Ffn]) -> ModelSpec:
    """Returns the spec of a Qwen 3.5 with these FFNs in its layers."""
    # The convolution of linear attention has the activation of the FFNs, and ours knows one.
    config.refuse({"attn_output_gate": (None, True), "hidden_act": (None, "silu", "swish")})
    # The sections of the rope are for images: the axes of a text's positions are all the same.
    rope = {"partial_rotary_factor": 0.25} | config.rope_parameters()
    config = config.with_defaults(head_dim=256, num_key_value_heads=4)
    usual = UsualParts(replace(config, values=dict(config.values) | {"rope_parameters": rope}))
    eps = config.number("rms_norm_eps", 1e-6)
    norm, has_bias = RmsNorm(eps, offset=1.0), usual.attention_bias
    full = Block(
        norm=norm,
        attention=replace(usual.attention(norm), qk_norm="head", gated=True, qkv_bias=has_bias, o_bias=has_bias),
        ffn=ffns[0],
        rope=usual.rope(),
    )
    num_keys, num_values = config.integer("linear_num_key_heads", 16), config.integer("linear_num_value_heads", 32)
    if num_values % num_keys:
        raise ValueError(f"config linear_num_value_heads {num_values} must be a multiple of {num_keys} key heads")
    delta = GatedDelta(
        values_per_key=num_values // num_keys,
        key_size=config.integer("linear_key_head_dim", 128),
        value_size=config.integer("linear_value_head_dim", 128),
    )
    conv_size = config.integer("linear_conv_kernel_dim", 4, least=2)
    mixer = GatedDeltaNet(usual.hidden_size, num_keys, delta, conv_size, RmsNorm(eps))
    linear = Block(norm=norm, attention=mixer, ffn=ffns[0])
    interval = config.integer("full_attention_interval", 4)
    every = [_LINEAR if (layer + 1) % interval else _FULL for layer in range(usual.num_layers)]
    kinds = config.layer_types(every, (_FULL, _LINEAR))
    layers = [full if kind == _FULL else linear for kind in kinds]
    return usual.model((replace(layer, ffn=ffn) for layer, ffn in zip(layers, ffns, strict=True)), norm)


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer."""
    return mixer_sources(spec, layer, prefix) | gated_ffn_sources(spec, layer, prefix)


def mixer_sources(spec: ModelSpec, layer: int, prefix: str) -> dict[str, tuple[Source, ...]]:
    """Returns the sources of a layer but for its FFN. Tensors of linear attention have one kind of rows each."""
    mixer = spec.layers[layer].attention
    if not isinstance(mixer, GatedDeltaNet):
        return norm_sources(spec, layer, prefix) | attention_sources(spec, layer, prefix)
    decls, delta, K, E = declare_layer(spec, layer), mixer.delta, mixer.num_groups, spec.hidden_size
    r, Dk, Dv, C = delta.values_per_key, delta.key_size, delta.value_size, delta.channels
    prefix_in = f"{prefix}linear_attn."
    # Queries, keys and values: rows of a head, where they begin in our array, and where in the tensor.
    channels = ((Dk, 0, 0), (Dk, Dk, K * Dk), (r * Dv, 2 * Dk, 2 * K * Dk))

    def of_channels(name: str, *tail: int) -> tuple[Source, ...]:
        return tuple(
            rows_of_heads(prefix_in + name, (K, count, *tail), first, begin, K * C) for count, first, begin in channels
        )

    def of_values(name: str, first: int, count: int, *tail: int) -> Source:
        return rows_of_heads(prefix_in + name, (K, count, *tail), first)

    found = norm_sources(spec, layer, prefix)
    found |= with_biases(decls, prefix, {"delta_out": "linear_attn.out_proj"})
    found |= named_norms(decls, prefix, {"delta_norm": "linear_attn.norm"})
    return found | {
        "delta_in": (
            *of_channels("in_proj_qkv.weight", E),
            of_values("in_proj_z.weight", C, r * Dv, E),
        ),
        "delta_steps": (of_values("in_proj_b.weight", 0, r, E), of_values("in_proj_a.weight", r, r, E)),
        "delta_conv": tuple(
            replace(source, shape=(K * C, 1, mixer.conv_size))
            for source in of_channels("conv1d.weight", mixer.conv_size)
        ),
        "delta_decay": (of_values("A_log", 0, r),),
        "delta_step_bias": (of_values("dt_bias", 0, r),),
    }


FAMILY = Family(
    "Qwen3_5ForCausalLM",
    qwen3_5_spec,
    layer_sources=sources,
    foreign=("mtp.",),
    mtp=replace(OF_QWEN, count="mtp_num_hidden_layers"),
)
FAMILIES = (
    FAMILY,
    replace(
        FAMILY,
        architecture="Qwen3_5ForConditionalGeneration",
        prefixes=("model.language_model.",),
        foreign=("mtp.", "model.visual."),
        nested_in="text_config",
    ),
)
