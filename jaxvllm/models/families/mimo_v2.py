"""MiMo V2 Flash: layers with windows have twice the KV heads, and a logit of each head that has no value.

Values are smaller than keys. Each kind of layer has its own rope, of a third of each head, and experts as in DeepSeek
V3 follow the first layer.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxvllm.models.block import Block
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.gemma3 import rope_entries
from jaxvllm.models.families.glm4_moe import SOURCES, deepseek_router
from jaxvllm.models.families.mtp_format import MtpFormat
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import Source, named_norms, rows_of_heads, whole

_PART = {"partial_rotary_factor": 0.334}


def mimo_v2_spec(config: HfConfig) -> ModelSpec:
    config = config.with_defaults(
        head_dim=192, num_key_value_heads=4, n_routed_experts=256, partial_rotary_factor=_PART["partial_rotary_factor"]
    )
    usual, norm = UsualParts(config), RmsNorm(config.number("rms_norm_eps", 1e-5))
    of_full, of_sliding = rope_entries(config)
    sizes = usual.head_size, usual.max_position
    attention = replace(
        usual.attention(norm),
        qkv_bias=usual.attention_bias,
        v_size=config.integer("v_head_dim", 128),
        v_scale=config.optional_number("attention_value_scale", 0.707) or 1.0,
    )
    full = Block(
        norm=norm,
        attention=attention,
        ffn=usual.gated_ffn(),
        rope=config.rope(_PART | of_full, config.number("rope_theta", 5_000_000.0), *sizes),
    )
    # Published configs tell how many positions are seen before a token's own.
    before = config.optional_integer("sliding_window_size")
    sliding = replace(
        full,
        attention=replace(attention, num_kv_heads=2 * attention.num_kv_heads, has_sinks=True),
        rope=config.rope(_PART | of_sliding, config.number("swa_rope_theta", 10_000.0), *sizes),
        window=config.integer("sliding_window", 129) if before is None else before + 1,
    )
    default = [
        "full_attention" if number == 0 or not (number + 1) % 6 else "sliding_attention"
        for number in range(usual.num_layers)
    ]
    kinds, are_sparse = config.layer_types(default), config.sparse_layers(first=1)
    config.refuse(_as_published(config, sliding, kinds, are_sparse))
    experts = usual.experts(deepseek_router(config), config.integer("moe_intermediate_size", 2048))
    layers = (
        replace(sliding if kind == "sliding_attention" else full, ffn=experts if is_sparse else full.ffn)
        for kind, is_sparse in zip(kinds, are_sparse, strict=True)
    )
    return replace(usual.model(layers, norm), max_position=usual.max_position)


def _as_published(
    config: HfConfig, sliding: Block, kinds: list[str], are_sparse: list[bool]
) -> dict[str, tuple[Any, ...]]:
    """Returns the values that keys of published configs must have, which transformers does not read."""
    attention = sliding.attention
    return {
        "hybrid_layer_pattern": (None, [int(kind == "sliding_attention") for kind in kinds]),
        "moe_layer_freq": (None, [int(is_sparse) for is_sparse in are_sparse]),
        "swa_num_attention_heads": (None, attention.num_heads),
        "swa_num_key_value_heads": (None, attention.memory(None).num_kv_heads),
        "swa_head_dim": (None, attention.head_size),
        "swa_v_head_dim": (None, config.integer("v_head_dim", 128)),
        "add_swa_attention_sink_bias": (None, True),
        "add_full_attention_sink_bias": (None, False),
        "scoring_func": (None, "sigmoid"),
        "n_shared_experts": (None, 0),
    }


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer."""
    decls, found = declare_layer(spec, layer), dict(SOURCES(spec, layer, prefix))
    for key, kind in (("qkv", "weight"), ("qkv_bias", "bias")):
        if key in decls:
            K, rows, *tail = decls[key].shape
            D, size = (
                spec.layers[layer].attention.head_size,
                decls["o"].shape[1] // spec.layers[layer].attention.num_heads,
            )
            # The rows after those of a value are zeros.
            values = rows_of_heads(f"{prefix}self_attn.v_proj.{kind}", (K, size, *tail), rows - D)
            found[key] = (*found[key][:2], values)
    if "sinks" in decls:
        K, G = decls["sinks"].shape
        found["sinks"] = whole(f"{prefix}self_attn.attention_sink_bias", (K * G,), (K, G))
    return found


def mtp_block(spec: ModelSpec) -> Block:
    """Returns the block of an MTP head: a layer with a window, and the FFN of the first layer, which is dense."""
    windowed = (layer for layer in spec.layers if layer.window is not None)
    return replace(next(windowed, spec.layers[0]), ffn=spec.layers[0].ffn)


def mtp_sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of that block, whose norm before the FFN has a name of its own."""
    norm = named_norms(declare_layer(spec, layer), prefix, {"ffn_norm": "pre_mlp_layernorm"})
    return dict(sources(spec, layer, prefix)) | norm


MTP = MtpFormat(
    block="{prefix}mtp.layers.{number}.",
    final_norm="{block}final_layernorm",
    copies=(),
    usual_count=3,
    block_of=mtp_block,
    sources=mtp_sources,
)
FAMILY = Family("MiMoV2FlashForCausalLM", mimo_v2_spec, layer_sources=sources, foreign=("model.mtp.",), mtp=MTP)
