"""Granite 3, dense: a Llama with four multipliers."""

from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.spec import ModelSpec


def granite_spec(config: HfConfig) -> ModelSpec:
    usual, norm = UsualParts(config), RmsNorm(config.number("rms_norm_eps", 1e-6))
    layer = Block(
        norm=norm,
        attention=replace(
            usual.attention(norm),
            scale=config.number("attention_multiplier", 1.0),
            qkv_bias=usual.attention_bias,
            o_bias=usual.attention_bias,
        ),
        ffn=usual.gated_ffn(),
        rope=usual.rope(),
        residual_scale=config.number("residual_multiplier", 1.0),
    )
    return replace(
        usual.model([layer] * usual.num_layers, norm),
        embed_scale=config.number("embedding_multiplier", 1.0),
        logit_scale=1 / config.number("logits_scaling", 1.0),
    )


FAMILY = Family("GraniteForCausalLM", granite_spec)
