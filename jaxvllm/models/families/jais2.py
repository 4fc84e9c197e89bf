"""Jais 2: a Llama with LayerNorm, biases everywhere, and the FFN of Nemotron, squared ReLU without a gate."""

from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.nemotron import sources, squared_ffn
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import LayerNorm
from jaxvllm.models.spec import ModelSpec


def jais2_spec(config: HfConfig) -> ModelSpec:
    usual = UsualParts(config.with_defaults(attention_bias=True, mlp_bias=True, max_position_embeddings=8192))
    norm, has_bias = LayerNorm(config.number("layer_norm_eps", 1e-5)), usual.attention_bias
    layer = Block(
        norm=norm,
        attention=replace(usual.attention(norm), qkv_bias=has_bias, o_bias=has_bias),
        ffn=squared_ffn(usual.config),
        rope=usual.rope(),
    )
    return usual.model([layer] * usual.num_layers, norm)


FAMILY = Family("Jais2ForCausalLM", jais2_spec, layer_sources=sources)
