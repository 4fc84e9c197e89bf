"""Gemma 3, text only, alone or inside the multimodal checkpoint.

It has five windowed layers to a full one, each kind with its own rope, and a norm over each query and key head."""

from dataclasses import replace
from typing import Any

from jaxvllm.models.block import Block
from jaxvllm.models.families.family import Family, beside_vision
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.ffn import GatedFfn
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.spec import ModelSpec


def gemma3_spec(config: HfConfig) -> ModelSpec:
    config = config.with_defaults(
        vocab_size=262_208,
        hidden_size=2304,
        num_hidden_layers=26,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        intermediate_size=9216,
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
    )
    usual, norm = UsualParts(config), RmsNorm(config.number("rms_norm_eps", 1e-6), offset=1.0)
    of_full, of_sliding = rope_entries(config)
    sizes = usual.head_size, usual.max_position
    full = Block(
        norm=norm,
        placement="sandwich",
        attention=replace(
            usual.attention(norm),
            qk_norm="head",
            scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
            soft_cap=config.optional_number("attn_logit_softcapping"),
            qkv_bias=usual.attention_bias,
            o_bias=usual.attention_bias,
        ),
        ffn=GatedFfn(usual.hidden_size, usual.ffn_size, config.activation("hidden_activation", "gelu_pytorch_tanh")),
        rope=config.rope(of_full, config.number("rope_theta", 1_000_000.0), *sizes),
    )
    sliding = replace(
        full,
        window=config.optional_integer("sliding_window", 4096),
        rope=config.rope(of_sliding, config.number("rope_local_base_freq", 10_000.0), *sizes),
    )
    kinds = config.layer_types_by_period(usual.num_layers, config.integer("sliding_window_pattern", 6))
    return replace(
        usual.model((sliding if kind == "sliding_attention" else full for kind in kinds), norm),
        # Gemma was trained with its linear factor, so max_position_embeddings includes it already.
        max_position=usual.max_position,
        logit_soft_cap=config.optional_number("final_logit_softcapping"),
        embed_scale=usual.hidden_size**0.5,
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
    Family("Gemma3ForCausalLM", gemma3_spec, exceeds_float16=True),
    beside_vision("Gemma3ForConditionalGeneration", gemma3_spec, exceeds_float16=True),
)
