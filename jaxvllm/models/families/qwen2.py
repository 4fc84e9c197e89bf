"""Qwen 2 and 2.5: a Llama with biases on q, k and v, and windows in the upper layers on request."""

from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.spec import ModelSpec


def qwen2_spec(config: HfConfig) -> ModelSpec:
    usual, norm = UsualParts(config), RmsNorm(config.number("rms_norm_eps", 1e-6))
    layer = Block(
        norm=norm,
        attention=replace(usual.attention(norm), qkv_bias=True),
        ffn=usual.gated_ffn(),
        rope=usual.rope(),
    )
    return usual.model(layer.in_windows(qwen_windows(config)), norm)


def qwen_windows(config: HfConfig) -> tuple[int | None, ...]:
    """Returns windows from layer max_window_layers on, when use_sliding_window asks for them."""
    asked = config.flag("use_sliding_window", False)
    window = config.optional_integer("sliding_window", 4096) if asked else None
    first = config.integer("max_window_layers", 28, least=0)
    num_layers = config.integer("num_hidden_layers")
    kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    return config.windows(config.layer_types(kinds), window)


FAMILY = Family("Qwen2ForCausalLM", qwen2_spec)
