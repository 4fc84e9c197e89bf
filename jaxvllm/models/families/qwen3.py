"""Qwen 3, dense: a Llama with a norm over each query and key head."""

from jaxvllm.models.block import Block
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.qwen2 import qwen_windows
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.spec import ModelSpec


def qwen3_spec(config: HfConfig) -> ModelSpec:
    # The default of head_dim is 128, whatever the hidden size is.
    usual, norm = UsualParts(config.with_defaults(head_dim=128)), RmsNorm(config.number("rms_norm_eps", 1e-6))
    layer = Block(
        norm=norm,
        attention=usual.head_normed_attention(norm),
        ffn=usual.gated_ffn(),
        rope=usual.rope(),
    )
    return usual.model(layer.in_windows(qwen_windows(config)), norm)


FAMILY = Family("Qwen3ForCausalLM", qwen3_spec)
