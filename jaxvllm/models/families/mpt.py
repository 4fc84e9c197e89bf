"""MPT: slopes in the place of positions (ALiBi), LayerNorm, no biases, and no gate in the FFN."""

from collections.abc import Mapping
from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.usual import multi_head
from jaxvllm.models.ffn import PlainFfn
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import LayerNorm
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import OuterNames, Source, fused_qkv, named_norms, with_biases


def mpt_spec(config: HfConfig) -> ModelSpec:
    config.refuse({"no_bias": (None, True), "logit_scale": (None,)})
    of_attention = config.nested("attn_config")
    of_attention.refuse(
        {
            "alibi": (None, True),
            "attn_type": (None, "multihead_attention"),
            "attn_uses_sequence_id": (None, False),
            "prefix_lm": (None, False),
            "qk_ln": (None, False),
        }
    )
    hidden_size, num_heads = config.integer("d_model", 2048), config.integer("n_heads", 16)
    if hidden_size % num_heads:
        raise ValueError(f"config d_model {hidden_size} must be a multiple of n_heads {num_heads}")
    norm = LayerNorm(config.number("layer_norm_epsilon", 1e-5), bias=False)
    attention = multi_head(hidden_size, num_heads, norm, has_bias=False)
    attention = replace(
        attention,
        scale=of_attention.number("softmax_scale", attention.scale),
        qkv_limit=of_attention.optional_number("clip_qkv"),
        slopes=mpt_slopes(num_heads, of_attention.integer("alibi_bias_max", 8)),
    )
    ffn = PlainFfn(hidden_size, config.integer("expansion_ratio", 4) * hidden_size, "gelu", bias=False)
    return ModelSpec(
        vocab_size=config.integer("vocab_size", 50_368),
        layers=(Block(norm=norm, attention=attention, ffn=ffn),) * config.integer("n_layers", 24),
        norm=norm,
        max_position=config.integer("max_seq_len", 2048),
        tie_embeddings=config.flag("tie_word_embeddings", True),
    )


def mpt_slopes(num_heads: int, most: int) -> tuple[float, ...]:
    """Returns 2^(-most i / n) for heads i = 1, 2, .. of n, where n is a power of two.

    Another number of heads takes those of the next larger power of two, every other one first. transformers has 8 for
    `most`, whatever the config says.
    """
    n = 1 << (num_heads - 1).bit_length()
    slopes = tuple(2 ** (-most * i / n) for i in range(1, n + 1))
    return slopes if n == num_heads else (slopes[1::2] + slopes[::2])[:num_heads]


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer."""
    decls = declare_layer(spec, layer)
    found = named_norms(decls, prefix, {"attention_norm": "norm_1", "ffn_norm": "norm_2"})
    found |= with_biases(decls, prefix, {"o": "attn.out_proj", "up": "ffn.up_proj", "down": "ffn.down_proj"})
    return found | {"qkv": fused_qkv(decls["qkv"], f"{prefix}attn.Wqkv.weight")}


FAMILY = Family(
    "MptForCausalLM",
    mpt_spec,
    layer_sources=sources,
    names=OuterNames(embed="wte.weight", final_norm="norm_f", layers="blocks"),
    prefixes=("transformer.",),
    understood=("clip_qkv",),
)
