"""`Service`: the state that all endpoints share, such as the engine, the model's names and the open requests."""

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import jaxvllm
from jaxvllm.config import EngineConfig
from jaxvllm.core.errors import ParameterError
from jaxvllm.core.request import GenerationRequest, Prompt
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.server.adapter_loader import AdapterLoader
from jaxvllm.server.adapter_names import AdapterNames, read_modules
from jaxvllm.server.argument_check import ArgumentCheck
from jaxvllm.server.config import ServerConfig
from jaxvllm.server.drainable import Drainable
from jaxvllm.server.errors import ApiError, concerning
from jaxvllm.server.metrics.prometheus import Metrics
from jaxvllm.server.protocol.fields import EngineFields, RequestFields, now
from jaxvllm.server.response_store import ResponseStore
from jaxvllm.text.assistant_message import AnswerFormat
from jaxvllm.text.chat_template import ChatTemplate
from jaxvllm.text.prompts import ANY_LENGTH, PromptReader, PromptRoom
from jaxvllm.text.reasoning import FORMATS, ReasoningFormat
from jaxvllm.text.tokenizer import Tokenizer
from jaxvllm.text.tool_calls.format import ToolCallFormat
from jaxvllm.text.tool_calls.formats import TOOL_CALL_FORMATS, guessed_format
from jaxvllm.text.tool_use import ToolUse
from jaxvllm.worker.engine_client import EngineClient

# Once the server stops, a request that the engine has not queued after this time fails. Its form may compile longer.
UNQUEUED_SECONDS = 2.0
logger = logging.getLogger(__name__)

# The most kinds of tools that the log tells of.
MOST_KINDS = 32
# The most characters of a text that is tokenized without being completed: a second's work, and 200 MB.
MAX_TEXT = 2**20


class Service(Drainable):
    """One served model, with what its endpoints share."""

    config: ServerConfig

    def __init__(
        self,
        llm: EngineClient,
        config: ServerConfig,
        all_metrics: Callable[[], Awaitable[tuple[bytes, str]]] | None = None,
    ):
        """Takes the parts. `all_metrics` renders the metrics where this process is one of several that answer."""
        super().__init__(config)
        self.llm = llm
        # Only the directory's name: clients must not see its path.
        own_name = Path(llm.config.model).name if Path(llm.config.model).is_absolute() else llm.config.model
        self.model_names = config.served_model_name or (own_name,)
        self.adapters = AdapterNames(read_modules(config.lora_modules), self.model_names, config.lora_directory)
        self.adapter_loader = AdapterLoader(self.adapters, llm, finds=config.lora_resolver)
        if (config.lora_modules or config.lora_directory is not None) and not llm.config.enable_lora:
            raise ValueError("lora_modules and lora_directory need room for adapters: set enable_lora, too")
        self.fingerprint = _fingerprint(own_name, llm.config)
        self.created = now()
        self.metrics = Metrics(config.metrics_prefix, self.model_names[0])
        self.argument_check = ArgumentCheck()
        # None: with several processes, a client's next request may come to one that does not have the response.
        self.responses = ResponseStore() if config.api_server_count == 1 else None
        self._all_metrics = all_metrics
        self._left_out: set[str] = set()  # kinds of tools that the log has told of
        # A template is compiled once.
        self._formatted = lru_cache(1)(lambda template, format: template.replaced(content_format=format))
        self._queueing: set[asyncio.Timeout] = set()  # of requests that wait for the engine to queue them
        llm.observe(self.metrics)

    # ---- the model ----

    @property
    def reader(self) -> PromptReader:
        return self.llm.reader

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ApiError when the model has none."""
        if self.reader.tokenizer is None:
            raise ApiError(400, "this model has no tokenizer: give token ids as prompt to /v1/completions")
        return self.reader.tokenizer

    @property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template, which gets contents in the form that the operator wants."""
        own, format = self.tokenizer.chat_template, self.config.chat_template_content_format
        return own if format == "auto" else self._formatted(own, format)

    @property
    def defaults(self) -> SamplingParams:
        return self.llm.facts.default_params

    def max_tokens(self, asked: int | None) -> int | None:
        """Returns the most tokens to generate for a request that asks for `asked`, or for nothing. None: all that fit.

        The model's generation_config.json may have a default, and the operator a limit.
        """
        facts = self.llm.facts
        wanted = facts.default_max_tokens if asked is None else asked
        return min((most for most in (wanted, facts.most_tokens) if most is not None), default=None)

    @property
    def is_ready(self) -> bool:
        """Whether the server takes requests: the engine is idle and answers, or its steps make progress."""
        return not self.draining and self.llm.is_responsive

    def answer_head(self, model: str, tier: str | None) -> dict[str, Any]:
        """Returns the fields after the id with which answers of OpenAI's older endpoints, and their chunks, begin.

        As in OpenAI's API, only a client that has set a tier is told which one it got.
        """
        return {
            "created": now(),
            "model": model,
            "service_tier": None if tier is None else "default",
            "system_fingerprint": self.fingerprint,
        }

    def model_name(self, asked: str | None) -> str:
        """Returns the name of the model, or of an adapter, for the answer.

        Raises ApiError for a model that this server does not have.
        """
        if asked is None:
            return self.model_names[0]
        if asked not in self.model_names and self.adapters.get(asked) is None:
            raise self._unknown(asked)
        return asked

    async def found_model(self, asked: str | None) -> str:
        """Returns the same, of an adapter that is loaded for it first where the operator allows that."""
        if asked is not None:
            await self.adapter_loader.find(asked)
        return self.model_name(asked)

    def _unknown(self, asked: str) -> ApiError:
        shown = asked if len(asked) <= 60 else asked[:57] + "..."
        served = ", ".join((*self.model_names, *(one.lora_name for one in self.adapters)))
        reason = f'the model "{shown}" does not exist: this server has {served}'
        return ApiError(404, reason, param="model", code="model_not_found")

    def adapted(self, model: str, requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
        """Returns the requests with the adapter that `model` names, or as they are where it names the model itself.

        Raises ApiError for an adapter that was unloaded since `model_name` found it.
        """
        if (adapter := self.adapters.get(model)) is not None:
            return [replace(one, lora_request=adapter) for one in requests]
        if model not in self.model_names:
            raise self._unknown(model)
        return [*requests]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        field: str = "messages",
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders a conversation, which is the request's `field`, with the model's chat template.

        With `add_generation_prompt` None, the prompt is added unless the answer continues the last message.
        """
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        with concerning(field):
            try:
                return self.chat_template.render(
                    messages,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tools=tools,
                    **{**self.config.template_variables, **(variables or {})},
                )
            except ParameterError as error:
                if field != "messages" and (error.param or "").startswith("messages"):
                    # The client sent no messages: they were made of this field.
                    raise ParameterError(f"{field}, as messages: {error}", field) from error
                raise

    def read_forwarded(self, body: EngineFields, room: PromptRoom = ANY_LENGTH) -> Prompt | None:
        """Returns the prompt that a proxy has passed on as tokens, or None if the prompt is to be read as usual."""
        if (tokens := body.forwarded_prompt) is None:
            return None
        return self.read_prompt(
            tokens, field="kv_transfer_params.prompt_token_ids", add_special_tokens=False, room=room
        )

    def read_prompt(
        self,
        prompt: str | Sequence[int],
        *,
        field: str,
        add_special_tokens: bool,
        room: PromptRoom = ANY_LENGTH,
    ) -> Prompt:
        """Reads the prompt from the request's `field`. Raises ParameterError for one that the model cannot take."""
        with concerning(field):
            return self.reader.read(prompt, add_special_tokens=add_special_tokens, room=room)

    def read_prompts(
        self, prompts: Sequence[str | Sequence[int]], *, field: str, add_special_tokens: bool, room: PromptRoom
    ) -> list[Prompt]:
        """Reads the prompts of the request's `field`. An error names the prompt that is wrong."""
        read = []
        for index, prompt in enumerate(prompts):
            name = field if len(prompts) == 1 else f"{field}[{index}]"
            try:
                read.append(self.read_prompt(prompt, field=name, add_special_tokens=add_special_tokens, room=room))
            except ParameterError as error:
                if len(prompts) > 1:
                    error.args = (f"{name}: {error}",)
                raise
        return read

    def count_tokens(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Returns the tokens of a text, which may be longer than the model's context.

        Raises ApiError for a text that would keep the server busy for long.
        """
        if len(text) > (most := max(MAX_TEXT, self.reader.max_chars)):
            raise ApiError(400, f"a text of {len(text)} characters is longer than {most}: send it in parts")
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def check_limit(self, max_tokens: int | None, field: str) -> None:
        """Raises ApiError for a `max_tokens` that is longer than the model's context.

        What is only longer than the room after the prompt is right: the answer ends where the context ends.
        """
        length = self.reader.max_model_len
        if max_tokens is not None and max_tokens > length:
            raise ApiError(
                400,
                f"{field} is too large: {max_tokens}. This model's maximum context length is {length} tokens: lower "
                f"{field}, or leave it out",
                param=field,
                code="context_length_exceeded",
            )

    def with_options[T: RequestFields](self, body: T) -> T:
        """Returns the request with what the operator has set for all requests."""
        changes: dict[str, Any] = {}
        if self.config.return_tokens_as_token_ids:
            changes["return_tokens_as_token_ids"] = True
        if self.config.enable_force_include_usage and body.stream:
            usage = {"include_usage": True, "continuous_usage_stats": True}
            changes["stream_options"] = body.streaming.model_copy(update=usage)
        return body.model_copy(update=changes) if changes else body

    # ---- its answers ----

    @property
    def reasoning(self) -> ReasoningFormat | None:
        """The marks of the model's reasoning, or None if all its text is meant for people."""
        name = self.llm.config.reasoning_parser
        return None if name is None else FORMATS[name]

    @cached_property
    def tool_calls(self) -> ToolCallFormat | None:
        """The format in which the model writes tool calls, or None if that is unknown."""
        if self.config.tool_call_parser in TOOL_CALL_FORMATS:
            return TOOL_CALL_FORMATS[self.config.tool_call_parser]
        return guessed_format(self.tokenizer.chat_template.source_with_tools or "")

    def answer_format(self, tools: ToolUse) -> AnswerFormat:
        """Returns how answers to a request with these tools are read. Raises ParameterError if nobody knows."""
        if tools.is_free:
            if not self.config.enable_auto_tool_choice:
                raise ParameterError(
                    f"this server does not leave the choice of {tools.tools_field} to the model: set "
                    f'{tools.choice_field} to one of them or to "none", or start it without '
                    "--no-enable-auto-tool-choice",
                    tools.choice_field,
                )
            if self.tool_calls is None:
                raise ParameterError(
                    "the model's chat template does not show how it writes tool calls: start the server with "
                    f'--tool-call-parser, or set {tools.choice_field} to one of the {tools.tools_field} or to "none"',
                    tools.tools_field,
                )
        return tools.answer_format(self.reasoning, self.tool_calls if tools.is_free else None)

    def with_marks(self, params: SamplingParams, format: AnswerFormat) -> SamplingParams:
        """Returns `params` for an answer in `format`: its text has special tokens if some of them are marks."""
        if format.is_plain or not params.skip_special_tokens or not params.spaces_between_special_tokens:
            return params
        special = self.tokenizer.special_texts
        is_seen = not any(token in mark for mark in format.marks for token in special)
        return params if is_seen else replace(params, skip_special_tokens=False)

    def note_left_out(self, kinds: Iterable[str]) -> None:
        """Logs once for each kind of tool that it cannot run here and is left out of prompts."""
        for kind in set(kinds) - self._left_out:
            if len(self._left_out) < MOST_KINDS:  # clients may make up kinds
                self._left_out.add(kind)
                logger.info("tools of type %.60s cannot run here and are left out of prompts", kind)

    # ---- its metrics ----

    async def render_metrics(self) -> tuple[bytes, str]:
        """Returns what Prometheus reads, and its content type."""
        return self.metrics.render() if self._all_metrics is None else await self._all_metrics()

    # ---- its lifecycle ----

    def drain(self) -> None:
        """Does the same as `Drainable.drain`. Requests that wait in `queueing` fail soon."""
        super().drain()
        for timeout in self._queueing:
            timeout.reschedule(asyncio.get_running_loop().time() + UNQUEUED_SECONDS)

    @asynccontextmanager
    async def queueing(self) -> AsyncIterator[None]:
        """Lets a request wait inside the context until the engine has queued it.

        Raises ApiError when that does not happen soon after the server began to stop.
        """
        try:
            async with asyncio.timeout(UNQUEUED_SECONDS if self.draining else None) as timeout:
                self._queueing.add(timeout)
                try:
                    yield
                finally:
                    self._queueing.discard(timeout)
        except TimeoutError:
            if timeout.expired():
                raise ApiError(503, "the server is shutting down") from None
            raise


def _fingerprint(model: str, config: EngineConfig) -> str:
    """Returns a hash of version, model and numerics. Servers with equal hashes should answer one seed alike."""
    facts = (jaxvllm.__version__, model, config.mesh, config.dtype, config.kv_cache_dtype)
    return f"fp_{hashlib.sha256(repr(facts).encode()).hexdigest()[:12]}"
