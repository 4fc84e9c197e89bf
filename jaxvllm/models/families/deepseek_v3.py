"""DeepSeek V3, R1 and V3.1, and Kimi K2: DeepSeek V2 whose experts are chosen by a sigmoid, in groups."""

from jaxvllm.models.families.deepseek_v2 import latent_attention_sources, latent_model
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.glm4_moe import deepseek_router
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import sparse_projections


def deepseek_v3_spec(config: HfConfig) -> ModelSpec:
    config = v3_defaults(config)
    return latent_model(config, deepseek_router(config))


def v3_defaults(config: HfConfig) -> HfConfig:
    """Returns the config with what DeepSeek V3 means where a key is not there."""
    config.refuse({"topk_method": (None, "noaux_tc"), "scoring_func": (None, "sigmoid")})
    return config.with_defaults(
        n_routed_experts=256, n_group=8, topk_group=4, routed_scaling_factor=2.5, moe_intermediate_size=2048,
        n_shared_experts=1, first_k_dense_replace=3,
    )  # fmt: skip


SOURCES = sparse_projections(
    "shared_experts", attention=latent_attention_sources, router_choice="gate.e_score_correction_bias"
)
FAMILIES = (
    Family("DeepseekV3ForCausalLM", deepseek_v3_spec, layer_sources=SOURCES),
    # Kimi K2.5 and 2.6, text. Their own spelling of the architecture, and that of transformers.
    *(
        Family(
            architecture,
            deepseek_v3_spec,
            layer_sources=SOURCES,
            prefixes=("model.language_model.", "language_model.model."),
            foreign=("vision_tower.", "mm_projector.", "model.vision_tower.", "model.mm_projector."),
            nested_in="text_config",
        )
        for architecture in ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration")
    ),
)
