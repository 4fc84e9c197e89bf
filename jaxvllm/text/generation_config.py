"""Reads the settings for generation from the small JSON files beside a checkpoint's weights."""

import json
from pathlib import Path
from typing import Any

from jaxvllm.core.sampling_params import SamplingParams

# The options that a checkpoint may recommend: Hugging Face's names, and ours.
_OPTIONS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def default_params(directory: Path) -> SamplingParams:
    """Returns the default parameters of `generate`, as in vLLM: the checkpoint's recommendations over our defaults.

    Raises ValueError for a file that is not JSON or has impossible values.
    """
    file = directory / "generation_config.json"
    config = read_json_object(file)
    chosen = {ours: value for name, ours in _OPTIONS.items() if (value := config.get(name)) is not None}
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
