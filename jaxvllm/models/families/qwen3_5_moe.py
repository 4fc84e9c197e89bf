"""Qwen 3.5 and 3.6 with experts, text only: a Qwen 3.5 whose FFN is experts with a gated one beside them."""

from collections.abc import Mapping
from dataclasses import replace

from jaxvllm.models.expert_router import ExpertRouter
from jaxvllm.models.families import qwen3_5
from jaxvllm.models.families.qwen3_5 import hybrid_spec, mixer_sources
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import (
    LayerSources,
    Source,
    expert_sources,
    gated_sources,
    stacked_expert_sources,
    whole,
)


def qwen3_5_moe_spec(config: HfConfig) -> ModelSpec:
    config, usual = config.with_defaults(num_key_value_heads=2), UsualParts(config)
    router = ExpertRouter(
        usual.hidden_size, config.integer("num_experts", 256), config.integer("num_experts_per_tok", 8)
    )
    sizes = config.integer("moe_intermediate_size", 512), config.integer("shared_expert_intermediate_size", 512)
    return hybrid_spec(config, [replace(usual.experts(router, *sizes), is_shared_gated=True)] * usual.num_layers)


def sources_of(are_stacked: bool) -> LayerSources:
    """Returns the sources of layers. Published checkpoints have a tensor of all experts, those of transformers many."""

    def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
        decls, start = declare_layer(spec, layer), f"{prefix}mlp."
        found = mixer_sources(spec, layer, prefix) | gated_sources(decls, f"{start}shared_expert.", "shared_")
        if are_stacked:
            found |= stacked_expert_sources(decls, f"{start}experts.gate_up_proj", f"{start}experts.down_proj")
        else:
            found |= expert_sources(decls, f"{start}experts.")
        found["shared_gate"] = whole(f"{start}shared_expert_gate.weight", decls["shared_gate"].shape)
        return found | {"router": whole(f"{start}gate.weight", decls["router"].shape)}

    return sources


_TEXT = replace(
    qwen3_5.FAMILY,
    architecture="Qwen3_5MoeForCausalLM",
    spec=qwen3_5_moe_spec,
    layer_sources=sources_of(False),
    understood=("num_experts",),
)
FAMILIES = (
    _TEXT,
    replace(
        _TEXT,
        architecture="Qwen3_5MoeForConditionalGeneration",
        layer_sources=sources_of(True),
        prefixes=("model.language_model.",),
        foreign=("mtp.", "model.visual."),
        nested_in="text_config",
    ),
)
