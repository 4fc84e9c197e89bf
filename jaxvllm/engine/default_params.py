"""The sampling parameters that a checkpoint's authors recommend: generation_config.json."""

import json
import logging
from pathlib import Path
from typing import Any

from jaxvllm.core.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

# Hugging Face's name -> ours.
_NAMES = {name: name for name in ("temperature", "top_k", "top_p", "min_p")} | {"max_new_tokens": "max_tokens"}
# What would change sampling but is not supported, with the value that changes nothing.
_NEUTRAL = {"repetition_penalty": 1.0}


def default_params(directory: Path) -> SamplingParams:
    """What `generate` uses when its caller gives no parameters, as in vLLM: the checkpoint's, else the defaults.

    Raises ValueError for a file that is not JSON or has impossible values.
    """
    file = directory / "generation_config.json"
    if not file.is_file():
        return SamplingParams()
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        params = SamplingParams(**{ours: config[name] for name, ours in _NAMES.items() if config.get(name) is not None})
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{file}: {error}") from error
    for name, neutral in _NEUTRAL.items():
        if config.get(name, neutral) != neutral:
            logger.warning("%s asks for %s %s, which is not supported: left out", file, name, config[name])
    return params
