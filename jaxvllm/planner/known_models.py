"""Finds well-known models by name, with the sizes, RoPE and windows of their config.json.

`known_models.json` has the keys that families read from the public config.json of each base model. The sizes were
compared with Lightning's litgpt (litgpt/config.py), and the number of parameters with the published count
(tests/planner/test_known_models.py).
"""

import difflib
import json
import re
from pathlib import Path
from typing import Any

from jaxvllm.model_name import DEMO_MODEL, local_gguf
from jaxvllm.models import checkpoint

_FILE = Path(__file__).with_name("known_models.json")
# Words in a name that do not change the sizes: how a model was tuned, or how its publisher once began its name.
_KINDS = {"base", "instruct", "it", "pt", "chat", "hf", "meta"}


def find_config(model: str) -> tuple[str, dict[str, Any]]:
    """Returns the full name and the config.json of `model`: a directory, a config.json or GGUF file, or a known name.

    Files of GGUF are given as to `local_gguf`. Names match in any case, with or without their owner, and as tuned
    versions: "llama-3.1-8b-instruct". Nothing is downloaded. Raises ValueError with the nearest known names when
    `model` is none of these.
    """
    try:
        path = DEMO_MODEL if model == "demo" else Path(model).expanduser()
    except RuntimeError as error:
        raise ValueError(f"model {model!r} begins with a home that is not here: give the whole path") from error
    if (file := local_gguf(model)) is not None:
        return model, checkpoint.read_config(file)
    if path.is_dir():
        return model, checkpoint.read_config(path)
    if path.is_file():
        return model, checkpoint.read_config(path.parent) if path.name == "config.json" else _read(path)
    known = known_models()
    owner, words = _owner(model), _words(model)
    for name, config in known.items():
        if owner in ("", _owner(name)) and words in (_words(name), _words(re.sub(r"-\d{4}\b", "", name))):
            return name, config
    bare = {name.partition("/")[2].lower(): name for name in known}
    near = difflib.get_close_matches(model.rpartition("/")[2].lower(), bare, 3, 0.5)
    hint = f"did you mean {', '.join(bare[name] for name in near)}?" if near else f"known are {', '.join(known)}"
    raise ValueError(f"model {model!r} is no directory, no config.json and no known name: {hint}")


def known_models() -> dict[str, dict[str, Any]]:
    """Returns the config of every known model by OWNER/NAME."""
    return _read(_FILE)


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return config


def _owner(name: str) -> str:
    return name.rpartition("/")[0].lower()


def _words(name: str) -> tuple[str, ...]:
    """Returns the words of a name that tell models apart."""
    return tuple(word for word in name.rpartition("/")[2].lower().split("-") if word not in _KINDS)
