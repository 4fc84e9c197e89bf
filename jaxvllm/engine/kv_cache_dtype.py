"""Chooses how pages hold keys and values, from the option `kv_cache_dtype` and what the checkpoint states."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxvllm.models.published.kv_cache_scheme import stated_kv_codes
from pallas_kernels.ragged_paged_attention import KVQuantization

# By vLLM's names; vLLM has no int8 with scales of a checkpoint.
QUANTIZATIONS: Mapping[str, KVQuantization] = {
    "fp8": KVQuantization("float8_e4m3fn"),
    "fp8_e4m3": KVQuantization("float8_e4m3fn"),
    "fp8_e5m2": KVQuantization("float8_e5m2"),
    "int8": KVQuantization("int8"),
    "int8_per_token_head": KVQuantization("int8", by_token=True),
    "fp8_per_token_head": KVQuantization("float8_e4m3fn", by_token=True),
}


def kv_quantization(kv_cache_dtype: str, config: Mapping[str, Any], dtype: jnp.dtype) -> KVQuantization | None:
    """Returns how pages hold the keys and values of the model of a config.json, or None for the model's own `dtype`.

    Raises ValueError for another dtype than the model's, and for int8 where the checkpoint has no scales for that.
    """
    if kv_cache_dtype == "auto":
        stated = stated_kv_codes(config)
        return None if stated is None else KVQuantization(stated)
    if kv_cache_dtype not in QUANTIZATIONS:
        if kv_cache_dtype != dtype.name:
            raise ValueError(
                f"kv_cache_dtype must be auto, the dtype of the model, which is {dtype}, or one of "
                f"{', '.join(QUANTIZATIONS)}, not {kv_cache_dtype}: give dtype as well"
            )
        return None
    found = QUANTIZATIONS[kv_cache_dtype]
    if kv_cache_dtype == "int8" and stated_kv_codes(config) != found.codes:
        raise ValueError(
            "kv_cache_dtype int8 needs a checkpoint whose kv_cache_scheme is int8, because keys and values are nothing "
            "without scales then: take int8_per_token_head"
        )
    return found
