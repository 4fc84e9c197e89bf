"""Gemma 4, text only and dense, alone or inside the multimodal checkpoint.

It has five windowed layers to a full one. Layers of full attention have larger heads, of which a rope turns the first
quarter, and may take their keys for values, too. The last layers of the small models read the keys and values of an
earlier layer of their kind. Tokens of small models mean something to each layer alone.
"""

from collections.abc import Mapping
from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.families.family import Family, beside_vision
from jaxvllm.models.families.gemma3 import rope_entries
from jaxvllm.models.families.usual import UsualParts
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
    small = replace(
        usual.attention(norm),
        qk_norm="head",
        v_norm=True,
        scale=1.0,
        qkv_bias=usual.attention_bias,
        o_bias=usual.attention_bias,
    )
    sliding = Block(
        norm=norm,
        placement="sandwich",
        attention=small,
        ffn=GatedFfn(usual.hidden_size, usual.ffn_size, activation),
        rope=config.rope(of_sliding, 10_000.0, usual.head_size, usual.max_position),
        window=config.integer("sliding_window", 512),
        embedding=LayerEmbedding(own_size, usual.num_layers, usual.hidden_size, activation, norm) if own_size else None,
        has_scale=True,
    )
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
    kinds = [*config.layer_types_by_period(usual.num_layers, 6)[:-1], _FULL]  # the last one always sees all
    own = usual.num_layers - config.integer("num_kv_shared_layers", 0, least=0)
    is_wide = config.flag("use_double_wide_mlp", False)

    def layer(number: int) -> Block:
        """Returns a layer of its kind. The last ones read the last earlier one of their kind, and may be wider."""
        kind, attention = (full, large) if kinds[number] == _FULL else (sliding, small)
        if number < own:
            return kind
        earlier = [source for source in range(own) if kinds[source] == kinds[number]]
        if not earlier:
            raise ValueError(
                f"config num_kv_shared_layers {usual.num_layers - own} leaves no {kinds[number]} layer to read from"
            )
        ffn = GatedFfn(usual.hidden_size, usual.ffn_size * (2 if is_wide else 1), activation)
        return replace(kind, attention=replace(attention, kv="none"), ffn=ffn, reads=earlier[-1])

    return replace(
        usual.model(map(layer, range(usual.num_layers)), norm),
        max_position=usual.max_position,
        logit_soft_cap=config.optional_number("final_logit_softcapping"),
        embed_scale=usual.hidden_size**0.5,
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
