"""`ServerConfig`: all options of the server around an engine, validated once and never changed."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jaxvllm.core.value_checks import json_object
from jaxvllm.server.adapter_names import read_modules
from jaxvllm.server.http.http_config import ADMIN_KEY_VARIABLE, HttpConfig
from jaxvllm.text.chat_messages import RESERVED_VARIABLES
from jaxvllm.text.tool_calls.formats import TOOL_CALL_FORMATS


@dataclass(frozen=True, kw_only=True)
class ServerConfig(HttpConfig):
    """The options of the server. Options of vLLM keep their names and meanings."""

    api_server_count: int = 1  # processes that answer HTTP; more than 1 where one is too slow for all streams
    served_model_name: tuple[str, ...] = ()  # names of the model for clients; answers use the first; (): its own name
    chat_template: str | None = None  # a file with a chat template, or the template itself; None: the model's
    # What the chat template gets as the content of a message: a text, or a list of parts as in OpenAI's API.
    chat_template_content_format: Literal["auto", "string", "openai"] = "auto"  # auto: what the template reads
    default_chat_template_kwargs: str = "{}"  # variables of the chat template, as JSON; those of a request win
    return_tokens_as_token_ids: bool = False  # tokens in logprobs are "token_id:17" in all answers
    enable_force_include_usage: bool = False  # every chunk of every stream has the usage so far
    enable_per_request_metrics: bool = False  # answers have the times of their request: queue, first token, speed
    max_num_queued_requests: int | None = None  # requests beyond those that can run; more get 503. None: no limit
    max_num_queued_tokens: int | None = None  # prompt tokens of waiting requests; more get 503. None: no limit
    request_timeout: float = 600.0  # seconds that a request may take in all
    # Adapters that requests may name as their model: NAME=PATH, or JSON as in vLLM: {"name": NAME, "path": PATH}.
    lora_modules: tuple[str, ...] = ()
    # Add POST /v1/load_lora_adapter and /v1/unload_lora_adapter, for adapters within this directory.
    lora_directory: str | None = None
    lora_resolver: bool = False  # load an unknown model that a request names from its directory in lora_directory
    tool_call_parser: str = "auto"  # how the model writes tool calls, by vLLM's names; auto: as its template shows
    enable_auto_tool_choice: bool = True  # false: no request may leave it to the model whether it calls a tool
    metrics_prefix: str = "jaxvllm"  # first part of the names of metrics; with vllm, dashboards made for vLLM work
    log_stats_interval: float = 10.0  # seconds between log lines while there is work
    enable_tokenizer_info_endpoint: bool = False  # GET /tokenizer_info: the tokenizer's settings and the chat template
    # Add POST /reset_prefix_cache, which measurements use, and endpoints of trainers: POST /update_weights, /pause.
    dev_endpoints: bool = False
    enable_elastic_ep: bool = False  # add POST /scale_elastic_ep, which changes the number of replicas
    # Keys that the endpoints of dev_endpoints, lora_directory and enable_elastic_ep need. They open all others, too.
    # More come from $JAXVLLM_ADMIN_API_KEY. (): every key opens these endpoints.
    admin_api_key: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if not all(self.admin_api_key):
            raise ValueError("admin_api_key has an empty value: leave it out")
        object.__setattr__(self, "api_key", tuple(dict.fromkeys((*self.api_key, *self.admin_api_key))))
        super().__post_init__()
        if type(self.api_server_count) is not int or self.api_server_count < 1:
            raise ValueError(f"api_server_count must be a positive integer, not {self.api_server_count!r}")
        for name in ("max_num_queued_requests", "max_num_queued_tokens"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 0):
                raise ValueError(f"{name} must be an integer of 0 or more, or None, not {value!r}")
        for name in ("request_timeout", "log_stats_interval"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0 seconds, not {getattr(self, name)!r}")
        if self.tool_call_parser not in ("auto", *TOOL_CALL_FORMATS):
            raise ValueError(
                f"tool_call_parser must be auto or one of {', '.join(TOOL_CALL_FORMATS)}, not {self.tool_call_parser!r}"
            )
        if not all(self.served_model_name):
            raise ValueError("served_model_name has an empty value: leave it out")
        if self.chat_template_content_format not in ("auto", "string", "openai"):
            raise ValueError(
                "chat_template_content_format must be auto, string or openai, not "
                f"{self.chat_template_content_format!r}"
            )
        read_modules(self.lora_modules)
        if self.lora_directory is not None:
            if not Path(self.lora_directory).is_dir():
                raise ValueError(f"lora_directory {self.lora_directory} is no directory")
            if self.api_server_count > 1:
                raise ValueError(
                    "lora_directory lets the adapters change, which each of several API processes would have to know: "
                    "leave api_server_count out, or give lora_modules"
                )
        elif self.lora_resolver:
            raise ValueError("lora_resolver looks adapters up in lora_directory: set it, too")
        object.__setattr__(self, "default_chat_template_kwargs", json.dumps(self._read_variables()))

    def admin_keys(self, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
        """Returns the keys of those who may change the server for everybody, or () where every key may."""
        more = environment.get(ADMIN_KEY_VARIABLE, "").strip()
        return (*self.admin_api_key, more) if more else self.admin_api_key

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables that every chat template gets where a request does not set them."""
        return self._read_variables()

    def _read_variables(self) -> dict[str, Any]:
        given = json_object("default_chat_template_kwargs", self.default_chat_template_kwargs)
        if reserved := [name for name in RESERVED_VARIABLES if name in given]:
            raise ValueError(
                f"default_chat_template_kwargs has {reserved[0]}, which only a request can set: leave it out"
            )
        return given
