"""`ServerConfig`: all options of the server around an engine, validated once and never changed."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jaxvllm.text.tool_calls.formats import TOOL_CALL_FORMATS

# As browsers write it: lower case, and no slash at the end.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/A-Z]+")
KEY_VARIABLE = "JAXVLLM_API_KEY"


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The options of the server. Those that vLLM has too keep its names and meanings."""

    host: str = "127.0.0.1"  # address to listen on; 0.0.0.0: every network of this host, which needs an api_key
    port: int = 8000  # port to listen on; 0: any free port, which is printed
    api_server_count: int = 1  # processes that answer HTTP; more than 1 where one is too slow for all streams
    served_model_name: tuple[str, ...] = ()  # names of the model for clients; answers use the first; (): its own name
    api_key: tuple[str, ...] = field(default=(), repr=False)  # keys that clients may use, beside $JAXVLLM_API_KEY
    api_key_file: str | None = None  # a file with one key in each line; lines that begin with # are comments
    allowed_host: tuple[str, ...] = ()  # names beside localhost that clients may use while there is no key, or "*"
    allowed_origins: tuple[str, ...] = ()  # origins of web pages that may read answers: https://app.example, or "*"
    allowed_methods: tuple[str, ...] = ("*",)  # methods that pages of allowed_origins may use
    allowed_headers: tuple[str, ...] = ("*",)  # headers that they may send
    allow_credentials: bool = False  # their browsers may send cookies, which this server ignores but a proxy may need
    chat_template: str | None = None  # a file with a chat template, or the template itself; None: the model's
    open_metrics: bool = False  # serve /metrics without a key
    max_num_queued_requests: int | None = None  # requests beyond those that can run; more get 503. None: no limit
    max_num_queued_tokens: int | None = None  # prompt tokens of waiting requests; more get 503. None: no limit
    request_timeout: float = 600.0  # seconds that a request may take in all
    shutdown_timeout: float = 30.0  # seconds for running requests to finish after SIGTERM
    max_body_bytes: int = 8 * 2**20  # largest body of a request, in bytes, before it is parsed
    tool_call_parser: str = "auto"  # how the model writes tool calls, by vLLM's names; auto: as its template shows
    enable_auto_tool_choice: bool = True  # false: no request may leave it to the model whether it calls a tool
    metrics_prefix: str = "jaxvllm"  # first part of the names of metrics; with vllm, dashboards made for vLLM work
    log_stats_interval: float = 10.0  # seconds between log lines while there is work
    access_log: bool = False  # log a line for each HTTP request
    enable_tokenizer_info_endpoint: bool = False  # GET /tokenizer_info: the tokenizer's settings and the chat template
    dev_endpoints: bool = False  # add POST /reset_prefix_cache, which measurements use to empty the cache
    enable_elastic_ep: bool = False  # add POST /scale_elastic_ep, which changes the number of replicas
    ssl_certfile: str | None = None  # the certificate for https; needs ssl_keyfile
    ssl_keyfile: str | None = None  # the private key of ssl_certfile

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be from 0 to 65535, not {self.port!r}")
        if type(self.api_server_count) is not int or self.api_server_count < 1:
            raise ValueError(f"api_server_count must be a positive integer, not {self.api_server_count!r}")
        for name in ("max_num_queued_requests", "max_num_queued_tokens"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 0):
                raise ValueError(f"{name} must be an integer of 0 or more, or None, not {value!r}")
        for name in ("request_timeout", "shutdown_timeout", "log_stats_interval"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0 seconds, not {getattr(self, name)!r}")
        if self.max_body_bytes < 1:
            raise ValueError(f"max_body_bytes must be positive, not {self.max_body_bytes!r}")
        if self.tool_call_parser not in ("auto", *TOOL_CALL_FORMATS):
            raise ValueError(
                f"tool_call_parser must be auto or one of {', '.join(TOOL_CALL_FORMATS)}, not {self.tool_call_parser!r}"
            )
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("ssl_certfile and ssl_keyfile belong together: give both, or none")
        for name in (
            "served_model_name",
            "api_key",
            "allowed_host",
            "allowed_origins",
            "allowed_methods",
            "allowed_headers",
        ):
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


def read_keys(config: ServerConfig, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Returns every key of the command line, the environment and the file, or () when the server is open to all.

    Raises ValueError when the file cannot be read, or a key cannot be sent in a header. No message contains a key.
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
        raise ValueError(f"api_key_file {path} has no key: write one in each line, or leave the option out")
    return keys
