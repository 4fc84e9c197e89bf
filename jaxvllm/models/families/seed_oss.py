"""Seed-OSS: a Llama with biases on queries, keys and values."""

from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.spec import ModelSpec


def seed_oss_spec(config: HfConfig) -> ModelSpec:
    usual = UsualParts(config.with_defaults(head_dim=128, num_key_value_heads=8))
    norm = RmsNorm(config.number("rms_norm_eps", 1e-6))
    layer = Block(
        norm=norm,
        attention=replace(
            usual.attention(norm),
            qkv_bias=config.flag("attention_bias", True),
            o_bias=config.flag("attention_out_bias", False),
        ),
        ffn=usual.gated_ffn(),
        rope=usual.rope(),
    )
    return usual.model([layer] * usual.num_layers, norm)


FAMILY = Family("SeedOssForCausalLM", seed_oss_spec)
