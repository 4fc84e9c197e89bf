"""FlexOlmo: an OLMo 2 of experts, which count as much as the softmax over all says."""

from dataclasses import replace

from jaxvllm.models.expert_router import ExpertRouter
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.olmo2 import olmo_layer
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import sparse_projections


def flex_olmo_spec(config: HfConfig) -> ModelSpec:
    config = config.with_defaults(rope_theta=500_000.0, max_position_embeddings=4096)
    usual, norm = UsualParts(config), RmsNorm(config.number("rms_norm_eps", 1e-6))
    router = ExpertRouter(
        usual.hidden_size,
        config.integer("num_experts", 7),
        config.integer("num_experts_per_tok", 5),
        is_normalized=config.flag("norm_topk_prob", False),
    )
    layer = replace(olmo_layer(usual, norm), ffn=usual.experts(router, usual.ffn_size))
    return usual.model([layer] * usual.num_layers, norm)


FAMILY = Family("FlexOlmoForCausalLM", flex_olmo_spec, layer_sources=sparse_projections(), understood=("num_experts",))
