"""Apertus: a norm over each query and key head, and an FFN without a gate, whose activation each layer has learned."""

from collections.abc import Mapping

from jaxvllm.models.block import Block
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.ffn import XieluFfn
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import Source, attention_sources, named_norms, whole, with_biases

NORMS = {
    "attention_norm": "attention_layernorm",
    "ffn_norm": "feedforward_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}
# The scaling of a config that has none.
_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def apertus_spec(config: HfConfig) -> ModelSpec:
    config.refuse({"hidden_act": (None, "xielu"), "post_norm": (None, False), "qk_norm": (None, True)})
    config = config.or_rope(_ROPE).with_defaults(rope_theta=12_000_000.0)
    usual, norm = UsualParts(config), RmsNorm(config.number("rms_norm_eps", 1e-5))
    layer = Block(
        norm=norm,
        attention=usual.head_normed_attention(norm),
        ffn=XieluFfn(usual.hidden_size, usual.ffn_size),
        rope=usual.rope(),
    )
    return usual.model([layer] * usual.num_layers, norm)


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer, some of which are numbers."""
    decls, act = declare_layer(spec, layer), f"{prefix}mlp.act_fn."
    found = named_norms(decls, prefix, NORMS) | attention_sources(spec, layer, prefix)
    found |= with_biases(decls, prefix, {"up": "mlp.up_proj", "down": "mlp.down_proj"})
    found |= {"xielu_up": whole(f"{act}alpha_p", (1,)), "xielu_down": whole(f"{act}alpha_n", (1,))}
    return found | {f"xielu_{ours}": whole(act + name, (), (1,)) for ours, name in (("slope", "beta"), ("eps", "eps"))}


FAMILY = Family("ApertusForCausalLM", apertus_spec, layer_sources=sources)
