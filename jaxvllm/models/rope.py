"""Computes the rotary frequencies for every scaling that Hugging Face configs name.

Some scalings of transformers depend on the length of the current sequence. Here they are decided once, from the longest
sequence that the engine will serve, because one KV cache cannot hold keys that were rotated in two ways. `dynamic`
uses the base for that length, and `longrope` uses its long factors if that length exceeds the one it was trained
on. vLLM decides the same way.

Sources: linear (kaiokendev), dynamic NTK (bloc97, emozilla), YaRN (arXiv 2309.00071), LongRoPE
(arXiv 2402.13753), Llama 3.1's own.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")


@dataclass(frozen=True)
class RopeSpec:
    """A rotary embedding with its scaling already applied. `make_rope` makes such specs.

    `inv_freq` is in radians per position, with one number for each pair of rotated dimensions. A layer without
    positions (SmolLM 3) has zeros there, which rotate nothing. cos and sin are multiplied by `scale`.
    """

    inv_freq: tuple[float, ...]
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not all(math.isfinite(value) and value >= 0 for value in self.inv_freq):
            raise ValueError(f"rope frequencies must be finite and not negative, not {self.inv_freq}")
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"rope scale must be positive, not {self.scale}")

    @property
    def rotary_dim(self) -> int:
        return 2 * len(self.inv_freq)


@dataclass(frozen=True)
class RopeLengths:
    """The three lengths, in tokens, on which scalings depend."""

    max_position: int  # max_position_embeddings of the config
    original: int | None  # original_max_position_embeddings at the top of the config, where Phi-3 has it
    max_model_len: int | None  # longest sequence to serve; None: the longest that the model can serve


def no_rope(rope: RopeSpec | None) -> RopeSpec | None:
    """Returns a rope as wide as `rope` that rotates nothing, so that layers with either can be in one loop."""
    return None if rope is None else RopeSpec((0.0,) * len(rope.inv_freq))


def rope_kind(parameters: Mapping[str, Any]) -> str:
    """Returns the scaling's name, one of KINDS. Raises ValueError for any other."""
    name = parameters.get("rope_type", parameters.get("type")) or "default"
    kind = "longrope" if name == "su" else name
    if kind not in KINDS:
        raise ValueError(f"rope type {name!r} is not supported: supported are {', '.join(KINDS)}")
    return str(kind)


def served_positions(parameters: Mapping[str, Any], lengths: RopeLengths) -> int:
    """Returns how many tokens a model can serve with this scaling: some scalings stretch max_position_embeddings."""
    kind = rope_kind(parameters)
    if kind in ("linear", "dynamic"):
        return int(lengths.max_position * _number(parameters, "factor"))
    if kind == "yarn":
        original = _original(parameters, lengths)
        return max(lengths.max_position, int(original * _yarn_factor(parameters, lengths)))
    return lengths.max_position


def make_rope(parameters: Mapping[str, Any], theta: float, head_size: int, lengths: RopeLengths) -> RopeSpec:
    """Computes the rope of one `rope_parameters` (or older `rope_scaling`) entry.

    `theta` is the base when the entry has none. Raises ValueError for an unknown type, and for a missing or
    malformed number.
    """
    kind = rope_kind(parameters)
    base = _number(parameters, "rope_theta", theta)
    dim = int(head_size * _number(parameters, "partial_rotary_factor", 1.0))
    if kind == "proportional":
        return _proportional(base, dim // 2, head_size, _number(parameters, "factor", 1.0))
    if dim < 2 or dim % 2:
        raise ValueError(f"rope would rotate {dim} of {head_size} dimensions: it must be an even number")
    if kind == "dynamic":
        base = _dynamic_base(parameters, base, dim, lengths)
    # All steps are in float32, as in transformers, because at position 100,000 the last bit is visible.
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    plain = np.float32(1) / np.float32(base) ** exponents
    scale = 1.0
    if kind == "linear":
        plain = plain / np.float32(_number(parameters, "factor"))
    elif kind == "llama3":
        plain = _llama3(parameters, plain, lengths)
    elif kind == "yarn":
        plain, scale = _yarn(parameters, plain, base, dim, lengths)
    elif kind == "longrope":
        plain, scale = _longrope(parameters, plain, lengths)
    return RopeSpec(tuple(float(value) for value in plain), scale)


def _proportional(base: float, num_turned: int, head_size: int, factor: float) -> RopeSpec:
    """Returns a rope as wide as the head, whose first frequencies turn and whose others are zero (Gemma 4)."""
    exponents = np.arange(0, 2 * num_turned, 2, dtype=np.float32) / np.float32(head_size)
    turned = np.float32(1) / np.float32(base) ** exponents / np.float32(factor)
    return RopeSpec((*(float(value) for value in turned), *(0.0,) * (head_size // 2 - num_turned)))


def _dynamic_base(parameters: Mapping[str, Any], base: float, dim: int, lengths: RopeLengths) -> float:
    factor = _number(parameters, "factor")
    longest = lengths.max_model_len or served_positions(parameters, lengths)
    if dim <= 2:
        raise ValueError(f"dynamic rope needs more than 2 rotated dimensions, not {dim}")
    stretch = factor * max(longest, lengths.max_position) / lengths.max_position - (factor - 1)
    return float(base * stretch ** (dim / (dim - 2)))


def _llama3(parameters: Mapping[str, Any], plain: np.ndarray, lengths: RopeLengths) -> np.ndarray:
    factor = _number(parameters, "factor")
    low, high = _number(parameters, "low_freq_factor"), _number(parameters, "high_freq_factor")
    original = _original(parameters, lengths)
    turns = original * plain / np.float32(2 * math.pi)  # whole rotations within the original length
    # Frequencies with fewer than `low` turns are divided by the factor (0), those with more than `high` are kept (1).
    kept = np.clip((turns - low) / (high - low), 0, 1) if high > low else np.asarray(turns >= low, np.float32)
    return np.asarray((1 - kept) * plain / factor + kept * plain, np.float32)


def _yarn(
    parameters: Mapping[str, Any], plain: np.ndarray, base: float, dim: int, lengths: RopeLengths
) -> tuple[np.ndarray, float]:
    factor = _yarn_factor(parameters, lengths)
    original = _original(parameters, lengths)

    def dimension_of(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = dimension_of(parameters.get("beta_fast") or 32)
    high = dimension_of(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    frequencies = np.asarray(plain / np.float32(factor) * ramp + plain * (1 - ramp), np.float32)

    def attention(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    scale = parameters.get("attention_factor")
    if scale is None:
        weight, over = parameters.get("mscale"), parameters.get("mscale_all_dim")
        scale = attention(weight) / attention(over) if weight and over else attention(1.0)
    return frequencies, float(scale)


def _yarn_factor(parameters: Mapping[str, Any], lengths: RopeLengths) -> float:
    if parameters.get("factor") is None:
        return lengths.max_position / _original(parameters, lengths)
    return _number(parameters, "factor")


def _longrope(parameters: Mapping[str, Any], plain: np.ndarray, lengths: RopeLengths) -> tuple[np.ndarray, float]:
    original = _original(parameters, lengths)
    longest = lengths.max_model_len or lengths.max_position
    length = "long" if longest > original else "short"
    name = f"{length}_factor"
    factors = parameters.get(name)
    if not isinstance(factors, list) or len(factors) != len(plain):
        raise ValueError(f"rope {name} must list {len(plain)} numbers, not {factors!r}")
    scale = parameters.get("attention_factor", parameters.get(f"{length}_mscale"))
    if scale is None:
        factor = parameters.get("factor") or lengths.max_position / original
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return plain / np.asarray(factors, np.float32), float(scale)


def _original(parameters: Mapping[str, Any], lengths: RopeLengths) -> int:
    # The top of the config wins, as in transformers: Phi-3 states it there.
    if lengths.original is not None:
        return lengths.original
    return int(_number(parameters, "original_max_position_embeddings", lengths.max_position))


def _number(parameters: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = parameters.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise ValueError(f"rope {name} must be a positive number, not {value!r}")
    return float(value)
