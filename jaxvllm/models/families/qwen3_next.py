"""Qwen 3-Next: a Qwen 3.5 with experts in some layers or all, whose checkpoints list linear attention by key head."""

from collections.abc import Mapping
from dataclasses import replace

from jaxvllm.models.experts import ExpertsFfn
from jaxvllm.models.families import qwen3_5, qwen3_5_moe
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.mtp_format import OF_QWEN
from jaxvllm.models.families.qwen3_moe import qwen_router, sparse_layers
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.gated_delta import GatedDeltaNet
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import Source, rows_of_heads


def qwen3_next_spec(config: HfConfig) -> ModelSpec:
    defaults = {"num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True, "num_key_value_heads": 2}
    config = config.with_defaults(**defaults, intermediate_size=5632)
    usual, with_experts = UsualParts(config), sparse_layers(config)
    sizes = config.integer("moe_intermediate_size", 512), config.integer("shared_expert_intermediate_size", 512)
    dense, sparse = usual.gated_ffn(), replace(usual.experts(qwen_router(config), *sizes), is_shared_gated=True)
    return qwen3_5.hybrid_spec(config, [sparse if n in with_experts else dense for n in range(usual.num_layers)])


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer: one tensor has the channels and gates of each key head, and another the rest."""
    of_ffn = qwen3_5_moe.sources_of(False) if isinstance(spec.layers[layer].ffn, ExpertsFfn) else qwen3_5.sources
    found = dict(of_ffn(spec, layer, prefix))
    mixer = spec.layers[layer].attention
    if isinstance(mixer, GatedDeltaNet):
        K, E, delta, r = mixer.num_groups, spec.hidden_size, mixer.delta, mixer.delta.values_per_key
        count = delta.channels + r * delta.value_size
        found["delta_in"] = (rows_of_heads(f"{prefix}linear_attn.in_proj_qkvz.weight", (K, count, E), 0),)
        found["delta_steps"] = (rows_of_heads(f"{prefix}linear_attn.in_proj_ba.weight", (K, 2 * r, E), 0),)
    return found


FAMILY = Family(
    "Qwen3NextForCausalLM",
    qwen3_next_spec,
    layer_sources=sources,
    foreign=("mtp.",),
    understood=("num_experts",),
    mtp=OF_QWEN,
)
