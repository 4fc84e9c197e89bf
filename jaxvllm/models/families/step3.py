"""Step 3, text: one KV head for all query heads, whose queries are made from one normed vector (MFA, arXiv 2412.19255).

transformers has no such model. The tests compare it with a NumPy version.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxvllm.models.block import Block
from jaxvllm.models.expert_router import ExpertRouter
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.step3p7 import ffn_sources, mlp_layer_types
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import Source, named_norms, norm_sources, rows_of_heads, whole, with_biases

# What its configs call the keys of other families.
_SPELLINGS = {"num_attention_groups": "num_key_value_heads", "max_position_embedding": "max_position_embeddings"}


def step3_spec(config: HfConfig) -> ModelSpec:
    config.refuse({"num_attention_groups": (None, 1), "hidden_act": (None, "silu"), "attention_bias": (None, False)})
    values: dict[str, Any] = {_SPELLINGS.get(key, key): value for key, value in config.values.items()}
    config = replace(config, values=values).with_defaults(
        hidden_size=7168, intermediate_size=18_432, num_hidden_layers=61, num_attention_heads=64, num_key_value_heads=1,
        head_dim=256, max_position_embeddings=65_536, vocab_size=128_815, rope_theta=500_000.0,
    )  # fmt: skip
    usual, norm = UsualParts(config), RmsNorm(config.number("rms_norm_eps", 1e-5))
    dense = Block(
        norm=norm,
        attention=replace(usual.attention(norm), q_rank=config.integer("share_q_dim", 2048)),
        ffn=usual.gated_ffn(),
        rope=usual.rope(),
    )
    router = ExpertRouter(
        usual.hidden_size,
        config.integer("moe_num_experts", 48),
        config.integer("moe_top_k", 3),
        is_normalized=config.flag("norm_expert_weight", False),
    )
    sizes = config.integer("moe_intermediate_size", 5120), config.integer("share_expert_dim", 5120)
    sparse = replace(dense, ffn=usual.experts(router, *sizes))
    numbers = values.get("moe_layers_enum")
    kinds = mlp_layer_types(list(range(4, 60)) if numbers is None else numbers, usual.num_layers)
    return usual.model((sparse if kind == "sparse" else dense for kind in kinds), norm)


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer."""
    decls, start = declare_layer(spec, layer), f"{prefix}self_attn."
    found = norm_sources(spec, layer, prefix) | ffn_sources(spec, layer, prefix)
    found |= with_biases(decls, start, {"o": "o_proj", "q_latent": "q_proj"})
    found |= named_norms(decls, start, {"q_latent_norm": "inter_norm"})
    K, rows, rank = decls["q"].shape
    found["q"] = whole(f"{start}wq.weight", (K * rows, rank), (K, rows, rank))
    _, size, E = decls["qkv"].shape
    halves = ((f"{start}{letter}_proj.weight", number * size // 2) for number, letter in enumerate("kv"))
    found["qkv"] = tuple(rows_of_heads(name, (K, size // 2, E), first) for name, first in halves)
    return found


_PLAIN = Family("Step3TextForCausalLM", step3_spec, layer_sources=sources)
FAMILIES = (
    _PLAIN,
    replace(
        _PLAIN,
        architecture="Step3VLForConditionalGeneration",
        foreign=("vision_model.", "vit_downsampler.", "vit_downsampler2.", "vit_large_projector."),
        nested_in="text_config",
    ),
)
