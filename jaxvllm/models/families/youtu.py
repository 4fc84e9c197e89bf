"""Youtu-LLM: the latent attention of DeepSeek V3, and no experts."""

from jaxvllm.models.block import Block
from jaxvllm.models.families.deepseek_v2 import latent_attention, latent_attention_sources
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import sparse_projections


def youtu_spec(config: HfConfig) -> ModelSpec:
    usual, norm = (
        UsualParts(config.with_defaults(tie_word_embeddings=True)),
        RmsNorm(config.number("rms_norm_eps", 1e-6)),
    )
    attention, theta = latent_attention(config), config.number("rope_theta", 10_000.0)
    layer = Block(
        norm=norm,
        attention=attention,
        ffn=usual.gated_ffn(),
        rope=config.rope(config.rope_parameters(), theta, attention.rope_size, usual.max_position),
    )
    return usual.model([layer] * usual.num_layers, norm)


FAMILY = Family("YoutuForCausalLM", youtu_spec, layer_sources=sparse_projections(attention=latent_attention_sources))
