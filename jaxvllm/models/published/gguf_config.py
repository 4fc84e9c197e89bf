"""Makes the config.json that a GGUF file would have, of its metadata and the shapes of its tensors."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxvllm.gguf_file import GgufFile
from jaxvllm.models.families import find_family
from jaxvllm.models.hf_config import MOST_LAYERS
from jaxvllm.models.published.gguf_architecture import GgufArchitecture
from jaxvllm.models.published.gguf_architectures import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS, architecture_of
from jaxvllm.models.published.gguf_blocks import BlockType
from jaxvllm.models.published.gguf_own_keys import LAYERS_WITH
from jaxvllm.models.published.gguf_tensors import values_of
from jaxvllm.models.tiling import Box

_KEYS: Mapping[str, str] = {"embedding_length": "hidden_size", "block_count": "num_hidden_layers"}
_KEYS_OF_ATTENTION: Mapping[str, str] = {
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
}
# Files need not have these, and something is computed with them where they do.
_OPTIONAL_NUMBERS = ("nextn_predict_layers",)
# What none of the architectures computes. `rope.scale_linear` is what the oldest files have for a scaling.
_REFUSED = (
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.scale",
    "attention.temperature_length",
    "attention.temperature_scale",
    "embedding_scale",
    "expert_weights_scale",
    "logit_scale",
    "residual_scale",
    "rope.scale_linear",
)
# Values of these that change nothing, beside 0.
_NEUTRAL: Mapping[str, float] = {
    "embedding_scale": 1.0,
    "expert_weights_scale": 1.0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "rope.scale_linear": 1.0,
}
# The only values that are known of these: attention is causal, and experts are chosen by a softmax.
_USUAL_VALUES: Mapping[str, Any] = {"attention.causal": True, "expert_gating_func": 1}
# The dtype of a file whose tensors are not quantized, by its `general.file_type`. Quantized files say nothing.
_DTYPES: Mapping[Any, str] = {0: "float32", 1: "float16"}
_SCALINGS = ("none", "linear", "yarn", "longrope")
_MOST_TOKENS = 1 << 24
_MOST_NUMBERS = 2048  # of a head: a rope is computed before any tensor is looked at
_KNOWN_SCALING = (
    "type",
    "factor",
    "attn_factor",
    "original_context_length",
    "finetuned",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_log_multiplier",
    "yarn_attn_factor",
)


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """Returns the config of a model, in Hugging Face's words.

    Raises ValueError that names the file, and an architecture or a key that is not known or missing.
    """
    name, architecture = architecture_of(file)
    start = f"{name}."
    values = {key.removeprefix(start): value for key, value in file.metadata.items() if key.startswith(start)}
    names = {**_KEYS, **dict([architecture.norm_epsilon])}
    names |= _KEYS_OF_ATTENTION if architecture.has_attention else {}
    # Some converters write one number for each layer, even where all are the same.
    values |= {key: _same(values[key]) for key in (*names, "attention.head_count_kv") if key in values}
    is_number = {key: type(values.get(key)) in (int, float) for key in names}
    names = {key: ours for key, ours in names.items() if is_number[key] or key not in architecture.lacks}
    for key in (*names, *architecture.needs, *(key for key in _OPTIONAL_NUMBERS if key in values)):
        value = values.get(key)
        if type(value) not in (int, float):
            raise ValueError(f"{file.path} must have a number {start}{key}, not {value!r}")
    if type(values["block_count"]) is not int or values["block_count"] > MOST_LAYERS:
        raise ValueError(f"{file.path} has {values['block_count']!r} layers: models have {MOST_LAYERS} at most")
    refused = set(_REFUSED) - set(architecture.understood)
    changing = sorted(key for key in refused if values.get(key, 0) not in (0, _NEUTRAL.get(key, 0)))
    usual_values = {**_USUAL_VALUES, **architecture.usual_values}
    changing += [key for key, usual in usual_values.items() if values.get(key, usual) != usual]
    changing += [key for key in architecture.refused if values.get(key)]
    for key in changing:
        raise ValueError(
            f"{file.path} has {start}{key} = {values[key]!r}, which is not supported: it changes the model"
        )
    of_layers = _layers_with(file, values["block_count"])
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or (architecture.has_attention and values["attention.head_count"] < 1):
        raise ValueError(f"{file.path} must have the tensor token_embd.weight, and at least one head")
    # A tokenizer's masks are as long as the vocabulary, and are made before any weight is looked at.
    rows = embedding.shape[0]
    if rows > embedding.path.stat().st_size:
        raise ValueError(f"{embedding.path}: tensor token_embd.weight has {rows} rows, and fewer bytes")
    if rows > _MOST_TOKENS:  # a file of any size may take no room on a disk
        raise ValueError(
            f"{embedding.path}: tensor token_embd.weight has {rows} rows: vocabularies have {_MOST_TOKENS} at most"
        )
    try:
        attention = _attention(file, start, values, architecture) if architecture.has_attention else {}
        own = _own_keys(file, start, values | {LAYERS_WITH: of_layers}, architecture)
    except (TypeError, ArithmeticError, LookupError) as error:
        raise ValueError(f"{file.path} has keys of {name} that are no numbers where it needs some ({error})") from error
    return {
        "architectures": [architecture.family],
        **{ours: values[key] for key, ours in names.items()},
        **attention,
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **{key: name in of_layers for key, name in architecture.present.items()},
        **{key: file.tensors[name].shape[0] for key, name in architecture.rows.items() if name in file.tensors},
        "dtype": _dtype(file, architecture),
        **own,
    }


def _layers_with(file: GgufFile, num_layers: int) -> Mapping[str, list[int]]:
    """Returns the numbers of the layers that have a tensor, by its name in a layer."""
    starts = {f"blk.{number}": number for number in range(num_layers)}
    found: dict[str, list[int]] = {}
    for name in file.tensors:
        block, number, own = (*name.split(".", 2), "", "")[:3]
        if (layer := starts.get(f"{block}.{number}")) is not None:
            found.setdefault(own, []).append(layer)
    return found


def _attention(
    file: GgufFile, start: str, values: Mapping[str, Any], architecture: GgufArchitecture
) -> Mapping[str, Any]:
    """Returns the keys of heads, and of the rope that turns them."""
    heads = values["attention.head_count"]
    head_size = values.get("attention.key_length", values["embedding_length"] // heads)
    if architecture.is_latent:  # of a head, a rope turns these alone
        head_size = values["rope.dimension_count"]
    if type(head_size) is not int or not 1 <= head_size <= _MOST_NUMBERS:
        raise ValueError(f"{file.path} has keys of {head_size!r} numbers: heads have 1 to {_MOST_NUMBERS}")
    if not architecture.is_latent and values.get("attention.value_length", head_size) != head_size:
        raise ValueError(f"{file.path} has values that are not as wide as its keys of {head_size}: not supported")
    rope = _rope(file, start, values, head_size, architecture.steepness)
    return {
        "num_key_value_heads": values.get("attention.head_count_kv", heads),
        "head_dim": head_size,
        "rope_theta": values.get("rope.freq_base", 10_000.0),
        "rope_parameters": {**rope, **architecture.rope_parameters},
    }


def _same(value: Any) -> Any:
    """Returns the number that a list has at every place, or any other value as it is."""
    return value[0] if isinstance(value, list) and len(set(value)) == 1 else value


def _own_keys(
    file: GgufFile, start: str, values: Mapping[str, Any], architecture: GgufArchitecture
) -> Mapping[str, Any]:
    """Returns the keys that this architecture alone has. Raises ValueError that names the file for wrong metadata."""
    try:
        return architecture.own_keys(values)
    except ValueError as error:
        raise ValueError(f"{file.path} has metadata {start}* that fit no model: {error}") from error


def _dtype(file: GgufFile, architecture: GgufArchitecture) -> str:
    """Returns the dtype in which the model is computed unless the user says another one."""
    kind = file.metadata.get("general.file_type")
    if isinstance(kind, list):
        raise ValueError(f"{file.path} must have a number general.file_type, not an array")
    dtype = _DTYPES.get(kind, "bfloat16")
    family = find_family({"architectures": [architecture.family]})
    return "bfloat16" if dtype == "float16" and family.exceeds_float16 else dtype


def _rope(
    file: GgufFile, start: str, values: Mapping[str, Any], head_size: int, steepness: float | None
) -> dict[str, Any]:
    """Returns the rope parameters. Factors of frequencies are LongRoPE's, of which Llama 3.1's scaling is a case."""
    scaling = {key.removeprefix("rope.scaling."): value for key, value in values.items() if "rope.scaling." in key}
    kind = scaling.get("type", "none")
    unknown = [key for key in scaling if key not in _KNOWN_SCALING]
    if kind not in _SCALINGS or unknown:
        raise ValueError(f"{file.path} has {start}rope.scaling {scaling!r}: known types are {', '.join(_SCALINGS)}")
    if ROPE_FACTORS in file.tensors and kind != "none":
        raise ValueError(f"{file.path} has {start}rope.scaling.type {kind!r} beside {ROPE_FACTORS}: not supported")
    parameters: dict[str, Any] = {"rope_type": "default"}
    if kind in ("linear", "yarn"):
        factor: Any = scaling.get("factor")
        if type(factor) not in (int, float) or not factor > 0:
            raise ValueError(f"{file.path} must have a number {start}rope.scaling.factor above 0, not {factor!r}")
        parameters = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        parameters["original_max_position_embeddings"] = scaling.get("original_context_length")
        parameters |= {key: scaling.get(f"yarn_{key}") for key in ("beta_fast", "beta_slow")}
        usual = 0.1 * math.log(max(scaling["factor"], 1)) + 1
        if not any(math.isclose(scaling.get("yarn_attn_factor", 1.0), known, rel_tol=1e-4) for known in (1.0, usual)):
            raise ValueError(f"{file.path} has {start}rope.scaling {scaling!r}: known is yarn_attn_factor {usual:.4f}")
    # DeepSeek makes logits steeper by a multiple of the logarithm of YaRN's factor, which other ropes have none of.
    if (steeper := scaling.get("yarn_log_multiplier")) and steepness is None:
        raise ValueError(f"{file.path} has {start}rope.scaling.yarn_log_multiplier {steeper!r}: not supported")
    if steeper and steepness is not None and kind == "yarn":
        parameters |= dict.fromkeys(("mscale", "mscale_all_dim"), round(steepness * steeper, 6))
    if beta := values.get("attention.temperature_scale"):
        parameters["llama_4_scaling_beta"] = beta
    if (extra := scaling.get("attn_factor", 1.0)) != 1.0 and LONG_FACTORS not in file.tensors:
        raise ValueError(f"{file.path} has {start}rope.scaling.attn_factor {extra!r}: it is known with LongRoPE only")
    if ROPE_FACTORS in file.tensors:
        factors = _numbers(file, ROPE_FACTORS)
        parameters = {"rope_type": "longrope", "long_factor": factors, "short_factor": factors, "attention_factor": 1.0}
    if LONG_FACTORS in file.tensors:
        parameters = {"rope_type": "longrope", "attention_factor": scaling.get("attn_factor")}
        for key, name in (("long_factor", LONG_FACTORS), ("short_factor", SHORT_FACTORS)):
            parameters[key] = _numbers(file, name)
    turned = values.get("rope.dimension_count", head_size)
    if type(turned) is not int or not 1 <= turned <= head_size:
        raise ValueError(f"{file.path} has {start}rope.dimension_count {turned!r}, and heads of {head_size}")
    parameters["partial_rotary_factor"] = turned / head_size
    return {key: value for key, value in parameters.items() if value is not None}


def _numbers(file: GgufFile, name: str) -> list[float]:
    """Returns the few numbers of a tensor."""
    tensor = file.tensors.get(name)
    if tensor is None or len(tensor.shape) != 1 or tensor.shape[0] > _MOST_NUMBERS // 2:
        found = "none" if tensor is None else tensor.shape
        raise ValueError(
            f"{file.path} must have a tensor {name} of at most {_MOST_NUMBERS // 2} numbers, and has {found}"
        )
    where = f"{tensor.path}: tensor {name}"
    mapped = np.memmap(tensor.path, np.uint8, "r").view(np.ndarray)
    part = values_of(tensor, where, BlockType.of(tensor.kind, where), mapped)
    return [float(value) for value in part(Box.whole(tensor.shape))]
