"""Mixtral: a Mistral of experts, of which each token takes two."""

from collections.abc import Mapping

from jaxvllm.models.block import Block
from jaxvllm.models.expert_router import ExpertRouter
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import Source, attention_sources, expert_sources, norm_sources, whole


def mixtral_spec(config: HfConfig) -> ModelSpec:
    usual = UsualParts(config.with_defaults(num_key_value_heads=8, rope_theta=1_000_000.0))
    norm = RmsNorm(config.number("rms_norm_eps", 1e-5))
    num_experts, top_k = config.integer("num_local_experts", 8), config.integer("num_experts_per_tok", 2)
    layer = Block(
        norm=norm,
        attention=usual.attention(norm),
        ffn=usual.experts(ExpertRouter(usual.hidden_size, num_experts, top_k), usual.ffn_size),
        rope=usual.rope(),
        window=config.optional_integer("sliding_window"),
    )
    return usual.model([layer] * usual.num_layers, norm)


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer."""
    decls, start = declare_layer(spec, layer), f"{prefix}block_sparse_moe."
    found = norm_sources(spec, layer, prefix) | attention_sources(spec, layer, prefix)
    found |= expert_sources(decls, f"{start}experts.", names=("w1", "w3", "w2"))
    return found | {"router": whole(f"{start}gate.weight", decls["router"].shape)}


FAMILY = Family("MixtralForCausalLM", mixtral_spec, layer_sources=sources, understood=("num_local_experts",))
