"""OLMo, the first one: a Llama whose norms have no weights, and whose queries, keys and values may be bounded."""

from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import LayerNorm
from jaxvllm.models.spec import ModelSpec


def olmo_spec(config: HfConfig) -> ModelSpec:
    usual = UsualParts(config.with_defaults(max_position_embeddings=2048))
    norm, has_bias = LayerNorm(1e-5, bias=False, has_weight=False), usual.attention_bias
    layer = Block(
        norm=norm,
        attention=replace(
            usual.attention(norm),
            qkv_bias=has_bias,
            o_bias=has_bias,
            qkv_limit=config.optional_number("clip_qkv"),
        ),
        ffn=usual.gated_ffn(),
        rope=usual.rope(),
    )
    return usual.model([layer] * usual.num_layers, norm)


FAMILY = Family("OlmoForCausalLM", olmo_spec, understood=("clip_qkv",))
