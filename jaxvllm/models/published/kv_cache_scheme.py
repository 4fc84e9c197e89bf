"""Reads from a config.json in which bits a checkpoint's keys and values should be kept (`kv_cache_scheme`)."""

from collections.abc import Mapping
from typing import Any

from jaxvllm.models.published import quantization_settings
from pallas_kernels.ragged_paged_attention.quantize import Codes

_CODES: Mapping[str, Codes] = {"float": "float8_e4m3fn", "int": "int8"}


def stated_kv_scheme(config: Mapping[str, Any]) -> Any:
    """Returns what a config.json states of keys and values, whether it is known here or not, or None.

    compressed-tensors and newer ModelOpt state a `kv_cache_scheme`, and older ModelOpt a `kv_cache_quant_algo`.
    """
    settings = quantization_settings(config)
    return settings.get("kv_cache_scheme") or settings.get("kv_cache_quant_algo") or None


def stated_kv_codes(config: Mapping[str, Any]) -> Codes | None:
    """Returns in which eight bits keys and values should be kept, with scales that the checkpoint has.

    None stands for the model's dtype, also where the scheme is not known.
    """
    stated = stated_kv_scheme(config)
    if isinstance(stated, str):
        return "float8_e4m3fn" if stated.upper() == "FP8" else None
    if not isinstance(stated, dict):
        return None
    kind, is_static = stated.get("type"), stated.get("symmetric", True) is True and not stated.get("dynamic")
    by_head = stated.get("strategy", "tensor") in ("tensor", "attn_head")
    is_known = is_static and by_head and stated.get("num_bits") == 8
    return _CODES.get(kind) if is_known and isinstance(kind, str) else None
