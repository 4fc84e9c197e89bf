"""`/v1/completions`, as OpenAI's and vLLM's clients know it."""

from typing import Annotated, Any, Literal

from pydantic import FailFast, Field

from jaxvllm.server.protocol.fields import (
    FinishReason,
    Reply,
    SamplingFields,
    ScoringFields,
    Strings,
    Tokens,
    Usage,
    neutral,
)
from jaxvllm.server.protocol.logprobs import CompletionLogprobs, PromptLogprobList

MAX_PROMPTS = 1024  # in one request
# OpenAI's own default.
MAX_TOKENS = 16
type OnePrompt = str | list[int]
type Prompts = Annotated[list[Tokens], FailFast()]


class CompletionRequest(SamplingFields, ScoringFields):
    """A text to go on with, or several; token ids do as well."""

    prompt: str | Strings | Tokens | Prompts
    max_tokens: int | None = None  # None: 16, as OpenAI's
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None  # the prompt goes first; with max_tokens 0 it is all

    suffix: str | None = neutral("")
    best_of: int | None = neutral(1)

    @property
    def limit(self) -> int:
        """Tokens that the engine generates at most: one at least, which nobody sees when none is asked for."""
        if self.max_tokens is None:
            return MAX_TOKENS
        return 1 if self.echo and self.max_tokens == 0 else self.max_tokens

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Best tokens to report beside the prompt's."""
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in asked if count is not None), default=None)

    def prompts(self) -> list[OnePrompt]:
        """The prompts, one by one."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            prompt = [prompt]
        if not prompt:
            raise ValueError("prompt is empty: give at least one")
        if len(prompt) > MAX_PROMPTS:
            raise ValueError(f"prompt has {len(prompt)} prompts, and {MAX_PROMPTS} are the most: send several requests")
        return list(prompt)


class CompletionChoice(Reply):
    """One completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    prompt_token_ids: list[int] | None = None  # of a stream, in a choice's first chunk
    prompt_logprobs: PromptLogprobList | None = None
    token_ids: list[int] | None = None


class CompletionResponse(Reply):
    """All completions; in a stream, some of their text."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
