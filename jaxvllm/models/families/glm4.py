"""GLM-4 (0414): norms before and after attention and FFN, and a rope that turns neighbours in half of each head."""

from collections.abc import Mapping
from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import Source, attention_sources, fused_gate_up, named_norms, with_biases

NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_post_norm": "post_mlp_layernorm",
}


def glm4_spec(config: HfConfig) -> ModelSpec:
    usual = UsualParts(config.with_defaults(partial_rotary_factor=0.5, head_dim=128, num_key_value_heads=2))
    norm = RmsNorm(config.number("rms_norm_eps", 1.5625e-7))
    has_bias = config.flag("attention_bias", True)
    layer = Block(
        norm=norm,
        placement="sandwich",
        attention=replace(usual.attention(norm), rope_pairs="neighbours", qkv_bias=has_bias),
        ffn=usual.gated_ffn(),
        rope=usual.rope(),
    )
    return usual.model([layer] * usual.num_layers, norm)


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer, whose norms have names that mean something else in Gemma."""
    decls = declare_layer(spec, layer)
    return (
        named_norms(decls, prefix, NORMS)
        | attention_sources(spec, layer, prefix)
        | with_biases(decls, prefix, {"down": "mlp.down_proj"})
        | {"gate_up": fused_gate_up(decls["gate_up"], f"{prefix}mlp.gate_up_proj.weight")}
    )


FAMILY = Family("Glm4ForCausalLM", glm4_spec, layer_sources=sources)
