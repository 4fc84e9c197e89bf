"""gpt-oss (arXiv 2508.10925): a logit of each head that takes weight and has no value, and biases everywhere.

A window in every other layer, the first included; experts whose gates and features are bounded.
"""

from collections.abc import Mapping
from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.expert_router import ExpertRouter
from jaxvllm.models.experts import ExpertsFfn
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.forms.form import ClampedSwiglu
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import (
    Source,
    attention_sources,
    norm_sources,
    turned_expert_sources,
    whole,
    with_biases,
)

# The scaling of a config that has none.
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def gpt_oss_spec(config: HfConfig) -> ModelSpec:
    config = config.or_rope(_ROPE).with_defaults(
        head_dim=64, num_key_value_heads=8, rope_theta=150_000.0, max_position_embeddings=131_072
    )
    usual, norm = UsualParts(config), RmsNorm(config.number("rms_norm_eps", 1e-5))
    config.refuse({"hidden_act": (None, "silu")})
    has_bias = config.flag("attention_bias", True)
    router = ExpertRouter(
        usual.hidden_size,
        config.integer("num_local_experts", 128),
        config.integer("num_experts_per_tok", 4),
        scoring="chosen",
        bias=True,
    )
    gating = ClampedSwiglu(config.number("swiglu_alpha", 1.702), config.number("swiglu_limit", 7.0))
    layer = Block(
        norm=norm,
        attention=replace(usual.attention(norm), qkv_bias=has_bias, o_bias=has_bias, has_sinks=True),
        ffn=ExpertsFfn(usual.hidden_size, usual.ffn_size, router, gating, bias=True),
        rope=usual.rope(),
    )
    kinds = ["full_attention" if number % 2 else "sliding_attention" for number in range(usual.num_layers)]
    windows = config.windows(config.layer_types(kinds), config.optional_integer("sliding_window", 128))
    return usual.model(layer.in_windows(windows), norm)


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer."""
    decls = declare_layer(spec, layer)
    found = norm_sources(spec, layer, prefix) | attention_sources(spec, layer, prefix)
    found |= with_biases(decls, prefix, {"router": "mlp.router"})
    found |= turned_expert_sources(decls, f"{prefix}mlp.experts.", interleaved=True)
    heads = decls["sinks"].shape
    return found | {"sinks": whole(f"{prefix}self_attn.sinks", (heads[0] * heads[1],), heads)}


FAMILY = Family("GptOssForCausalLM", gpt_oss_spec, layer_sources=sources, understood=("num_local_experts",))
