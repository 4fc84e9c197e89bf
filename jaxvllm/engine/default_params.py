"""The sampling parameters that a checkpoint's authors recommend: generation_config.json."""

import logging
from pathlib import Path

from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.engine.json_file import read_json_object

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
    config = read_json_object(file)
    try:
        params = SamplingParams(**{ours: config[name] for name, ours in _NAMES.items() if config.get(name) is not None})
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    for name, neutral in _NEUTRAL.items():
        if config.get(name, neutral) != neutral:
            logger.warning("%s asks for %s %s, which is not supported: left out", file, name, config[name])
    return params
