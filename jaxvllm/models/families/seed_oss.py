"""Seed-OSS: a Llama with biases on queries, keys and values."""

from dataclasses import replace

from jaxvllm.models.families.family import Family
from jaxvllm.models.families.llama import llama_spec
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.spec import ModelSpec


def seed_oss_spec(config: HfConfig) -> ModelSpec:
    values = {"head_dim": 128} | dict(config.values)
    return replace(
        llama_spec(replace(config, values=values), num_kv_heads=8),
        qkv_bias=config.flag("attention_bias", True),
        o_bias=config.flag("attention_out_bias", False),
    )


FAMILY = Family("SeedOssForCausalLM", seed_oss_spec)
