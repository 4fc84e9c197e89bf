"""Llama 4, text, alone or inside the multimodal checkpoint: layers that see one chunk, and layers without positions.

A rope turns neighbours in most layers, each of whose tokens sees its own chunk of positions alone. The others see all,
and their queries grow with their position. What an expert counts multiplies its input.
"""

from collections.abc import Mapping
from dataclasses import replace

from jaxvllm.models.attention import QueryGrowth
from jaxvllm.models.block import Block
from jaxvllm.models.expert_router import ExpertRouter
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.ffn import GatedFfn
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import (
    Source,
    attention_sources,
    gated_sources,
    norm_sources,
    turned_expert_sources,
    whole,
)


def llama4_spec(config: HfConfig) -> ModelSpec:
    config = config.with_defaults(head_dim=128, num_key_value_heads=8, rope_theta=500_000.0)
    usual, norm = UsualParts(config), RmsNorm(config.number("rms_norm_eps", 1e-5))
    has_bias = usual.attention_bias
    plain = replace(usual.attention(norm), rope_pairs="neighbours", qkv_bias=has_bias, o_bias=has_bias)
    rotated, unrotated = plain, plain
    if config.flag("use_qk_norm", True):
        rotated = replace(plain, qk_norm="weightless", is_normed_late=True)
    if config.flag("attn_temperature_tuning", True):
        growth = QueryGrowth(config.number("attn_scale", 0.1), config.integer("floor_scale", 8192), first=1)
        unrotated = replace(plain, q_growth=growth)
    router = ExpertRouter(
        usual.hidden_size,
        config.integer("num_local_experts", 16),
        config.integer("num_experts_per_tok", 1),
        scoring="chosen_sigmoid",
        is_normalized=False,
    )
    experts = replace(usual.experts(router, usual.ffn_size, usual.ffn_size), weighs_input=True)
    mlp_size = config.integer("intermediate_size_mlp", 16_384)
    dense = GatedFfn(usual.hidden_size, mlp_size, config.activation("hidden_act", "silu"))
    has_rope, has_experts, window = _rotated_layers(config), _sparse_layers(config), _chunk(config)
    known = ("full_attention", "chunked_attention")
    kinds = config.layer_types([known[is_rotated] for is_rotated in has_rope], known)

    def layer(number: int) -> Block:
        in_chunks = kinds[number] == "chunked_attention" and window is not None
        return Block(
            norm=norm,
            attention=replace(rotated if has_rope[number] else unrotated, in_chunks=in_chunks),
            ffn=experts if number in has_experts else dense,
            rope=usual.rope() if has_rope[number] else None,
            window=window if in_chunks else None,
        )

    return usual.model(map(layer, range(usual.num_layers)), norm)


def _chunk(config: HfConfig) -> int | None:
    """Returns the positions of a chunk, where the sequences that will be served are longer."""
    chunk, longest = config.optional_integer("attention_chunk_size", 8192), config.max_model_len
    return None if chunk is None or (longest is not None and longest <= chunk) else chunk


def _rotated_layers(config: HfConfig) -> list[bool]:
    """Returns whether each layer has a rope, which `no_rope_layers` says with 1."""
    num_layers, interval = config.integer("num_hidden_layers"), config.integer("no_rope_layer_interval", 4)
    rotated = config.values.get("no_rope_layers") or [int((n + 1) % interval != 0) for n in range(num_layers)]
    if not isinstance(rotated, list) or len(rotated) < num_layers or not all(value in (0, 1) for value in rotated):
        raise ValueError(f"config no_rope_layers must be {num_layers} of 0 and 1, not {rotated!r}")
    return [bool(value) for value in rotated[:num_layers]]


def _sparse_layers(config: HfConfig) -> list[int]:
    """Returns the layers with experts: those of `moe_layers`, or every `interleave_moe_layer_step`th."""
    step = config.integer("interleave_moe_layer_step", 1)
    default = list(range(step - 1, config.integer("num_hidden_layers"), step))
    layers = default if config.values.get("moe_layers") is None else config.values["moe_layers"]
    if not isinstance(layers, list) or not all(type(number) is int for number in layers):
        raise ValueError(f"config moe_layers must be a list of layers, not {layers!r}")
    return layers


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer."""
    decls, start = declare_layer(spec, layer), f"{prefix}feed_forward."
    found = norm_sources(spec, layer, prefix) | attention_sources(spec, layer, prefix)
    if "router" not in decls:
        return found | gated_sources(decls, start)
    found |= turned_expert_sources(decls, f"{start}experts.", interleaved=False)
    found |= gated_sources(decls, f"{start}shared_expert.", "shared_")
    return found | {"router": whole(f"{start}router.weight", decls["router"].shape)}


FAMILY = Family(
    "Llama4ForCausalLM",
    llama4_spec,
    layer_sources=sources,
    understood=("attention_chunk_size", "num_local_experts", "use_qk_norm"),
)
FAMILIES = (
    FAMILY,
    replace(
        FAMILY,
        architecture="Llama4ForConditionalGeneration",
        prefixes=("model.language_model.", "language_model.model."),
        foreign=("model.vision_model.", "model.multi_modal_projector.", "vision_model.", "multi_modal_projector."),
        nested_in="text_config",
    ),
)
