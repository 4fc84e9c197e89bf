"""Checkpoints that are published quantized, each encoding in one file.

Matrices are kept as they are stored where a form multiplies by that, and otherwise decoded while they are read. A new
encoding is one file beside this one, and a line in `METHODS`. Families and the loader know no encoding.
"""

from collections.abc import Callable, Mapping
from typing import Any

from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.published.awq import Awq
from jaxvllm.models.published.compressed_tensors import CompressedTensors
from jaxvllm.models.published.encoding import Encoding
from jaxvllm.models.published.fp8 import Fp8
from jaxvllm.models.published.gptq import Gptq
from jaxvllm.models.published.mxfp4 import Mxfp4

# By the quant_method that config.json states.
METHODS: Mapping[str, Callable[[HfConfig], Encoding]] = {
    "fp8": Fp8.read,
    "modelopt": Fp8.read_modelopt,
    "mxfp4": Mxfp4.read,
    "compressed-tensors": CompressedTensors.read,
    "awq": Awq.read,
    "gptq": Gptq.read,
}
_KEY, _NESTED = "quantization_config", "text_config"


def published_encoding(config: Mapping[str, Any]) -> Encoding | None:
    """Returns the encoding that a config.json states, or None. Raises ValueError that names one that is not known."""
    inner = config.get(_NESTED)
    settings = config.get(_KEY) or (inner.get(_KEY) if isinstance(inner, dict) else None)
    if not settings:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(
            f"config {_KEY} with quant_method {method!r} is not supported: supported are {', '.join(METHODS)}. Take a "
            "checkpoint of the same model in one of these, or in bfloat16"
        )
    return METHODS[method](HfConfig(settings))


def without_encoding(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of the same model where none of its matrices is quantized."""
    inner = config.get(_NESTED)
    nested = {_NESTED: _without(inner)} if isinstance(inner, dict) else {}
    return _without(config) | nested


def _without(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != _KEY}
