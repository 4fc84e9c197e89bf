"""Checkpoints that are published quantized, each encoding in one file.

Matrices are kept as they are stored where a form multiplies by that, and otherwise decoded while they are read. A new
encoding is one file beside this one, and a line in `METHODS`. Families and the loader know no encoding.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.published.encoding import Encoding

# The module and the class of each quant_method that a config.json states. They are imported for such models alone.
METHODS: Mapping[str, tuple[str, str]] = {
    "fp8": ("fp8", "Fp8"),
    "fbgemm_fp8": ("fp8", "Fp8"),  # a scale for each row (Llama 3.1 405B)
    "modelopt": ("modelopt", "ModelOpt"),
    "modelopt_fp4": ("modelopt", "ModelOpt"),
    "mxfp4": ("mxfp4", "Mxfp4"),
    "compressed-tensors": ("compressed_tensors", "CompressedTensors"),
    "awq": ("awq", "Awq"),
    "gptq": ("gptq", "Gptq"),
    "bitsandbytes": ("bitsandbytes", "BitsAndBytes"),
    "mlx": ("mlx", "Mlx"),
}
_KEY, _NESTED = "quantization_config", "text_config"
_OF_MLX = "quantization"  # mlx-lm writes it in both places, and states no quant_method


def published_encoding(config: Mapping[str, Any]) -> Encoding | None:
    """Returns the encoding that a config.json states, or None. Raises ValueError that names one that is not known."""
    settings = _settings(config)
    if not settings:
        return None
    method = _method(settings) if isinstance(settings, dict) else None
    if method == "torchao":
        raise ValueError(
            f"config {_KEY} with quant_method 'torchao' is not supported: its checkpoints are pickles, which can run "
            "code and are never opened, or a prototype. Take a checkpoint of the same model in bfloat16"
        )
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(
            f"config {_KEY} with quant_method {method!r} is not supported: supported are {', '.join(METHODS)}. Take a "
            "checkpoint of the same model in one of these, or in bfloat16"
        )
    module, name = METHODS[method]
    encoding: Encoding = getattr(import_module(f"{__name__}.{module}"), name).read(HfConfig(settings))
    return encoding


def quantization_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the quantization_config of a config.json, or an empty one."""
    settings = _settings(config)
    return settings if isinstance(settings, dict) else {}


def _settings(config: Mapping[str, Any]) -> Any:
    inner = config.get(_NESTED)
    places = (config, inner if isinstance(inner, dict) else {})
    return next((place[key] for place in places for key in (_KEY, _OF_MLX) if place.get(key)), None)


def _method(settings: Mapping[str, Any]) -> Any:
    """Returns the quant_method, which MLX never states, nor did bitsandbytes in old checkpoints."""
    if "quant_method" not in settings:
        if "group_size" in settings and "bits" in settings:
            return "mlx"
        if "load_in_4bit" in settings or "load_in_8bit" in settings:
            return "bitsandbytes"
    return settings.get("quant_method")


def without_encoding(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of the same model where none of its matrices is quantized."""
    inner = config.get(_NESTED)
    nested = {_NESTED: _without(inner)} if isinstance(inner, dict) else {}
    return _without(config) | nested


def _without(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in (_KEY, _OF_MLX)}
