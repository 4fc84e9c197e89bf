"""What all endpoints share: the engine, the names of its model, and which requests are open."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.engine.async_llm import AsyncLLM, EngineUnavailableError
from jaxvllm.engine.prompts import Prompt, PromptReader
from jaxvllm.engine.tokenizer import Tokenizer
from jaxvllm.server.config import ServerConfig
from jaxvllm.server.errors import ApiError
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
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation. With None, the generation prompt is there unless the last message goes on."""
        return self.tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=(
                not continue_final_message if add_generation_prompt is None else add_generation_prompt
            ),
            continue_final_message=continue_final_message,
            **(variables or {}),
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
