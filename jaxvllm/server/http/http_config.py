"""`HttpConfig`: the options of everything that answers HTTP, a server or a router, and the keys of its clients."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

# As browsers write it: lower case, and no slash at the end.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/A-Z]+")
# A server that moves here from vLLM may have its variable, and must not lose its key.
KEY_VARIABLES = ("JAXVLLM_API_KEY", "VLLM_API_KEY")
ADMIN_KEY_VARIABLE = "JAXVLLM_ADMIN_API_KEY"  # such a key opens all that another key does
_NEVER_EMPTY = ("api_key", "allowed_host", "allowed_origins", "allowed_methods", "allowed_headers")


@dataclass(frozen=True, kw_only=True)
class HttpConfig:
    """The options of HTTP: the address, the clients that may ask, and the cost that a request may have.

    Names and meanings are vLLM's where vLLM has them.
    """

    # Without an api_key, everybody who can reach the address may use the server: then only the network protects it.
    host: str = "127.0.0.1"  # address to listen on; 0.0.0.0: every network of this host, so give an api_key, too
    port: int = 8000  # port to listen on; 0: any free port, which is printed
    api_key: tuple[str, ...] = field(default=(), repr=False)  # keys of clients; others: $JAXVLLM_API_KEY, $VLLM_API_KEY
    api_key_file: str | None = None  # a file with one key in each line; lines that begin with # are comments
    allowed_host: tuple[str, ...] = ()  # names beside localhost that clients may use while there is no key, or "*"
    allowed_origins: tuple[str, ...] = ()  # origins of web pages that may read answers: https://app.example, or "*"
    allowed_methods: tuple[str, ...] = ("*",)  # methods that pages of allowed_origins may use
    allowed_headers: tuple[str, ...] = ("*",)  # headers that they may send
    allow_credentials: bool = False  # their browsers may send cookies, which this server ignores but a proxy may need
    root_path: str = ""  # the first part of all paths where a proxy in front leaves it on, such as /llm
    open_metrics: bool = False  # serve /metrics without a key
    shutdown_timeout: float = 30.0  # seconds for running requests to finish after SIGTERM
    max_body_bytes: int = 8 * 2**20  # largest body of a request, in bytes, before it is parsed
    access_log: bool = False  # log a line for each HTTP request
    ssl_certfile: str | None = None  # the certificate for https; needs ssl_keyfile
    ssl_keyfile: str | None = None  # the private key of ssl_certfile

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be from 0 to 65535, not {self.port!r}")
        if not self.shutdown_timeout > 0:
            raise ValueError(f"shutdown_timeout must be above 0 seconds, not {self.shutdown_timeout!r}")
        if self.max_body_bytes < 1:
            raise ValueError(f"max_body_bytes must be positive, not {self.max_body_bytes!r}")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("ssl_certfile and ssl_keyfile belong together: give both, or none")
        if self.root_path and not re.fullmatch(r"(/[\w.~-]+)+", self.root_path):
            raise ValueError(
                f"root_path must be a path such as /llm, without a slash at its end, not {self.root_path!r}"
            )
        for name in _NEVER_EMPTY:
            if not all(getattr(self, name)):
                raise ValueError(f"{name} has an empty value: leave it out")
        for origin in self.allowed_origins:
            if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"allowed_origins has {origin!r}: an origin is a scheme and a host as browsers send it, without a "
                    'path, such as https://app.example:8443; "*" allows all'
                )
        if not self.allowed_origins:
            for name in ("allowed_methods", "allowed_headers", "allow_credentials"):
                if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                    raise ValueError(f"{name} has no effect without allowed_origins: give the origins, too")


def read_keys(config: HttpConfig, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Returns every key of the command line, the environment and the file, or () when the server is open to all.

    Raises ValueError when the file cannot be read, or a key cannot be sent in a header. No message contains a key.
    """
    keys = list(config.api_key)
    keys += [key for name in (*KEY_VARIABLES, ADMIN_KEY_VARIABLE) if (key := environment.get(name, "").strip())]
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
        raise ValueError(f"api_key_file {path} has no key: write one in each line, or leave the option out")
    return keys
