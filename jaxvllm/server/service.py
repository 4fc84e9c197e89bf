"""What all endpoints share: the engine, the names of its model, and which requests are open."""

import asyncio
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jaxvllm
from jaxvllm.config import EngineConfig
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.engine.async_llm import AsyncLLM, EngineUnavailableError
from jaxvllm.engine.prompts import Prompt, PromptReader
from jaxvllm.engine.tokenizer import Tokenizer
from jaxvllm.server.config import ServerConfig
from jaxvllm.server.errors import ApiError, concerning
from jaxvllm.server.metrics import Metrics
from jaxvllm.server.protocol.fields import now

# Of a text whose tokens are only counted: a second's work, and 200 MB.
MAX_TEXT = 2**20


class Service:
    """One served model."""

    def __init__(self, llm: AsyncLLM, config: ServerConfig):
        self.llm = llm
        self.config = config
        # A directory's own name: its path is nobody's business.
        own_name = Path(llm.config.model).name if Path(llm.config.model).is_absolute() else llm.config.model
        self.model_names = config.served_model_name or (own_name,)
        self.fingerprint = _fingerprint(own_name, llm.config)
        self.created = now()
        self.metrics = Metrics(config.metrics_prefix, self.model_names[0])
        self.draining = False
        self.num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        llm.observe(self.metrics)

    # ---- what there is ----

    @property
    def reader(self) -> PromptReader:
        return self.llm.reader

    @property
    def tokenizer(self) -> Tokenizer:
        """ApiError when the model has none."""
        if self.reader.tokenizer is None:
            raise ApiError(400, "this model has no tokenizer: give token ids as prompt to /v1/completions")
        return self.reader.tokenizer

    @property
    def defaults(self) -> SamplingParams:
        return self.llm.facts.default_params

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken: the engine is idle and answers, or its steps make progress."""
        return not self.draining and self.llm.is_responsive

    def answer_head(self, model: str) -> dict[str, Any]:
        """What answers of OpenAI's older endpoints and their chunks begin with, behind their id."""
        return {
            "created": now(),
            "model": model,
            "service_tier": None,
            "system_fingerprint": self.fingerprint,
        }

    def model_name(self, asked: str | None) -> str:
        """The name to answer with. ApiError for a model that is not here."""
        if asked is None:
            return self.model_names[0]
        if asked not in self.model_names:
            shown = asked if len(asked) <= 60 else asked[:57] + "..."
            served = ", ".join(self.model_names)
            raise ApiError(
                404,
                f'the model "{shown}" does not exist: this server has {served}',
                param="model",
                code="model_not_found",
            )
        return asked

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        field: str = "messages",
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that a conversation, the request's `field`, becomes.

        With None, the generation prompt is there unless the last message goes on.
        """
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        with concerning(field):
            return self.tokenizer.apply_chat_template(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(variables or {}),
            )

    def read_prompt(
        self,
        prompt: str | Sequence[int],
        *,
        field: str,
        cache_salt: str | None,
        add_special_tokens: bool,
        scores_only: bool = False,
    ) -> Prompt:
        """The prompt that the request's `field` became. ParameterError for one that the model cannot take."""
        kind = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
        with concerning(field):
            return self.reader.read(
                {kind: prompt, "cache_salt": cache_salt},
                add_special_tokens=add_special_tokens,
                scores_only=scores_only,
            )

    def count_tokens(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The tokens of a text that need not fit the model. ApiError for one that would keep the server busy."""
        if len(text) > (most := max(MAX_TEXT, self.reader.max_chars)):
            raise ApiError(400, f"a text of {len(text)} characters is longer than {most}: send it in parts")
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def check_room(self, prompt: Prompt, max_tokens: int | None, field: str) -> None:
        """ApiError when `max_tokens` new ones are more than the model has room for behind `prompt`."""
        length, count = self.reader.max_model_len, len(prompt.token_ids)
        if max_tokens is not None and max_tokens > length - count:
            raise ApiError(
                400,
                f"{field} is too large: {max_tokens}. This model's maximum context length is {length} tokens and the "
                f"prompt has {count}: lower {field} to {length - count}, or leave it out",
                param=field,
                code="context_length_exceeded",
            )

    # ---- its life ----

    def drain(self) -> None:
        """Takes no new requests from now on."""
        self.draining = True

    async def idle(self) -> None:
        """Returns when no request is open."""
        await self._idle.wait()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """A request that generates, for as long as it is worked on. EngineUnavailableError when none is taken."""
        if self.draining:
            raise EngineUnavailableError("the server is shutting down")
        self.num_open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_open -= 1
            if not self.num_open:
                self._idle.set()


def _fingerprint(model: str, config: EngineConfig) -> str:
    """The same for servers whose answers to one seed should be the same: equal version, model and numerics."""
    facts = (jaxvllm.__version__, model, config.mesh, config.dtype, config.kv_cache_dtype)
    return f"fp_{hashlib.sha256(repr(facts).encode()).hexdigest()[:12]}"
