"""Gemma 3, text only, alone or inside the multimodal checkpoint.

It has five windowed layers to a full one, each kind with its own rope, and a norm over each query and key head."""

from typing import Any

from jaxvllm.models.families.family import Family, beside_vision
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.spec import ModelSpec


def gemma3_spec(config: HfConfig) -> ModelSpec:
    num_layers = config.integer("num_hidden_layers", 26)
    hidden_size = config.integer("hidden_size", 2304)
    head_size = config.integer("head_dim", 256)
    max_position = config.integer("max_position_embeddings", 131_072)
    period = config.integer("sliding_window_pattern", 6)
    kinds = config.layer_types_by_period(num_layers, period)
    full, sliding = rope_entries(config)
    attention_bias = config.flag("attention_bias", False)
    return ModelSpec(
        vocab_size=config.integer("vocab_size", 262_208),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=config.integer("num_attention_heads", 8),
        num_kv_heads=config.integer("num_key_value_heads", 4),
        head_size=head_size,
        ffn_size=config.integer("intermediate_size", 9216),
        norm=RmsNorm(config.number("rms_norm_eps", 1e-6), offset=1.0),
        # Gemma was trained with its linear factor, so max_position_embeddings includes it already.
        max_position=max_position,
        attention_scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        windows=config.windows(kinds, config.optional_integer("sliding_window", 4096)),
        ropes=(
            config.rope(full, config.number("rope_theta", 1_000_000.0), head_size, max_position),
            config.rope(sliding, config.number("rope_local_base_freq", 10_000.0), head_size, max_position),
        ),
        layer_rope=tuple(int(kind == "sliding_attention") for kind in kinds),
        activation=config.activation("hidden_activation", "gelu_pytorch_tanh"),
        placement="sandwich",
        qk_norm="head",
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        attention_soft_cap=config.optional_number("attn_logit_softcapping"),
        logit_soft_cap=config.optional_number("final_logit_softcapping"),
        embed_scale=hidden_size**0.5,
        tie_embeddings=config.flag("tie_word_embeddings", True),
    )


def rope_entries(config: HfConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the rope parameters of full and of sliding attention. An older scaling applies to full attention only."""
    parameters = config.rope_parameters()
    kinds = ("full_attention", "sliding_attention")
    if not any(kind in parameters for kind in kinds):
        return parameters, {}
    full, sliding = (parameters.get(kind) or {} for kind in kinds)
    if not isinstance(full, dict) or not isinstance(sliding, dict):
        raise ValueError(f"config rope_parameters must hold an object for each of {' and '.join(kinds)}")
    return full, sliding


FAMILIES = (
    Family("Gemma3ForCausalLM", gemma3_spec),
    beside_vision("Gemma3ForConditionalGeneration", gemma3_spec),
)
