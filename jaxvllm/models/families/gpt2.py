"""GPT-2: LayerNorm, learned positions, no gate in the FFN, and matrices that are stored as [in, out]."""

from collections.abc import Mapping

from jaxvllm.models.block import Block
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.usual import multi_head
from jaxvllm.models.ffn import PlainFfn
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import LayerNorm
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec, PositionTable
from jaxvllm.models.weight_names import OuterNames, Source, fused_qkv, named_norms, turned, whole

# Values of these keys that change nothing. Others are refused.
NEUTRAL = {
    "scale_attn_weights": (None, True),
    "scale_attn_by_inverse_layer_idx": (None, False),
    "add_cross_attention": (None, False),
}


def gpt2_spec(config: HfConfig) -> ModelSpec:
    config.refuse(NEUTRAL)
    num_layers, num_heads = config.integer("n_layer", 12), config.integer("n_head", 12)
    hidden_size, num_positions = config.integer("n_embd", 768), config.integer("n_positions", 1024)
    if hidden_size % num_heads:
        raise ValueError(f"config n_embd {hidden_size} must be a multiple of n_head {num_heads}")
    ffn_size = config.optional_integer("n_inner") or 4 * hidden_size
    activation = config.activation("activation_function", "gelu_new")
    norm = LayerNorm(config.number("layer_norm_epsilon", 1e-5))
    layer = Block(
        norm=norm,
        attention=multi_head(hidden_size, num_heads, norm, has_bias=True),
        ffn=PlainFfn(hidden_size, ffn_size, activation),
    )
    return ModelSpec(
        vocab_size=config.integer("vocab_size", 50_257),
        layers=(layer,) * num_layers,
        norm=norm,
        max_position=num_positions,
        positions=PositionTable(num_positions),
        tie_embeddings=config.flag("tie_word_embeddings", True),
    )


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer, each of whose matrices is the weight of a `Conv1D`."""
    decls = declare_layer(spec, layer)
    found = named_norms(decls, prefix, {"attention_norm": "ln_1", "ffn_norm": "ln_2"})
    found["qkv"] = fused_qkv(decls["qkv"], f"{prefix}attn.c_attn.weight", is_turned=True)
    found["qkv_bias"] = fused_qkv(decls["qkv_bias"], f"{prefix}attn.c_attn.bias")
    for key, name in (("o", "attn.c_proj"), ("up", "mlp.c_fc"), ("down", "mlp.c_proj")):
        found[key] = turned(f"{prefix}{name}.weight", decls[key])
        found[f"{key}_bias"] = whole(f"{prefix}{name}.bias", decls[f"{key}_bias"].shape)
    return found


FAMILY = Family(
    "GPT2LMHeadModel",
    gpt2_spec,
    layer_sources=sources,
    names=OuterNames(embed="wte.weight", final_norm="ln_f", positions="wpe.weight", layers="h"),
    prefixes=("transformer.", ""),  # the first checkpoints have no prefix
    redundant=(".attn.bias", ".attn.masked_bias"),
)
