"""Phi 1, 1.5 and 2: attention and FFN beside each other after one LayerNorm, a partial rope, and biases everywhere."""

from collections.abc import Mapping
from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.ffn import PlainFfn
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import LayerNorm
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import OuterNames, Source, attention_sources, named_norms, with_biases

NORMS = {
    "attention_norm": "input_layernorm",
    "q_norm": "self_attn.q_layernorm",
    "k_norm": "self_attn.k_layernorm",
}


def phi_spec(config: HfConfig) -> ModelSpec:
    usual = UsualParts(config.with_defaults(partial_rotary_factor=0.5))
    norm = LayerNorm(config.number("layer_norm_eps", 1e-5))
    layer = Block(
        norm=norm,
        placement="parallel",
        attention=replace(
            usual.attention(norm),
            qk_norm="head" if config.flag("qk_layernorm", False) else "none",
            qkv_bias=True,
            o_bias=True,
        ),
        ffn=PlainFfn(usual.hidden_size, usual.ffn_size, config.activation("hidden_act", "gelu_new")),
        rope=usual.rope(),
    )
    return replace(usual.model([layer] * usual.num_layers, norm), head_bias=True)


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer."""
    decls = declare_layer(spec, layer)
    found = named_norms(decls, prefix, NORMS) | attention_sources(spec, layer, prefix, output="self_attn.dense")
    return found | with_biases(decls, prefix, {"up": "mlp.fc1", "down": "mlp.fc2"})


FAMILY = Family("PhiForCausalLM", phi_spec, layer_sources=sources, names=OuterNames(final_norm="final_layernorm"))
