"""Reads from a config.json in which bits a checkpoint's keys and values should be kept (`kv_cache_scheme`)."""

import logging
from collections.abc import Mapping
from typing import Any

from jaxvllm.models.published import quantization_settings
from pallas_kernels.ragged_paged_attention.quantize import Codes

logger = logging.getLogger(__name__)

_CODES: Mapping[Any, Codes] = {"float": "float8_e4m3fn", "int": "int8"}


def stated_kv_codes(config: Mapping[str, Any]) -> Codes | None:
    """Returns in which eight bits keys and values should be kept, with scales that the checkpoint has.

    compressed-tensors and newer ModelOpt state a `kv_cache_scheme`, and older ModelOpt a `kv_cache_quant_algo`. None
    stands for the model's dtype, also where something else is stated: the log says so then.
    """
    settings = quantization_settings(config)
    stated = settings.get("kv_cache_scheme") or settings.get("kv_cache_quant_algo")
    if not stated:
        return None
    if isinstance(stated, str):
        if stated.upper() == "FP8":
            return "float8_e4m3fn"
    elif isinstance(stated, dict):
        is_static = stated.get("symmetric", True) is True and not stated.get("dynamic")
        by_head = stated.get("strategy", "tensor") in ("tensor", "attn_head")
        if is_static and by_head and stated.get("num_bits") == 8 and stated.get("type") in _CODES:
            return _CODES[stated["type"]]
    logger.warning("keys and values stay in the model's dtype: the checkpoint's scheme %r is not known", stated)
    return None
