"""Qwen 3 with experts: a norm over each query and key head, and experts in the layers that the config names."""

from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.expert_router import ExpertRouter
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import sparse_projections


def qwen3_moe_spec(config: HfConfig) -> ModelSpec:
    config = config.with_defaults(head_dim=128, num_key_value_heads=4)
    config.refuse({"use_sliding_window": (None, False)})
    usual, norm = UsualParts(config), RmsNorm(config.number("rms_norm_eps", 1e-6))
    dense = Block(
        norm=norm,
        attention=usual.head_normed_attention(norm),
        ffn=usual.gated_ffn(),
        rope=usual.rope(),
    )
    sparse = replace(dense, ffn=usual.experts(qwen_router(config), config.integer("moe_intermediate_size", 768)))
    with_experts = sparse_layers(config)
    return usual.model((sparse if n in with_experts else dense for n in range(usual.num_layers)), norm)


def qwen_router(config: HfConfig) -> ExpertRouter:
    """Returns the softmax over all experts, whose best count as much as they do there, or add up to one."""
    return ExpertRouter(
        config.integer("hidden_size"),
        config.integer("num_experts", 128),
        config.integer("num_experts_per_tok", 8),
        is_normalized=config.flag("norm_topk_prob", False),
    )


def sparse_layers(config: HfConfig) -> list[int]:
    """Returns the layers with experts: every `decoder_sparse_step`th, but those in `mlp_only_layers`."""
    dense, step = config.values.get("mlp_only_layers") or [], config.integer("decoder_sparse_step", 1)
    if not isinstance(dense, list) or not all(type(number) is int for number in dense):
        raise ValueError(f"config mlp_only_layers must be a list of layers, not {dense!r}")
    return [n for n in range(config.integer("num_hidden_layers")) if n not in dense and (n + 1) % step == 0]


FAMILY = Family("Qwen3MoeForCausalLM", qwen3_moe_spec, layer_sources=sparse_projections(), understood=("num_experts",))
