"""Gemma 4, text only and dense, alone or inside the multimodal checkpoint.

It has five windowed layers to a full one. Layers of full attention have larger heads, of which a rope turns the first
quarter, and may take their keys for values, too. The last layers of the small models read the keys and values of an
earlier layer of their kind. Tokens of small models mean something to each layer alone.
"""

from collections.abc import Mapping
from dataclasses import replace

from jaxvllm.models.attention import GroupedQueryAttention, KvProjections
from jaxvllm.models.families.family import Family, beside_vision
from jaxvllm.models.families.gemma3 import rope_entries
from jaxvllm.models.ffn import GatedFfn
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.layer_embedding import LayerEmbedding
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import OuterNames, Source, named_norms, separate_projections, whole, with_biases

_FULL = "full_attention"
# The part of a head that turns in layers of full attention, and how.
_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25}


def gemma4_spec(config: HfConfig) -> ModelSpec:
    # Only the tokens of an image would see those after them.
    config.refuse({"enable_moe_block": (None, False), "use_bidirectional_attention": (None, False, "vision")})
    num_layers, hidden_size = config.integer("num_hidden_layers", 30), config.integer("hidden_size", 2304)
    vocab_size, ffn_size = config.integer("vocab_size", 262_144), config.integer("intermediate_size", 9216)
    num_heads, num_kv_heads = config.integer("num_attention_heads", 8), config.integer("num_key_value_heads", 4)
    kinds = [*config.layer_types_by_period(num_layers, 6)[:-1], _FULL]  # the last one always sees all
    norm = RmsNorm(config.number("rms_norm_eps", 1e-6))
    activation = config.activation("hidden_activation", "gelu_pytorch_tanh")
    max_position = config.integer("max_position_embeddings", 131_072)
    num_shared = config.integer("num_kv_shared_layers", 0, least=0)
    has_bias = config.flag("attention_bias", False)
    key_is_value = config.flag("attention_k_eq_v", False)
    sliding = GroupedQueryAttention(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=config.integer("head_dim", 256),
        norm=norm,
        qk_norm="head",
        qkv_bias=has_bias,
        o_bias=has_bias,
        v_norm=True,
    )
    full = replace(
        sliding,
        head_size=config.integer("global_head_dim", 512),
        num_kv_heads=config.integer("num_global_key_value_heads", num_kv_heads) if key_is_value else num_kv_heads,
        kv="key" if key_is_value else "key and value",
    )
    own = num_layers - num_shared
    none: KvProjections = "none"

    def attention(layer: int) -> GroupedQueryAttention:
        of_kind = full if kinds[layer] == _FULL else sliding
        return of_kind if layer < own else replace(of_kind, kv=none)

    def source(layer: int) -> int | None:
        earlier = [number for number in range(own) if kinds[number] == kinds[layer]]
        if layer >= own and not earlier:
            raise ValueError(f"config num_kv_shared_layers {num_shared} leaves no {kinds[layer]} layer to read from")
        return earlier[-1] if layer >= own else None

    if own_size := config.integer("hidden_size_per_layer_input", 256, least=0):
        config.refuse({"vocab_size_per_layer_input": (None, vocab_size)})
    wide = 2 if config.flag("use_double_wide_mlp", False) else 1
    of_full, of_sliding = rope_entries(config)
    return ModelSpec(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=sliding.head_size,
        ffn_size=ffn_size,
        norm=norm,
        max_position=max_position,
        attention_scale=1.0,
        windows=config.windows(kinds, config.integer("sliding_window", 512)),
        ropes=(
            config.rope(of_full or _ROPE, 1_000_000.0, full.head_size, max_position),
            config.rope(of_sliding, 10_000.0, sliding.head_size, max_position),
        ),
        layer_rope=tuple(int(kind != _FULL) for kind in kinds),
        activation=activation,
        placement="sandwich",
        qk_norm="head",
        logit_soft_cap=config.optional_number("final_logit_softcapping"),
        embed_scale=hidden_size**0.5,
        tie_embeddings=config.flag("tie_word_embeddings", True),
        attentions=tuple(map(attention, range(num_layers))),
        ffns=tuple(
            GatedFfn(hidden_size, ffn_size * (1 if layer < own else wide), activation) for layer in range(num_layers)
        ),
        reads=tuple(map(source, range(num_layers))) if num_shared else (),
        layer_embedding=LayerEmbedding(own_size, num_layers, hidden_size, activation, norm) if own_size else None,
        layer_scales=True,
    )


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer. Some of its parts are not in every model."""
    decls = declare_layer(spec, layer)
    names = {"layer_embedding_gate": "per_layer_input_gate", "layer_embedding_out": "per_layer_projection"}
    found = dict(separate_projections(spec, layer, prefix)) | with_biases(decls, prefix, names)
    found |= named_norms(decls, prefix, {"layer_embedding_post_norm": "post_per_layer_input_norm"})
    return found | {"layer_scale": whole(f"{prefix}layer_scalar", (1,))}


NAMES = OuterNames(
    others=(
        ("layer_embeddings", "embed_tokens_per_layer.weight"),
        ("layer_embedding_projection", "per_layer_model_projection.weight"),
        ("layer_embedding_norm", "per_layer_projection_norm.weight"),
    )
)
UNDERSTOOD = ("use_bidirectional_attention",)
FAMILY = Family("Gemma4ForCausalLM", gemma4_spec, layer_sources=sources, names=NAMES, understood=UNDERSTOOD)
_BESIDE = beside_vision("Gemma4ForConditionalGeneration", gemma4_spec)
FAMILIES = (
    FAMILY,
    replace(
        _BESIDE,
        layer_sources=sources,
        names=NAMES,
        understood=UNDERSTOOD,
        foreign=(*_BESIDE.foreign, "model.audio_tower.", "model.embed_vision.", "model.embed_audio."),
    ),
)
