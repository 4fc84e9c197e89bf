"""`/v1/completions`, as OpenAI's and vLLM's clients know it."""

from typing import Annotated, Any, Literal

from pydantic import Field

from jaxvllm.engine.outputs import CompletionOutput, RequestOutput
from jaxvllm.server.protocol.fields import FinishReason, Reply, RequestFields, SamplingFields, Usage, neutral
from jaxvllm.server.protocol.logprobs import CompletionLogprobs, completion_logprobs

MAX_PROMPTS = 1024  # in one request
type OnePrompt = str | list[int]


class CompletionRequest(SamplingFields, RequestFields):
    """A text to go on with, or several; token ids do as well."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = None  # None: 16, as OpenAI's
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None

    suffix: neutral(str, "") = None  # type: ignore[valid-type]
    best_of: neutral(int, 1) = None  # type: ignore[valid-type]

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
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class CompletionResponse(Reply):
    """All completions; in a stream, some of their text."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


def choice(
    request: CompletionRequest, index: int, output: RequestOutput, completion: CompletionOutput, offset: int
) -> dict[str, Any]:
    """`CompletionChoice` of what is new, whose text begins `offset` characters into its choice."""
    made = {
        "index": index,
        "text": completion.text,
        "logprobs": completion_logprobs(completion, request.logprobs or 0, request.return_tokens_as_token_ids, offset),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if request.return_token_ids:
        made |= {"prompt_token_ids": output.prompt_token_ids, "token_ids": completion.token_ids}
    return made
