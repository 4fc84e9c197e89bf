"""Nemotron and Minitron, dense: LayerNorm with weights stored less one, squared ReLU, and a rope in half a head."""

from collections.abc import Mapping
from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.ffn import PlainFfn
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import LayerNorm
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import Source, attention_sources, norm_sources, with_biases


def nemotron_spec(config: HfConfig) -> ModelSpec:
    usual = UsualParts(config.with_defaults(partial_rotary_factor=0.5))
    norm, has_bias = LayerNorm(config.number("norm_eps", 1e-5), offset=1.0), usual.attention_bias
    layer = Block(
        norm=norm,
        attention=replace(usual.attention(norm), qkv_bias=has_bias, o_bias=has_bias),
        ffn=squared_ffn(config),
        rope=usual.rope(),
    )
    return usual.model([layer] * usual.num_layers, norm)


def squared_ffn(config: HfConfig) -> PlainFfn:
    """Returns an FFN without a gate, whose activation is the square of ReLU where the config names no other."""
    sizes = config.integer("hidden_size"), config.integer("intermediate_size")
    return PlainFfn(*sizes, config.activation("hidden_act", "relu2"), config.flag("mlp_bias", False))


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer."""
    ffn = with_biases(declare_layer(spec, layer), prefix, {"up": "mlp.up_proj", "down": "mlp.down_proj"})
    return norm_sources(spec, layer, prefix) | attention_sources(spec, layer, prefix) | ffn


FAMILY = Family("NemotronForCausalLM", nemotron_spec, layer_sources=sources)
