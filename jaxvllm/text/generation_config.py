"""Reads the settings for generation from the small JSON files beside a checkpoint's weights."""

import json
import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

from jaxvllm.core.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

# The options that a checkpoint may recommend, by Hugging Face's name, with the value that changes nothing (or None).
_NEUTRAL = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "max_new_tokens": None,
}
_OUR_NAMES = {"max_new_tokens": "max_tokens"}


def default_params(directory: Path) -> SamplingParams:
    """Returns the default parameters of `generate`, as in vLLM: the checkpoint's recommendations over our defaults.

    A recommendation that `SamplingParams` has no field for is left out, with a warning. Raises ValueError for a file
    that is not JSON or has impossible values.
    """
    file = directory / "generation_config.json"
    config = read_json_object(file)
    ours = {field.name for field in fields(SamplingParams)}
    chosen = {}
    for name, neutral in _NEUTRAL.items():
        value = config.get(name)
        if value is None:
            continue
        if (our_name := _OUR_NAMES.get(name, name)) in ours:
            chosen[our_name] = value
        elif value != neutral:
            logger.warning("%s asks for %s %s, which is not supported: left out", file, name, value)
    try:
        return SamplingParams(**chosen)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def eos_token_ids(directory: Path, own: int | None = None) -> tuple[int, ...]:
    """Returns the EOS tokens of the tokenizer and of generation_config.json; if there are none, config.json's."""
    ids = [] if own is None else [own]
    for name in ("generation_config.json", "config.json"):
        value = read_json_object(directory / name).get("eos_token_id")
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token_id) is int and token_id >= 0 for token_id in listed):
            raise ValueError(f"{directory / name}: eos_token_id must be a token id or a list, not {value!r}")
        if name == "generation_config.json" or not ids:
            ids += listed
    return tuple(dict.fromkeys(ids))


def read_json_object(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file, or an empty one when there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value
