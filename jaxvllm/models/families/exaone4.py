"""EXAONE 4: norms after attention and FFN, a norm over each query and key head, and no positions in full layers."""

from jaxvllm.models.block import Block
from jaxvllm.models.families.cohere import with_positions_in_windows
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.spec import ModelSpec


def exaone4_spec(config: HfConfig) -> ModelSpec:
    usual, norm = UsualParts(config), RmsNorm(config.number("rms_norm_eps", 1e-5))
    layer = Block(
        norm=norm,
        placement="post",
        attention=usual.head_normed_attention(norm),
        ffn=usual.gated_ffn(),
        rope=usual.rope(),
    )
    return usual.model(exaone_layers(config, layer), norm)


def exaone_layers(config: HfConfig, layer: Block) -> tuple[Block, ...]:
    """Returns layers like this one. In models with windows, those that see everything have no positions."""
    window, num_layers = config.optional_integer("sliding_window", 4096), config.integer("num_hidden_layers")
    if window is None:  # as in the model of 1.2B, all of whose layers have positions
        return (layer,) * num_layers
    period = 4
    if config.values.get("layer_types") is None:  # otherwise the pattern may be a text, such as LLLG
        period = config.integer("sliding_window_pattern", 4)
    kinds = config.layer_types_by_period(num_layers, period)
    return with_positions_in_windows(layer, config.windows(kinds, window))


FAMILY = Family("Exaone4ForCausalLM", exaone4_spec)
