"""GLM-4.7-Flash: a DeepSeek V3 of other sizes, whose experts are in one group."""

from jaxvllm.models.families.deepseek_v2 import latent_model
from jaxvllm.models.families.deepseek_v3 import SOURCES
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.glm4_moe import deepseek_router
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.spec import ModelSpec


def glm4_moe_lite_spec(config: HfConfig) -> ModelSpec:
    config = config.with_defaults(
        n_routed_experts=64, num_experts_per_tok=4, routed_scaling_factor=1.8, moe_intermediate_size=1536,
        n_shared_experts=1, q_lora_rank=768, qk_nope_head_dim=192, v_head_dim=256, rms_norm_eps=1e-5,
        first_k_dense_replace=1,
    )  # fmt: skip
    return latent_model(config, deepseek_router(config))


FAMILY = Family("Glm4MoeLiteForCausalLM", glm4_moe_lite_spec, layer_sources=SOURCES)
