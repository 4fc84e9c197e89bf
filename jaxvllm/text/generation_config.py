"""Reads the settings for generation from the small JSON files beside a checkpoint's weights."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxvllm.core.sampling_params import SamplingParams

FILE = "generation_config.json"
# The options that a checkpoint may recommend: Hugging Face's names, and ours.
_OPTIONS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True)
class GenerationDefaults:
    """The parameters of requests that say nothing else, as in vLLM.

    `params` are the defaults of `LLM.generate`. Over HTTP, `max_tokens` holds for a request without one, and
    `most_tokens`, which only an operator can set, limits every request.
    """

    params: SamplingParams
    max_tokens: int | None = None
    most_tokens: int | None = None

    @classmethod
    def read(cls, directory: Path, source: str = "auto", override: str = "{}") -> "GenerationDefaults":
        """Reads the recommendations of the checkpoint in `directory`, or what the operator wants instead.

        `source` is `auto`, `vllm` (nobody recommends anything), or a directory with a generation_config.json.
        `override` is a JSON object whose values win. Raises ValueError for a file that is missing or not JSON, and for
        impossible values.
        """
        file = generation_config_file(directory, source)
        config = {} if source == "vllm" else read_json_object(file)
        wanted = json.loads(override)
        try:
            found = _recommended(config)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
        try:
            params = _recommended(config | wanted)
        except ValueError as error:
            raise ValueError(f"override_generation_config: {error}") from error
        asked = found if source not in ("auto", "vllm") else {}
        most = params.get("max_tokens") if "max_new_tokens" in wanted else asked.get("max_tokens")
        return cls(SamplingParams(**params), params.get("max_tokens"), most)


def generation_config_file(directory: Path, source: str) -> Path:
    """Returns the file that `source` names for the checkpoint in `directory`. Raises ValueError when it must exist."""
    if source in ("auto", "vllm"):
        return directory / FILE
    file = Path(source).expanduser() / FILE
    if not file.is_file():
        raise ValueError(
            f"generation_config {source} is no directory with a {FILE}: give one, or auto (the model's), or vllm (none)"
        )
    return file


def _recommended(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sampling parameters among a checkpoint's settings. Raises ValueError for impossible ones."""
    chosen = {ours: value for name, ours in _OPTIONS.items() if (value := config.get(name)) is not None}
    SamplingParams(**chosen)
    return chosen


def checked_override(value: object) -> str:
    """Returns settings for generation, which are a mapping or a JSON object, as JSON. Raises ValueError for others."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            pass
    if not isinstance(value, Mapping):
        example = '{"temperature": 0.5}'
        raise ValueError(f"override_generation_config must be a JSON object such as {example}, not {value!r}")
    for name in value:
        if name not in _OPTIONS:
            raise ValueError(f"override_generation_config has no {name!r}: it may have {', '.join(_OPTIONS)}")
    try:
        _recommended(value)
    except ValueError as error:
        raise ValueError(f"override_generation_config: {error}") from error
    return json.dumps(dict(value))


def eos_token_ids(directory: Path, own: int | None = None, generation_config: Path | None = None) -> tuple[int, ...]:
    """Returns the EOS tokens of the tokenizer and of generation_config.json; if there are none, config.json's.

    `generation_config` is a file to read in place of the checkpoint's own.
    """
    ids = [] if own is None else [own]
    for file in (generation_config or directory / FILE, directory / "config.json"):
        value = read_json_object(file).get("eos_token_id")
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token_id) is int and token_id >= 0 for token_id in listed):
            raise ValueError(f"{file}: eos_token_id must be a token id or a list, not {value!r}")
        if file.name != "config.json" or not ids:
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
