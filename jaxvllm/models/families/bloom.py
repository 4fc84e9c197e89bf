"""BLOOM: slopes in the place of positions (ALiBi), LayerNorm, one of them over embeddings, and no gate in the FFN."""

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
from jaxvllm.models.weight_names import OuterNames, Source, norm_sources, qkv_by_head, with_biases


def bloom_spec(config: HfConfig) -> ModelSpec:
    config.refuse({"apply_residual_connection_post_layernorm": (None, False), "slow_but_exact": (None, False)})
    # Published configs have either name of each of these keys.
    names = {"hidden_size": "n_embed", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers"}
    config = config.with_defaults(**{ours: config.values[old] for ours, old in names.items() if old in config.values})
    hidden_size, num_heads = config.integer("hidden_size", 64), config.integer("n_head", 8)
    if hidden_size % num_heads:
        raise ValueError(f"config hidden_size {hidden_size} must be a multiple of n_head {num_heads}")
    norm = LayerNorm(config.number("layer_norm_epsilon", 1e-5))
    attention = multi_head(hidden_size, num_heads, norm, has_bias=True)
    layer = Block(
        norm=norm,
        attention=replace(attention, slopes=bloom_slopes(num_heads)),
        ffn=PlainFfn(hidden_size, 4 * hidden_size, "gelu_tanh"),
    )
    return ModelSpec(
        vocab_size=config.integer("vocab_size", 250_880),
        layers=(layer,) * config.integer("n_layer", 2),
        norm=norm,
        embed_norm=norm,
        max_position=config.integer("seq_length", 2048),
        tie_embeddings=config.flag("tie_word_embeddings", True),
    )


def bloom_slopes(num_heads: int) -> tuple[float, ...]:
    """Returns 2^(-8 i / n) for heads i = 1, 2, .. of n, where n is a power of two.

    With another number of heads, the first ones have the slopes of the next smaller power of two, and those left have
    every other slope of the next larger one.
    """
    n = 1 << (num_heads.bit_length() - 1)
    others = (2 ** (-4 * i / n) for i in range(1, 2 * (num_heads - n), 2))
    return (*(2 ** (-8 * i / n) for i in range(1, n + 1)), *others)


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer, which stores each head's query, key and value together, as we do."""
    decls = declare_layer(spec, layer)
    matrices = {"o": "self_attention.dense", "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"}
    found = norm_sources(spec, layer, prefix) | with_biases(decls, prefix, matrices)
    return found | qkv_by_head(decls, f"{prefix}self_attention.query_key_value")


FAMILY = Family(
    "BloomForCausalLM",
    bloom_spec,
    layer_sources=sources,
    names=OuterNames(
        embed="word_embeddings.weight",
        final_norm="ln_f",
        layers="h",
        others=(
            ("embed_norm", "word_embeddings_layernorm.weight"),
            ("embed_norm_bias", "word_embeddings_layernorm.bias"),
        ),
    ),
    prefixes=("transformer.", ""),  # the first checkpoints have no prefix
)
