"""Command A with experts (Cohere 2 MoE): attention and experts beside each other, after one norm."""

from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.expert_router import ExpertRouter
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.ffn import GatedFfn
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import LayerNorm, Norm, RmsNorm
from jaxvllm.models.rope import no_rope
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import sparse_projections


def cohere2_moe_spec(config: HfConfig) -> ModelSpec:
    config = config.with_defaults(head_dim=128, max_position_embeddings=8192, tie_word_embeddings=True)
    config.refuse(
        {
            "expert_selection_fn": (None, "softmax", "sigmoid"),
            "shared_expert_combination_strategy": (None, "average", "sum"),
        }
    )
    usual = UsualParts(config)
    eps = config.optional_number("rms_norm_eps")
    norm: Norm = LayerNorm(config.number("layer_norm_eps", 1e-5), bias=False) if eps is None else RmsNorm(eps)
    has_bias = usual.attention_bias
    router = ExpertRouter(
        usual.hidden_size,
        config.integer("num_experts", 8),
        config.integer("num_experts_per_tok", 2),
        scoring="chosen_sigmoid" if config.values.get("expert_selection_fn") == "sigmoid" else "chosen",
        is_normalized=config.flag("norm_topk_prob", True),
    )
    shared = config.integer("num_shared_experts", 0, least=0)
    is_mean = shared and config.values.get("shared_expert_combination_strategy") != "sum"
    experts = replace(
        usual.experts(router, usual.ffn_size, usual.ffn_size * shared), output_scale=0.5 if is_mean else 1.0
    )
    dense = config.integer("first_k_dense_replace", 0, least=0)
    are_sparse = config.sparse_layers(dense)
    dense_ffn = experts if all(are_sparse) else _dense_ffn(config)
    period, dense_period = (
        config.integer("sliding_window_pattern", 4),
        config.integer("prefix_dense_sliding_window_pattern", 1),
    )
    numbers = [*((n, dense_period) for n in range(dense)), *((n, period) for n in range(usual.num_layers - dense))]
    kinds = config.layer_types(["sliding_attention" if (n + 1) % each else "full_attention" for n, each in numbers])
    windows = config.windows(kinds, config.optional_integer("sliding_window", 4096))

    def layer(window: int | None, is_sparse: bool) -> Block:
        has_positions = window is not None or (not is_sparse and dense_period == 1)
        return Block(
            norm=norm,
            placement="parallel",
            attention=replace(usual.attention(norm), rope_pairs="neighbours", qkv_bias=has_bias, o_bias=has_bias),
            ffn=experts if is_sparse else dense_ffn,
            rope=usual.rope() if has_positions else no_rope(usual.rope()),
            window=window,
        )

    spec = usual.model(map(layer, windows, are_sparse), norm)
    return replace(spec, logit_scale=config.number("logit_scale", 0.0625))


def _dense_ffn(config: HfConfig) -> GatedFfn:
    size = config.integer("prefix_dense_intermediate_size", config.integer("intermediate_size"))
    return GatedFfn(config.integer("hidden_size"), size, config.activation("hidden_act", "silu"))


SOURCES = sparse_projections("shared_experts")
FAMILY = Family("Cohere2MoeForCausalLM", cohere2_moe_spec, layer_sources=SOURCES, understood=("num_experts",))
