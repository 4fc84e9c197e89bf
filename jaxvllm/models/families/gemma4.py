"""Gemma 4, text only, alone or inside the multimodal checkpoint.

It has five windowed layers to a full one. Layers of full attention have larger heads, of which a rope turns the first
quarter, and may take their keys for values, too. The last layers of the small models read the keys and values of an
earlier layer of their kind. Tokens of small models mean something to each layer alone. The FFN of 26B-A4B has experts
beside it.
"""

from collections.abc import Mapping
from dataclasses import replace

from jaxvllm.models.attention import GroupedQueryAttention
from jaxvllm.models.block import Block
from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.expert_router import ExpertRouter
from jaxvllm.models.experts_beside import ExpertsBesideFfn
from jaxvllm.models.families.family import Family, beside_vision
from jaxvllm.models.families.gemma3 import rope_entries
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.ffn import Ffn, GatedFfn
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.layer_embedding import LayerEmbedding
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import (
    OuterNames,
    Source,
    attention_sources,
    gated_ffn_sources,
    gated_sources,
    named_norms,
    norm_sources,
    stacked_expert_sources,
    whole,
    with_biases,
)

_FULL = "full_attention"
# The part of a head that turns in layers of full attention, and how.
_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25}


def gemma4_spec(config: HfConfig) -> ModelSpec:
    # Only the tokens of an image would see those after them.
    config.refuse({"use_bidirectional_attention": (None, False, "vision")})
    config = config.with_defaults(
        vocab_size=262_144,
        hidden_size=2304,
        num_hidden_layers=30,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        intermediate_size=9216,
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
    )
    usual, norm = UsualParts(config), RmsNorm(config.number("rms_norm_eps", 1e-6))
    of_full, of_sliding = rope_entries(config)
    activation = config.activation("hidden_activation", "gelu_pytorch_tanh")
    own_size = config.integer("hidden_size_per_layer_input", 256, least=0)
    if own_size:
        config.refuse({"vocab_size_per_layer_input": (None, config.integer("vocab_size"))})
    small = value_normed_attention(usual, norm)
    has_experts = config.flag("enable_moe_block", False)

    def ffn(size: int) -> Ffn:
        """Returns an FFN of `size`, with experts beside it in models that have them."""
        dense = GatedFfn(usual.hidden_size, size, activation)
        if not has_experts:
            return dense
        router = ExpertRouter(usual.hidden_size, config.integer("num_experts"), config.integer("top_k_experts"))
        of_experts = config.integer("moe_intermediate_size")
        return ExpertsBesideFfn(usual.hidden_size, of_experts, router, activation, dense, norm=norm)

    sliding = Block(
        norm=norm,
        placement="open_sandwich" if has_experts else "sandwich",
        attention=small,
        ffn=ffn(usual.ffn_size),
        rope=config.rope(of_sliding, 10_000.0, usual.head_size, usual.max_position),
        window=config.integer("sliding_window", 512),
        embedding=LayerEmbedding(own_size, usual.num_layers, usual.hidden_size, activation, norm) if own_size else None,
        has_scale=True,
    )
    kinds = [*config.layer_types_by_period(usual.num_layers, 6)[:-1], _FULL]  # the last one always sees all
    config = _with_full_sizes(config, kinds)
    large = replace(small, head_size=config.integer("global_head_dim", 512))
    if config.flag("attention_k_eq_v", False):
        num_kv_heads = config.integer("num_global_key_value_heads", small.num_kv_heads)
        large = replace(large, num_kv_heads=num_kv_heads, kv="key")
    full = replace(
        sliding,
        attention=large,
        rope=config.rope(of_full or _ROPE, 1_000_000.0, large.head_size, usual.max_position),
        window=None,
    )
    own = usual.num_layers - config.integer("num_kv_shared_layers", 0, least=0)
    is_wide = config.flag("use_double_wide_mlp", False)

    def layer(number: int) -> Block:
        """Returns a layer of its kind. The last ones read the last earlier one of their kind, and may be wider."""
        kind, attention = (full, large) if kinds[number] == _FULL else (sliding, small)
        if number < own:
            return kind
        size = usual.ffn_size * (2 if is_wide else 1)
        reads = last_own_layer(kinds, own, number)
        return replace(kind, attention=replace(attention, kv="none"), ffn=ffn(size), reads=reads)

    return replace(
        usual.model(map(layer, range(usual.num_layers)), norm),
        max_position=usual.max_position,
        logit_soft_cap=config.optional_number("final_logit_softcapping"),
        embed_scale=usual.hidden_size**0.5,
    )


def value_normed_attention(usual: UsualParts, norm: RmsNorm) -> GroupedQueryAttention:
    """Returns attention whose values are normed like its queries and keys, which therefore need no scale."""
    bias = usual.attention_bias
    return replace(usual.attention(norm), qk_norm="head", v_norm=True, scale=1.0, qkv_bias=bias, o_bias=bias)


def last_own_layer(kinds: list[str], own: int, number: int) -> int:
    """Returns the last of the `own` first layers, which keep keys and values, that is of the kind of layer `number`."""
    earlier = [source for source in range(own) if kinds[source] == kinds[number]]
    if not earlier:
        raise ValueError(f"config num_kv_shared_layers {len(kinds) - own} leaves no {kinds[number]} layer to read from")
    return earlier[-1]


def _with_full_sizes(config: HfConfig, kinds: list[str]) -> HfConfig:
    """Returns the config with the sizes of full layers, which transformers 5.23 writes for each layer by its number."""
    of_layers = config.values.get("per_layer_config") or {}
    known = {"head_dim": "global_head_dim"}
    if config.flag("attention_k_eq_v", False):
        known["num_key_value_heads"] = "num_global_key_value_heads"
    full = {str(number) for number, kind in enumerate(kinds) if kind == _FULL}
    sizes = list(of_layers.values()) if isinstance(of_layers, dict) else [None]
    if not sizes:
        return config
    first = sizes[0]
    if (
        not isinstance(first, dict)
        or set(of_layers) != full
        or first.keys() - known
        or any(one != first for one in sizes)
    ):
        raise ValueError(
            f"config per_layer_config must give all full layers, {', '.join(sorted(full))}, the same "
            f"{' and '.join(known)}, and other layers nothing, not {of_layers!r}"
        )
    return config.with_defaults(**{known[key]: value for key, value in first.items()})


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer. Some of its parts are not in every model."""
    decls = declare_layer(spec, layer)
    found = norm_sources(spec, layer, prefix) | attention_sources(spec, layer, prefix)
    found |= _expert_sources(decls, prefix) if "router" in decls else gated_ffn_sources(spec, layer, prefix)
    found |= layer_embedding_sources(decls, prefix)
    return found | {"layer_scale": whole(f"{prefix}layer_scalar", (1,))}


def layer_embedding_sources(decls: Mapping[str, ParamDecl], prefix: str) -> dict[str, tuple[Source, ...]]:
    """Returns the sources of what a layer makes of its own embeddings, where it has any."""
    names = {"layer_embedding_gate": "per_layer_input_gate", "layer_embedding_out": "per_layer_projection"}
    norms = {"layer_embedding_post_norm": "post_per_layer_input_norm"}
    return with_biases(decls, prefix, names) | named_norms(decls, prefix, norms)


def _expert_sources(decls: Mapping[str, ParamDecl], prefix: str) -> dict[str, tuple[Source, ...]]:
    """Returns the sources of an FFN with experts beside it, of which one tensor has all."""
    norms = {
        "shared_norm": "pre_feedforward_layernorm",
        "shared_post_norm": "post_feedforward_layernorm_1",
        "experts_norm": "pre_feedforward_layernorm_2",
        "experts_post_norm": "post_feedforward_layernorm_2",
    }
    of_router = {"router": "proj.weight", "router_scale": "scale", "router_counts": "per_expert_scale"}
    found = named_norms(decls, prefix, norms) | gated_sources(decls, f"{prefix}mlp.", "shared_")
    found |= stacked_expert_sources(decls, f"{prefix}experts.gate_up_proj", f"{prefix}experts.down_proj")
    return found | {key: whole(f"{prefix}router.{name}", decls[key].shape) for key, name in of_router.items()}


# The tensors of layers' own embeddings outside the layers, and those of what stands beside the text.
LAYER_EMBEDDINGS = (
    ("layer_embeddings", "embed_tokens_per_layer.weight"),
    ("layer_embedding_projection", "per_layer_model_projection.weight"),
    ("layer_embedding_norm", "per_layer_projection_norm.weight"),
)
BESIDE_TEXT = ("model.audio_tower.", "model.embed_vision.", "model.embed_audio.")
NAMES = OuterNames(others=LAYER_EMBEDDINGS)
UNDERSTOOD = ("use_bidirectional_attention", "num_experts")
FAMILY = Family("Gemma4ForCausalLM", gemma4_spec, layer_sources=sources, names=NAMES, understood=UNDERSTOOD)
_BESIDE = beside_vision("Gemma4ForConditionalGeneration", gemma4_spec)
FAMILIES = (
    FAMILY,
    replace(
        _BESIDE,
        layer_sources=sources,
        names=NAMES,
        understood=UNDERSTOOD,
        foreign=(*_BESIDE.foreign, *BESIDE_TEXT),
    ),
)
