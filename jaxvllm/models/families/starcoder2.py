"""StarCoder 2: LayerNorm, biases everywhere, a window, and no gate in the FFN."""

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


def starcoder2_spec(config: HfConfig) -> ModelSpec:
    usual = UsualParts(config.with_defaults(tie_word_embeddings=True, num_key_value_heads=2))
    norm, has_bias = LayerNorm(config.number("norm_epsilon", 1e-5)), config.flag("use_bias", True)
    activation = config.activation("hidden_act", "gelu_pytorch_tanh")
    layer = Block(
        norm=norm,
        attention=replace(usual.attention(norm), qkv_bias=has_bias, o_bias=has_bias),
        ffn=PlainFfn(usual.hidden_size, usual.ffn_size, activation, has_bias),
        rope=usual.rope(),
        window=config.optional_integer("sliding_window"),
    )
    return usual.model([layer] * usual.num_layers, norm)


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer."""
    decls = declare_layer(spec, layer)
    ffn = with_biases(decls, prefix, {"up": "mlp.c_fc", "down": "mlp.c_proj"})
    return norm_sources(spec, layer, prefix) | attention_sources(spec, layer, prefix) | ffn


FAMILY = Family("Starcoder2ForCausalLM", starcoder2_spec, layer_sources=sources)
