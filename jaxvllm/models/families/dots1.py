"""dots.llm1: a norm over each query and key head, dense layers first, then experts as in DeepSeek V3."""

from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.glm4_moe import SOURCES, deepseek_router
from jaxvllm.models.families.qwen2 import qwen_windows
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.spec import ModelSpec


def dots1_spec(config: HfConfig) -> ModelSpec:
    config = config.with_defaults(
        num_key_value_heads=32, norm_topk_prob=False, use_sliding_window=True, max_window_layers=62
    )
    usual, norm = UsualParts(config), RmsNorm(config.number("rms_norm_eps", 1e-6))
    dense = Block(
        norm=norm,
        attention=usual.head_normed_attention(norm),
        ffn=usual.gated_ffn(),
        rope=usual.rope(),
    )
    size = config.integer("moe_intermediate_size", 1408)
    shared_size = size * config.integer("n_shared_experts")
    sparse = replace(dense, ffn=usual.experts(deepseek_router(config), size, shared_size))
    first = config.integer("first_k_dense_replace", 0, least=0)
    windows = enumerate(qwen_windows(config))
    return usual.model((replace(dense if n < first else sparse, window=window) for n, window in windows), norm)


FAMILY = Family("Dots1ForCausalLM", dots1_spec, layer_sources=SOURCES)
