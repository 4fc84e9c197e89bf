"""Reads the values of a Hugging Face config.json with their types, in old and new spellings; errors name the key."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Self

from jaxvllm.models.forms.form import Activation
from jaxvllm.models.rope import RopeLengths, RopeSpec, make_rope, served_positions

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu_squared",
}
# Keys that change the computation of a model, and their values that change nothing. A family that supports one of them
# says so (`Family.understood`).
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "use_bidirectional_attention": (None, False),
    "attention_chunk_size": (None,),
    "num_local_experts": (None, 0),
    "num_experts": (None, 0),
    "rope_interleaved": (None, False),
    "use_qk_norm": (None, False),
    "clip_qkv": (None,),
}
# A layer is a value of the spec. The deepest models that are published have some 130 layers, and a config that states
# 10**400 kept a process busy until it was killed.
MOST_LAYERS = 10_000


@dataclass(frozen=True)
class HfConfig:
    """The values of a config.json, and the longest sequence that will be served (None: the model's own)."""

    values: Mapping[str, Any]
    max_model_len: int | None = None
    understood: tuple[str, ...] = ()  # keys of UNSUPPORTED that the family knows

    def __post_init__(self) -> None:
        self.refuse({key: neutral for key, neutral in UNSUPPORTED.items() if key not in self.understood})
        num_layers = self.values.get("num_hidden_layers")
        if isinstance(num_layers, int) and num_layers > MOST_LAYERS:
            self._reject("num_hidden_layers", f"at most {MOST_LAYERS}", num_layers)

    def with_defaults(self, **defaults: Any) -> Self:
        """Returns this config with the values of a family for keys that it leaves out."""
        return replace(self, values=defaults | dict(self.values))

    def or_rope(self, parameters: Mapping[str, Any]) -> Self:
        """Returns this config with rope parameters of a family if it has none."""
        return (
            self
            if self.rope_parameters()
            else replace(self, values=dict(self.values) | {"rope_parameters": parameters})
        )

    def nested(self, key: str) -> Self:
        """Returns the config that stands under `key`, which is empty where nothing does."""
        value = self.values.get(key) or {}
        if not isinstance(value, dict):
            self._reject(key, "an object", value)
        return replace(self, values=value)

    def refuse(self, neutral: Mapping[str, tuple[Any, ...]]) -> None:
        """Raises ValueError if a key has another value than those that change nothing."""
        for key, values in neutral.items():
            if self.values.get(key) not in values:
                raise ValueError(f"config {key} = {self.values[key]!r} is not supported: it changes the model")

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self._reject(key, f"an integer of at least {least}", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a number that is above zero and finite, as all numbers are that families ask for."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            self._reject(key, "a positive number", value)
        return float(value)

    def optional_number(self, key: str, default: float | None = None) -> float | None:
        # An explicit null means none, whatever the default.
        return None if self.values.get(key, default) is None else self.number(key, default)

    def optional_integer(self, key: str, default: int | None = None, *, least: int = 1) -> int | None:
        return None if self.values.get(key, default) is None else self.integer(key, default, least=least)

    def choice(self, key: str, default: str, known: tuple[str, ...]) -> str:
        value = self._get(key, default)
        if value not in known:
            self._reject(key, f"one of {', '.join(known)}", value)
        return str(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool | int):
            self._reject(key, "true or false", value)
        return bool(value)

    def activation(self, key: str, default: str | None = None) -> Activation:
        value = self._get(key, default)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            self._reject(key, f"one of {', '.join(ACTIVATIONS)}", value)
        return ACTIVATIONS[value]

    def of_layers(self, key: str, default: float | list[float]) -> list[float]:
        """Returns a number for each layer, none of them below zero. One number is that of all layers."""
        value, num_layers = self._get(key, default), self.integer("num_hidden_layers")
        values = value if isinstance(value, list) else [value] * num_layers
        if len(values) != num_layers or any(
            isinstance(one, bool) or not isinstance(one, int | float) or not 0 <= one <= sys.float_info.max
            for one in values
        ):
            self._reject(key, f"a number of at least 0, or a list of {num_layers}", value)
        return values

    def layer_types(
        self,
        default: list[str],
        known: tuple[str, ...] = ("full_attention", "sliding_attention"),
        key: str = "layer_types",
    ) -> list[str]:
        """Returns one of the `known` types for each layer."""
        value = self._get(key, default)
        if not isinstance(value, list) or len(value) != len(default) or not all(kind in known for kind in value):
            self._reject(key, f"a list of {len(default)} of {' and '.join(known)}", value)
        return value

    def sparse_layers(self, first: int) -> list[bool]:
        """Returns whether each layer has experts, by default all from layer `first` on."""
        default = ["dense" if layer < first else "sparse" for layer in range(self.integer("num_hidden_layers"))]
        return [kind == "sparse" for kind in self.layer_types(default, ("dense", "sparse"), "mlp_layer_types")]

    def layer_types_by_period(self, num_layers: int, period: int) -> list[str]:
        """Returns the types of the layers, of which by default every one in `period`, the last, sees all positions."""
        return self.layer_types(
            ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(num_layers)]
        )

    def windows(self, layer_types: list[str], window: int | None) -> tuple[int | None, ...]:
        """Returns the window of each layer: `window` for layers of sliding attention, and None for the others."""
        return tuple(window if kind == "sliding_attention" else None for kind in layer_types)

    def rope(self, parameters: Mapping[str, Any], theta: float, head_size: int, max_position: int) -> RopeSpec:
        """Returns the rope that an entry of rope parameters describes."""
        return make_rope(parameters, theta, head_size, self._lengths(max_position))

    def served_positions(self, parameters: Mapping[str, Any], max_position: int) -> int:
        """Returns how many tokens the model can serve under this rope entry."""
        return served_positions(parameters, self._lengths(max_position))

    def rope_parameters(self) -> dict[str, Any]:
        """Returns the entry that transformers 5 calls `rope_parameters`, and older versions `rope_scaling`."""
        found: dict[str, Any] = {}
        for key in ("rope_parameters", "rope_scaling"):
            value = self.values.get(key)
            if value is not None and not isinstance(value, dict):
                self._reject(key, "an object", value)
            found |= value or {}
        if "partial_rotary_factor" in self.values:
            found.setdefault("partial_rotary_factor", self.values["partial_rotary_factor"])
        return found

    def _lengths(self, max_position: int) -> RopeLengths:
        original = self.optional_integer("original_max_position_embeddings")
        return RopeLengths(max_position, original, self.max_model_len)

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise ValueError(f"config lacks {key}: config.json must state it")
        return default

    def _reject(self, key: str, rule: str, value: Any) -> NoReturn:
        raise ValueError(f"config {key} must be {rule}, not {value!r}")
