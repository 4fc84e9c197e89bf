"""`/v1/completions`, as OpenAI's and vLLM's clients know it."""

from typing import Annotated, Any, Literal

from pydantic import FailFast, Field

from jaxvllm.core.errors import ParameterError
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
    max_tokens: int | None = None  # None: 16, as OpenAI's; 0, with echo or prompt_logprobs: the prompt is scored alone
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None  # the prompt goes first; with max_tokens 0 it is all

    suffix: str | None = neutral("")
    best_of: int | None = neutral(1)

    @property
    def limit(self) -> int:
        """Tokens to generate at most."""
        return MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Best tokens to compute beside the prompt's; the engine scores a prompt whenever nothing is generated."""
        echoed = self.logprobs if self.logprobs is not None or self.max_tokens != 0 else 0
        asked = [self.prompt_logprobs, echoed if self.echo else None]
        return max((count for count in asked if count is not None), default=None)

    def prompts(self) -> list[OnePrompt]:
        """The prompts, one by one."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            prompt = [prompt]
        if not prompt:
            raise ParameterError("prompt is empty: give at least one", "prompt")
        if len(prompt) > MAX_PROMPTS:
            raise ParameterError(
                f"prompt has {len(prompt)} prompts, and {MAX_PROMPTS} are the most: send several requests", "prompt"
            )
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
    service_tier: None  # there is one for all
    system_fingerprint: str  # of the software's version, the model, its mesh and its dtypes
    choices: list[CompletionChoice]
    usage: Usage | None = None
