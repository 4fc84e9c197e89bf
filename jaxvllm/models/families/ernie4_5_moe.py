"""ERNIE 4.5 with experts: a rope that turns neighbours, shared experts, and a bias for the choice of the others."""

from collections.abc import Mapping
from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.expert_router import ExpertRouter
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.mtp_format import MtpFormat, like_first
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import Source, sparse_projections, whole


def ernie4_5_moe_spec(config: HfConfig) -> ModelSpec:
    config.refuse({"use_bias": (None, False)})
    config = config.with_defaults(
        num_key_value_heads=4, rope_theta=500_000.0, rms_norm_eps=1e-5, tie_word_embeddings=True
    )
    usual, norm = UsualParts(config), RmsNorm(config.number("rms_norm_eps"))
    dense = Block(
        norm=norm,
        attention=replace(usual.attention(norm), rope_pairs="neighbours"),
        ffn=usual.gated_ffn(),
        rope=usual.rope(),
    )
    router = ExpertRouter(
        usual.hidden_size,
        config.integer("moe_num_experts", 64),
        config.integer("moe_k", 6),
        least_sum=config.number("moe_norm_min", 1e-12),
        has_choice_bias=True,
    )
    size = config.integer("moe_intermediate_size", 1536)
    shared_size = size * config.integer("moe_num_shared_experts", 2, least=0)
    sparse = replace(dense, ffn=usual.experts(router, size, shared_size))
    first, step = config.integer("moe_layer_start_index", 1, least=0), config.integer("moe_layer_interval", 1)
    last = config.integer("moe_layer_end_index", -1, least=-1)
    last = usual.num_layers - 1 if last == -1 else last
    is_sparse = [first <= number <= last and not (number + 1) % step for number in range(usual.num_layers)]
    return usual.model((sparse if experts else dense for experts in is_sparse), norm)


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer, whose bias for the choice has a dimension more than ours."""
    found, decls = dict(_MOST(spec, layer, prefix)), declare_layer(spec, layer)
    if "router_choice" in decls:
        [count] = decls["router_choice"].shape
        found["router_choice"] = whole(f"{prefix}mlp.moe_statics.e_score_correction_bias", (1, count), (count,))
    return found


_MOST = sparse_projections("shared_experts")
MTP = MtpFormat(
    block="{prefix}mtp_block.{number}.",
    embedding_norm="{prefix}mtp_emb_norm.{number}",
    feature_norm="{prefix}mtp_hidden_norm.{number}",
    fc="{prefix}mtp_linear_proj.{number}",
    final_norm=None,
    others="{prefix}mtp_",
    copies=(),
    sees_states=True,
    block_of=like_first,  # dense
)
FAMILY = Family("Ernie4_5_MoeForCausalLM", ernie4_5_moe_spec, layer_sources=sources, foreign=("model.mtp_",), mtp=MTP)
