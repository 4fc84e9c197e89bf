"""Gemma 2: norms on both sides, soft caps, and a window in every other layer."""

from jaxvllm.models.families.family import Family
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.spec import ModelSpec


def gemma2_spec(config: HfConfig) -> ModelSpec:
    num_layers = config.integer("num_hidden_layers", 26)
    hidden_size = config.integer("hidden_size", 2304)
    head_size = config.integer("head_dim", 256)
    max_position = config.integer("max_position_embeddings", 8192)
    rope, _ = config.ropes(10_000.0, head_size, max_position)
    kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)]
    attention_bias = config.flag("attention_bias", False)
    return ModelSpec(
        vocab_size=config.integer("vocab_size", 256_000),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=config.integer("num_attention_heads", 8),
        num_kv_heads=config.integer("num_key_value_heads", 4),
        head_size=head_size,
        ffn_size=config.integer("intermediate_size", 9216),
        norm=RmsNorm(config.number("rms_norm_eps", 1e-6), offset=1.0),
        max_position=config.served_positions(config.rope_parameters(), max_position),
        attention_scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        windows=config.windows(config.layer_types(kinds), config.optional_integer("sliding_window", 4096)),
        ropes=(rope,),
        layer_rope=(0,) * num_layers,
        # hidden_act, which some configs also have, was never used.
        activation=config.activation("hidden_activation", "gelu_pytorch_tanh"),
        placement="sandwich",
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        attention_soft_cap=config.optional_number("attn_logit_softcapping", 50.0),
        logit_soft_cap=config.optional_number("final_logit_softcapping", 30.0),
        embed_scale=hidden_size**0.5,
        tie_embeddings=config.flag("tie_word_embeddings", True),
    )


FAMILY = Family("Gemma2ForCausalLM", gemma2_spec)
