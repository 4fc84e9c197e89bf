"""The bodies of `/v1/completions`, compatible with OpenAI's and vLLM's clients."""

from typing import Annotated, Any, Literal

from pydantic import FailFast, Field

from jaxvllm.core.errors import ParameterError
from jaxvllm.core.explanation import Explanation
from jaxvllm.server.protocol.fields import (
    ALL_LOGPROBS,
    CompletionFields,
    DraftSpan,
    EngineFields,
    FinishReason,
    Reply,
    SamplingFields,
    Strings,
    Tokens,
    Usage,
    as_prompts,
    neutral,
)
from jaxvllm.server.protocol.logprobs import CompletionLogprobs, PromptLogprobList
from jaxvllm.server.protocol.request_times import RequestTimes
from jaxvllm.server.protocol.response_format import ResponseFormat, one_form

MAX_PROMPTS = 1024  # in one request
# OpenAI's own default.
MAX_TOKENS = 16
type OnePrompt = str | list[int]
type Prompts = Annotated[list[Tokens], FailFast()]


class CompletionRequest(EngineFields, SamplingFields, CompletionFields):
    """A text to continue, or several, each as text or as token ids."""

    prompt: str | Strings | Tokens | Prompts | None = None  # required, but beside prompt_embeds, where "" is none
    prompt_embeds: str | Strings | None = None  # base64 of .npy files with floats [N, hidden size], each a prompt
    max_tokens: int | None = None  # None: 16, as OpenAI's; 0, with echo or prompt_logprobs: only score the prompt
    logprobs: Annotated[int, Field(ge=-1)] | None = None  # up to the server's --max-logprobs; -1: the vocabulary
    echo: bool | None = None  # begin the answer with the prompt; with max_tokens 0 the answer is only the prompt

    response_format: ResponseFormat | None = None  # type: ignore[assignment]

    suffix: str | None = neutral("")

    @property
    def limit(self) -> int:
        """The most tokens to generate."""
        return MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The number of best tokens to compute beside each of the prompt's, or None not to score the prompt.

        It is never None when an echoing request generates nothing, or tells log-probabilities of its own choice: such a
        request has to score its prompt.
        """
        is_scored = self.max_tokens == 0 or self.logprob_token_ids is not None
        echoed = self.logprobs if self.logprobs is not None or not is_scored else 0
        asked = [self.prompt_logprobs, echoed if self.echo else None]
        counts = [count for count in asked if count is not None]
        return ALL_LOGPROBS if ALL_LOGPROBS in counts else max(counts, default=None)

    @property
    def form_field(self) -> str:
        """The field that says which form the answer must have."""
        return "response_format" if self.structured_outputs is None else "structured_outputs"

    def chosen(self) -> dict[str, Any]:
        """Returns the fields of `SamplingParams` that the client set. Raises ParameterError for contradictions."""
        asked = None if self.response_format is None else self.response_format.structured_outputs()
        form = one_form(response_format=asked, structured_outputs=self.structured_outputs)
        return super().chosen() | ({} if form is None else {"structured_outputs": form})

    def prompts(self) -> list[OnePrompt]:
        """Returns the prompts of text or tokens as a list, even if there is only one."""
        if self.embeds and not self.prompt:
            return []
        if self.prompt is None:
            raise ParameterError("prompt is missing: give a text, token ids, or prompt_embeds", "prompt")
        return as_prompts(self.prompt, "prompt", MAX_PROMPTS - len(self.embeds))

    @property
    def embeds(self) -> list[str]:
        """The prompts of embeddings."""
        given = self.prompt_embeds
        return [given] if isinstance(given, str) else list(given or ())


class CompletionChoice(Reply):
    """One completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    prompt_token_ids: list[int] | None = None  # in a stream, only in a choice's first chunk
    prompt_logprobs: PromptLogprobList | None = None
    token_ids: list[int] | None = None
    draft_spans: list[DraftSpan] | None = None  # of this chunk's text, without an echoed prompt
    explanation: Explanation | None = None  # at the end, if the request has `explain`


class CompletionResponse(Reply):
    """A response with all completions. An event of a stream has some of their text."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    service_tier: Literal["default"] | None  # null unless the request has the field
    system_fingerprint: str  # a hash of the software's version, the model, its mesh and its dtypes
    choices: list[CompletionChoice]
    usage: Usage | None = None
    kv_transfer_params: dict[str, Any] | None = None  # for the engine that goes on from this request's KV
    metrics: RequestTimes | None = None  # of one completion, with --enable-per-request-metrics
