"""Command R (Cohere) and Command R7B and A (Cohere 2): attention and FFN beside each other, after one LayerNorm."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import LayerNorm
from jaxvllm.models.params import declare_layer
from jaxvllm.models.rope import no_rope
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import Source, separate_projections, whole


def cohere_spec(config: HfConfig) -> ModelSpec:
    """Returns the spec of Command R. Command R+ norms queries and keys too, each head with weights of its own."""
    # No Cohere has a head_dim of its own, although transformers writes one.
    values = {key: value for key, value in config.values.items() if key != "head_dim"}
    config = replace(config, values=values).with_defaults(
        max_position_embeddings=8192, tie_word_embeddings=True, rope_theta=500_000.0
    )
    usual, norm = UsualParts(config), LayerNorm(config.number("layer_norm_eps", 1e-5), bias=False)
    has_bias, is_normed = usual.attention_bias, config.flag("use_qk_norm", False)
    layer = Block(
        norm=norm,
        placement="parallel",
        attention=replace(
            usual.attention(norm),
            rope_pairs="neighbours",
            qk_norm="own" if is_normed else "none",
            qkv_bias=has_bias,
            o_bias=has_bias,
        ),
        ffn=usual.gated_ffn(),
        rope=usual.rope(),
    )
    return replace(usual.model([layer] * usual.num_layers, norm), logit_scale=config.number("logit_scale", 0.0625))


def cohere2_spec(config: HfConfig) -> ModelSpec:
    spec = cohere_spec(config.with_defaults(rope_theta=10_000.0))
    kinds = config.layer_types_by_period(spec.num_layers, config.integer("sliding_window_pattern", 4))
    windows = config.windows(kinds, config.optional_integer("sliding_window", 4096))
    return replace(spec, layers=with_positions_in_windows(spec.layers[0], windows))


def with_positions_in_windows(layer: Block, windows: Iterable[int | None]) -> tuple[Block, ...]:
    """Returns a layer like this one for each window. Layers that see everything have no positions."""
    unturned = replace(layer, rope=no_rope(layer.rope))
    return tuple(unturned if window is None else replace(layer, window=window) for window in windows)


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer, which stores the norms of heads as [heads, head size]."""
    decls, found = declare_layer(spec, layer), separate_projections(spec, layer, prefix)
    for key in ("q_norm", "k_norm"):
        if key in decls:
            K, heads, D = decls[key].shape
            found[key] = whole(f"{prefix}self_attn.{key}.weight", (K * heads, D), (K, heads, D))
    return found


FAMILIES = (
    Family("CohereForCausalLM", cohere_spec, layer_sources=sources, understood=("use_qk_norm",)),
    Family("Cohere2ForCausalLM", cohere2_spec),
)
