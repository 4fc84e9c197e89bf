"""The keys that open the server, from wherever they are given. No message holds one."""

import os
from collections.abc import Mapping
from pathlib import Path

from jaxvllm.server.config import ServerConfig

KEY_VARIABLE = "JAXVLLM_API_KEY"


def read_keys(config: ServerConfig, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Every key that opens the server, of the command line, the environment and the file; () when it is open to all.

    ValueError when the file cannot be read or a key could not be sent in a header.
    """
    keys = list(config.api_key)
    if from_environment := environment.get(KEY_VARIABLE, "").strip():
        keys.append(from_environment)
    if config.api_key_file is not None:
        keys += _keys_in(Path(config.api_key_file))
    if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise ValueError("an API key has a space or a character that no header can hold: use printable ASCII")
    return tuple(dict.fromkeys(keys))


def _keys_in(path: Path) -> list[str]:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ValueError(f"api_key_file {path} cannot be read: {reason}") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        # An empty file must not open the server to everybody.
        raise ValueError(f"api_key_file {path} has no key: write one a line, or leave the option out")
    return keys
