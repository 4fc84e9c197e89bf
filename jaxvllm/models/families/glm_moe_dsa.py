"""GLM-5 and 5.1: a DeepSeek V3.2 of other sizes, whose index turns neighbours."""

from jaxvllm.models.families.deepseek_v2 import latent_model
from jaxvllm.models.families.deepseek_v32 import SOURCES, sparse_indexer
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.glm4_moe import deepseek_router
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.spec import ModelSpec


def glm_moe_dsa_spec(config: HfConfig) -> ModelSpec:
    # Layers of GLM-5.2 that attend to what an earlier layer's index has chosen are not computed.
    full = ["full"] * config.integer("num_hidden_layers")
    config.layer_types(full, ("full",), key="indexer_types")
    config.refuse({"index_topk_freq": (None, 1), "index_topk_pattern": (None, "F" * len(full))})
    config = config.with_defaults(
        n_routed_experts=256, routed_scaling_factor=2.5, moe_intermediate_size=2048, n_shared_experts=1,
        first_k_dense_replace=3, q_lora_rank=2048, qk_nope_head_dim=192, v_head_dim=256, rms_norm_eps=1e-5,
    )  # fmt: skip
    return latent_model(config, deepseek_router(config), sparse_indexer(config, 32, "neighbours"))


FAMILY = Family("GlmMoeDsaForCausalLM", glm_moe_dsa_spec, layer_sources=SOURCES)
