"""Qwen 2 and 2.5: a Llama with biases on q, k and v, and windows in the upper layers on request."""

from dataclasses import replace

from jaxvllm.models.families.family import Family
from jaxvllm.models.families.llama import llama_spec
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.spec import ModelSpec


def qwen2_spec(config: HfConfig) -> ModelSpec:
    spec = llama_spec(config)
    return replace(spec, qkv_bias=True, o_bias=False, windows=qwen_windows(config, spec.num_layers))


def qwen_windows(config: HfConfig, num_layers: int) -> tuple[int | None, ...]:
    """Returns windows from layer max_window_layers on, when use_sliding_window asks for them."""
    asked = config.flag("use_sliding_window", False)
    window = config.optional_integer("sliding_window", 4096) if asked else None
    first = config.integer("max_window_layers", 28, least=0)
    kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    return config.windows(config.layer_types(kinds), window)


FAMILY = Family("Qwen2ForCausalLM", qwen2_spec)
