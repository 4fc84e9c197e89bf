"""OPT: LayerNorm, learned positions whose table begins with two unused rows, ReLU, and biases everywhere."""

from collections.abc import Mapping

from jaxvllm.models.block import Block
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.usual import multi_head
from jaxvllm.models.ffn import PlainFfn
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import LayerNorm
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec, PositionTable
from jaxvllm.models.weight_names import OuterNames, Source, attention_sources, named_norms, with_biases

OFFSET = 2


def opt_spec(config: HfConfig) -> ModelSpec:
    hidden_size = config.integer("hidden_size", 768)
    # OPT-350m alone norms after the sums, and has embeddings of another size.
    config.refuse(
        {
            "do_layer_norm_before": (None, True),
            "_remove_final_layer_norm": (None, False),
            "layer_norm_elementwise_affine": (None, True),
            "word_embed_proj_dim": (None, hidden_size),
        }
    )
    num_layers, num_heads = config.integer("num_hidden_layers", 12), config.integer("num_attention_heads", 12)
    num_positions, ffn_size = config.integer("max_position_embeddings", 2048), config.integer("ffn_dim", 3072)
    has_bias, activation = config.flag("enable_bias", True), config.activation("activation_function", "relu")
    if hidden_size % num_heads:
        raise ValueError(f"config hidden_size {hidden_size} must be a multiple of num_attention_heads {num_heads}")
    norm = LayerNorm(1e-5)
    layer = Block(
        norm=norm,
        attention=multi_head(hidden_size, num_heads, norm, has_bias=has_bias),
        ffn=PlainFfn(hidden_size, ffn_size, activation, has_bias),
    )
    return ModelSpec(
        vocab_size=config.integer("vocab_size", 50_272),
        layers=(layer,) * num_layers,
        norm=norm,
        max_position=num_positions,
        positions=PositionTable(num_positions + OFFSET, OFFSET),
        tie_embeddings=config.flag("tie_word_embeddings", True),
    )


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer, where `final_layer_norm` is the norm before the FFN."""
    decls = declare_layer(spec, layer)
    return (
        named_norms(decls, prefix, {"attention_norm": "self_attn_layer_norm", "ffn_norm": "final_layer_norm"})
        | attention_sources(spec, layer, prefix, output="self_attn.out_proj")
        | with_biases(decls, prefix, {"up": "fc1", "down": "fc2"})
    )


FAMILY = Family(
    "OPTForCausalLM",
    opt_spec,
    layer_sources=sources,
    names=OuterNames(final_norm="final_layer_norm", positions="embed_positions.weight"),
    prefixes=("model.decoder.", "decoder."),
)
