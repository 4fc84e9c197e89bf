"""Mamba and Falcon-Mamba: layers that keep a state and have no FFN. Jamba's Mamba is made of the same parts."""

import math
from collections.abc import Mapping
from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.mamba2 import MAX_POSITION, expanded
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.mamba import ChannelScan, Mamba
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import OuterNames, Source, named_norms, rows_of_heads, whole, with_biases

# Devices share the channels in so many blocks, or in a part of them that divides the channels.
_MOST_BLOCKS = 8


def mamba_spec(config: HfConfig) -> ModelSpec:
    return mamba_alone(config, None)


def falcon_mamba_spec(config: HfConfig) -> ModelSpec:
    """Returns a Mamba that norms what tells B, C and steps, without weights."""
    return mamba_alone(config, RmsNorm(config.number("mixer_rms_eps", 1e-6)))


def mamba_alone(config: HfConfig, told_norm: RmsNorm | None) -> ModelSpec:
    config = config.with_defaults(max_position_embeddings=MAX_POSITION, tie_word_embeddings=True)
    usual, norm = UsualParts(config), RmsNorm(config.number("layer_norm_epsilon", 1e-5))
    # Falcon-Mamba states another `expand` than its width, which counts.
    width = config.optional_integer("intermediate_size") or expanded(config, "expand")
    mixer = Mamba(
        usual.hidden_size,
        *blocks_and_scan(config, width, config.integer("state_size", 16)),
        step_size=step_size(config, "time_step_rank"),
        conv_size=config.integer("conv_kernel", 4, least=2),
        has_conv_bias=config.flag("use_conv_bias", True),
        has_bias=config.flag("use_bias", False),
        norm=told_norm,
        has_norm_weights=False,
    )
    return usual.model([Block(norm=norm, attention=mixer, ffn=None)] * usual.num_layers, norm)


def blocks_and_scan(config: HfConfig, width: int, state_size: int) -> tuple[int, ChannelScan]:
    """Returns the number of blocks of channels, which are `width` together, and the recurrence of each."""
    config.refuse({"hidden_act": (None, "silu", "swish")})  # the convolution's, too
    num_blocks = math.gcd(width, _MOST_BLOCKS)
    return num_blocks, ChannelScan(width // num_blocks, state_size)


def step_size(config: HfConfig, key: str) -> int:
    """Returns the size of what steps are made of, which is a sixteenth of the hidden size if the config says auto."""
    if config.values.get(key) in (None, "auto"):
        return math.ceil(config.integer("hidden_size") / 16)
    return config.integer(key)


def mamba_sources(spec: ModelSpec, layer: int, prefix: str, name: str = "mixer") -> dict[str, tuple[Source, ...]]:
    """Returns the sources of a layer's mixer, whose tensors have that name."""
    decls, mixer, start = declare_layer(spec, layer), spec.layers[layer].attention, f"{prefix}{name}."
    assert isinstance(mixer, Mamba)
    K, C, S = mixer.num_groups, mixer.scan.num_channels, mixer.scan.state_size
    found = with_biases(decls, start, {"mamba1_out": "out_proj", "mamba1_told": "x_proj"})
    norms = {f"mamba1_{part}_norm": f"{part}_layernorm" for part in ("dt", "b", "c")}
    found |= named_norms(decls, start, norms)
    for ours, kind, tail in (("mamba1_in", "weight", (spec.hidden_size,)), ("mamba1_in_bias", "bias", ())):
        if ours in decls:  # one tensor has the channels of all blocks, and then their gates
            parts = ((part * C, part * K * C) for part in range(2))
            found[ours] = tuple(
                rows_of_heads(f"{start}in_proj.{kind}", (K, C, *tail), first, begin, 2 * K * C)
                for first, begin in parts
            )
    found["mamba1_taps"] = whole(f"{start}conv1d.weight", (K * C, 1, mixer.conv_size), (K, C, mixer.conv_size))
    if mixer.has_conv_bias:
        found["mamba1_taps_bias"] = whole(f"{start}conv1d.bias", (K * C,), (K, C))
    found["mamba1_steps"] = whole(f"{start}dt_proj.weight", (K * C, mixer.step_size), decls["mamba1_steps"].shape)
    found["mamba1_dt_bias"] = whole(f"{start}dt_proj.bias", (K * C,), (K, C))
    found["mamba1_skip"] = whole(f"{start}D", (K * C,), (K, C))
    return found | {"mamba1_decay": whole(f"{start}A_log", (K * C, S), (K, C, S))}


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer."""
    norms = named_norms(declare_layer(spec, layer), prefix, {"attention_norm": "norm"})
    return norms | mamba_sources(spec, layer, prefix)


_MAMBA = Family(
    "MambaForCausalLM",
    mamba_spec,
    layer_sources=sources,
    names=OuterNames(embed="embeddings.weight", final_norm="norm_f"),
    prefixes=("backbone.",),
)
FAMILIES = (_MAMBA, replace(_MAMBA, architecture="FalconMambaForCausalLM", spec=falcon_mamba_spec))
