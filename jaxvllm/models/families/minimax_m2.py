"""MiniMax M2: one norm over all query heads and one over all key heads, and experts chosen by a sigmoid with a bias."""

from collections.abc import Mapping
from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.expert_router import ExpertRouter
from jaxvllm.models.families import mixtral
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import Source, whole


def minimax_m2_spec(config: HfConfig) -> ModelSpec:
    config = config.with_defaults(head_dim=128, num_key_value_heads=8, rope_theta=5_000_000.0)
    # Released configs tell how many dimensions of a head the rope turns.
    if (rotary_dim := config.optional_integer("rotary_dim")) is not None:
        config = config.with_defaults(partial_rotary_factor=rotary_dim / config.integer("head_dim"))
    usual, norm = UsualParts(config), RmsNorm(config.number("rms_norm_eps", 1e-6))
    router = ExpertRouter(
        usual.hidden_size,
        config.integer("num_local_experts", 256),
        config.integer("num_experts_per_tok", 8),
        scoring="sigmoid",
        has_choice_bias=True,
    )
    layer = Block(
        norm=norm,
        attention=replace(usual.attention(norm), qk_norm="full"),
        ffn=usual.experts(router, usual.ffn_size),
        rope=usual.rope(),
    )
    return usual.model([layer] * usual.num_layers, norm)


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer."""
    shape = declare_layer(spec, layer)["router_choice"].shape
    choice = whole(f"{prefix}block_sparse_moe.e_score_correction_bias", shape)
    return dict(mixtral.sources(spec, layer, prefix)) | {"router_choice": choice}


UNDERSTOOD = ("num_local_experts", "use_qk_norm")
FAMILY = Family("MiniMaxM2ForCausalLM", minimax_m2_spec, layer_sources=sources, understood=UNDERSTOOD)
