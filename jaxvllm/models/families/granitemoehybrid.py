"""Granite 4: a Granite 3 with Mamba-2 in most layers, perhaps no positions, and perhaps experts beside the FFN."""

from collections.abc import Mapping
from dataclasses import replace

from jaxvllm.models.expert_router import ExpertRouter
from jaxvllm.models.families.bamba import bamba_mixer, mixer_sources
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.granite import granite_spec
from jaxvllm.models.families.mamba2 import expanded
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.ffn import Ffn, GatedFfn
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import (
    Source,
    fused_gate_up,
    norm_sources,
    stacked_expert_sources,
    whole,
    with_biases,
)

_MAMBA, _FULL = ("mamba", "linear_attention"), ("attention", "full_attention")


def granitemoehybrid_spec(config: HfConfig) -> ModelSpec:
    config = config.with_defaults(intermediate_size=11008, max_position_embeddings=2048)
    usual, ffn = UsualParts(config), ffn_of(config)
    config.refuse({"position_embedding_type": (None, "nope", "rope"), "normalization_function": (None, "rmsnorm")})
    granite = granite_spec(config)
    [full] = {replace(layer, ffn=ffn) for layer in granite.layers}
    if config.values.get("position_embedding_type") != "rope":
        full = replace(full, rope=None)
    norm = RmsNorm(config.number("rms_norm_eps", 1e-6))
    mamba = replace(full, rope=None, attention=bamba_mixer(config, norm, expanded(config, "mamba_expand")))
    # Some versions of transformers call the types of layers otherwise.
    types = config.values.get("layer_types", config.values.get("layers_block_type"))
    config = replace(config, values=dict(config.values) | {"layer_types": types})
    kinds = config.layer_types([_MAMBA[0]] * usual.num_layers, (*_MAMBA, *_FULL))
    return replace(granite, layers=tuple(full if kind in _FULL else mamba for kind in kinds))


def ffn_of(config: HfConfig) -> Ffn:
    """Returns the shared FFN, and experts beside it where the config has any."""
    usual, shared = UsualParts(config), config.integer("shared_intermediate_size", 1024)
    count = config.integer("num_local_experts", 8, least=0)
    if not count:
        return GatedFfn(usual.hidden_size, shared, config.activation("hidden_act", "silu"))
    router = ExpertRouter(usual.hidden_size, count, config.integer("num_experts_per_tok", 2), scoring="chosen")
    return usual.experts(router, usual.ffn_size, shared)


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer."""
    decls, start = declare_layer(spec, layer), f"{prefix}block_sparse_moe."
    found = norm_sources(spec, layer, prefix) | mixer_sources(spec, layer, prefix)
    ours = "shared_" if "router" in decls else ""
    found |= with_biases(decls, prefix, {f"{ours}down": "shared_mlp.output_linear"})
    name = f"{ours}gate_up"
    found[name] = fused_gate_up(decls[name], f"{prefix}shared_mlp.input_linear.weight")
    if "router" not in decls:
        return found
    found |= stacked_expert_sources(decls, f"{start}input_linear.weight", f"{start}output_linear.weight")
    return found | {"router": whole(f"{start}router.layer.weight", decls["router"].shape)}


FAMILY = Family(
    "GraniteMoeHybridForCausalLM", granitemoehybrid_spec, layer_sources=sources, understood=("num_local_experts",)
)
