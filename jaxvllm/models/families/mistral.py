"""Mistral: a Llama with one sliding window in all layers."""

from dataclasses import replace

from jaxvllm.models.families.family import Family
from jaxvllm.models.families.llama import llama_spec
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.spec import ModelSpec


def mistral_spec(config: HfConfig) -> ModelSpec:
    spec = llama_spec(config.with_defaults(num_key_value_heads=8))
    # A config without the key means 4096, one with null means no window.
    window = config.optional_integer("sliding_window", 4096)
    return replace(spec, layers=spec.layers[0].in_windows([window] * spec.num_layers))


FAMILY = Family("MistralForCausalLM", mistral_spec)
