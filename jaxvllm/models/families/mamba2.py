"""Mamba-2 alone: layers that keep a state and have no FFN. The parts here are those of all families with Mamba-2."""

import math
from collections.abc import Mapping
from dataclasses import replace

from jaxvllm.models.block import Block
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.usual import UsualParts
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.mamba2 import Mamba2, SelectiveScan
from jaxvllm.models.norm import RmsNorm
from jaxvllm.models.params import declare_layer
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import OuterNames, Source, named_norms, rows_of_heads, with_biases

# A state sees any number of tokens, but an engine wants a longest sequence.
MAX_POSITION = 2**17


def mamba2_spec(config: HfConfig) -> ModelSpec:
    config = config.with_defaults(max_position_embeddings=MAX_POSITION)
    config.refuse({"hidden_act": (None, "silu", "swish")})
    usual, norm = UsualParts(config), RmsNorm(config.number("layer_norm_epsilon", 1e-5))
    heads, size = config.integer("num_heads", 128), config.integer("head_dim", 64)
    mixer = Mamba2(
        usual.hidden_size,
        *groups_and_scan(config, "n_groups", 8, heads, size, config.integer("state_size", 128)),
        conv_size=config.integer("conv_kernel", 4, least=2),
        norm=norm,
        has_conv_bias=config.flag("use_conv_bias", True),
        has_bias=config.flag("use_bias", False),
    )
    if (width := expanded(config, "expand")) != heads * size:
        raise ValueError(f"config num_heads {heads} of head_dim {size} must be the {width} that expand says")
    layer = Block(norm=norm, attention=limited(mixer, config), ffn=None)
    return usual.model([layer] * usual.num_layers, norm)


def groups_and_scan(
    config: HfConfig, key: str, default: int, num_heads: int, head_size: int, state_size: int
) -> tuple[int, SelectiveScan]:
    """Returns the number of groups, which the config has under `key`, and the recurrence of each."""
    num_groups = config.integer(key, default)
    if num_heads % num_groups:
        raise ValueError(f"config {key} {num_groups} must divide the {num_heads} heads of Mamba-2")
    return num_groups, SelectiveScan(num_heads // num_groups, head_size, state_size)


def expanded(config: HfConfig, key: str) -> int:
    """Returns the hidden size times what the config has under `key`."""
    return config.integer(key, 2) * config.integer("hidden_size")


def limited(mixer: Mamba2, config: HfConfig) -> Mamba2:
    """Returns the mixer with the limits of steps that the config has."""
    limits = config.values.get("time_step_limit")
    if limits is None:
        return mixer
    is_number = isinstance(limits, list | tuple) and all(type(limit) in (int, float) for limit in limits)
    if not is_number or len(limits) != 2 or not 0 <= limits[0] < limits[1]:
        raise ValueError(f"config time_step_limit must be two numbers, the lower one first, not {limits!r}")
    least, most = limits
    return replace(mixer, least_step=float(least), most_step=math.inf if most == math.inf else float(most))


def mamba2_sources(spec: ModelSpec, layer: int, prefix: str, name: str = "mixer") -> dict[str, tuple[Source, ...]]:
    """Returns the sources of a layer's mixer, whose tensors have that name."""
    decls, block, start = declare_layer(spec, layer), spec.layers[layer], f"{prefix}{name}."
    mixer = block.attention if block.beside is None else block.beside
    assert isinstance(mixer, Mamba2)
    K, H, W, S = mixer.num_groups, mixer.scan.num_heads, mixer.scan.values, mixer.scan.state_size

    def rows(name: str, tail: tuple[int, ...], first: int, count: int, begin: int, num_rows: int) -> Source:
        return rows_of_heads(start + name, (K, count, *tail), first, begin, num_rows)

    def channels(name: str, tail: tuple[int, ...], begin: int, num_rows: int) -> tuple[Source, ...]:
        """Returns the sources of x, B and C, of which the tensor lists those of all groups."""
        parts = ((0, W), (W, S), (W + S, S))
        return tuple(rows(name, tail, first, count, begin + K * first, num_rows) for first, count in parts)

    found = with_biases(decls, start, {"mamba_out": "out_proj"}) | named_norms(decls, start, {"mamba_norm": "norm"})
    num_rows = K * (W + mixer.scan.channels + H)
    kinds: tuple[tuple[str, str, tuple[int, ...]], ...] = (("", "weight", (spec.hidden_size,)), ("_bias", "bias", ()))
    for ours, kind, tail in kinds:
        if f"mamba_in{ours}" in decls:  # one tensor has gates, x, B, C and steps
            found[f"mamba_gates{ours}"] = (rows(f"in_proj.{kind}", tail, 0, W, 0, num_rows),)
            found[f"mamba_in{ours}"] = channels(f"in_proj.{kind}", tail, K * W, num_rows)
            found[f"mamba_steps{ours}"] = (rows(f"in_proj.{kind}", tail, 0, H, num_rows - K * H, num_rows),)
    num_rows, size = K * mixer.scan.channels, mixer.conv_size
    taps = channels("conv1d.weight", (size,), 0, num_rows)
    found["mamba_taps"] = tuple(replace(source, shape=(num_rows, 1, size)) for source in taps)
    if mixer.has_conv_bias:
        found["mamba_taps_bias"] = channels("conv1d.bias", (), 0, num_rows)
    vectors = {"mamba_decay": "A_log", "mamba_skip": "D", "mamba_dt_bias": "dt_bias"}
    return found | {key: (rows(name, (), 0, H, 0, K * H),) for key, name in vectors.items()}


def sources(spec: ModelSpec, layer: int, prefix: str) -> Mapping[str, tuple[Source, ...]]:
    """Returns the sources of a layer."""
    norms = named_norms(declare_layer(spec, layer), prefix, {"attention_norm": "norm"})
    return norms | mamba2_sources(spec, layer, prefix)


FAMILY = Family(
    "Mamba2ForCausalLM",
    mamba2_spec,
    layer_sources=sources,
    names=OuterNames(embed="embeddings.weight", final_norm="norm_f"),
    prefixes=("backbone.",),
)
