"""Gemma 2: norms on both sides, soft caps, and a window in every other layer."""

from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.ffn import GatedFfn
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.spec import ModelSpec


def gemma2_spec(config: HfConfig) -> ModelSpec:
    config = config.with_defaults(
        vocab_size=256_000,
        hidden_size=2304,
        num_hidden_layers=26,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        intermediate_size=9216,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    usual, norm = UsualParts(config), RmsNorm(config.number("rms_norm_eps", 1e-6), offset=1.0)
    layer = Block(
        norm=norm,
        placement="sandwich",
        attention=replace(
            usual.attention(norm),
            scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
            soft_cap=config.optional_number("attn_logit_softcapping", 50.0),
            qkv_bias=usual.attention_bias,
            o_bias=usual.attention_bias,
        ),
        # hidden_act, which some configs also have, was never used.
        ffn=GatedFfn(usual.hidden_size, usual.ffn_size, config.activation("hidden_activation", "gelu_pytorch_tanh")),
        rope=usual.rope(),
    )
    kinds = ["full_attention" if number % 2 else "sliding_attention" for number in range(usual.num_layers)]
    windows = config.windows(config.layer_types(kinds), config.optional_integer("sliding_window", 4096))
    return replace(
        usual.model(layer.in_windows(windows), norm),
        logit_soft_cap=config.optional_number("final_logit_softcapping", 30.0),
        embed_scale=usual.hidden_size**0.5,
    )


FAMILY = Family("Gemma2ForCausalLM", gemma2_spec, exceeds_float16=True)
