"""Granite 3 with experts: four multipliers, and the softmax over the experts that were chosen by their logits."""

from collections.abc import Mapping
from dataclasses import replace

from jaxvllm.models.expert_router import ExpertRouter
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.granite import granite_spec
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import Source, attention_sources, norm_sources, stacked_expert_sources, whole


def granitemoe_spec(config: HfConfig) -> ModelSpec:
    usual, spec = UsualParts(config), granite_spec(config)
    num_experts, top_k = config.integer("num_local_experts", 8), config.integer("num_experts_per_tok", 2)
    router = ExpertRouter(usual.hidden_size, num_experts, top_k, scoring="chosen")
    experts = usual.experts(router, usual.ffn_size)
    return replace(spec, layers=tuple(replace(layer, ffn=experts) for layer in spec.layers))


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer."""
    decls, start = declare_layer(spec, layer), f"{prefix}block_sparse_moe."
    found = norm_sources(spec, layer, prefix) | attention_sources(spec, layer, prefix)
    found |= stacked_expert_sources(decls, f"{start}input_linear.weight", f"{start}output_linear.weight")
    return found | {"router": whole(f"{start}router.layer.weight", decls["router"].shape)}


FAMILY = Family("GraniteMoeForCausalLM", granitemoe_spec, layer_sources=sources, understood=("num_local_experts",))
