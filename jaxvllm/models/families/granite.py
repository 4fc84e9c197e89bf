"""Granite 3, dense: a Llama with four multipliers."""

from dataclasses import replace

from jaxvllm.models.families.family import Family
from jaxvllm.models.families.llama import llama_spec
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.spec import ModelSpec


def granite_spec(config: HfConfig) -> ModelSpec:
    return replace(
        llama_spec(config),
        embed_scale=config.number("embedding_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
        attention_scale=config.number("attention_multiplier", 1.0),
        logit_scale=1 / config.number("logits_scaling", 1.0),
    )


FAMILY = Family("GraniteForCausalLM", granite_spec)
