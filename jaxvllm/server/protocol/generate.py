"""The bodies of `/inference/v1/generate`, vLLM's endpoint of tokens in and tokens out."""

from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import Field

from jaxvllm.core.errors import ParameterError
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.engine.outputs import CompletionOutput
from jaxvllm.server.protocol.fields import (
    EngineFields,
    FinishReason,
    Reply,
    SamplingFields,
    StreamOptions,
    Tokens,
    Usage,
    neutral,
    params_of,
)
from jaxvllm.server.protocol.logprobs import ChatLogprobs, PromptLogprobList, chat_logprobs, token_id_logprobs
from jaxvllm.server.protocol.npy import write_npy


class GenerateSampling(SamplingFields):
    """vLLM's `SamplingParams` as JSON. What is left out has the default of `SamplingParams`, not the checkpoint's."""

    max_tokens: int | None = None  # None: all that fit the model
    logprobs: Annotated[int, Field(ge=-1)] | None = None  # up to the server's --max-logprobs; -1: the vocabulary
    prompt_logprobs: Annotated[int, Field(ge=-1)] | None = None  # best of each prompt token; -1: all; not in a stream
    detokenize: bool | None = None  # has no effect: output_mode says whether there is text
    output_kind: Any = None  # has no effect: a stream has what is new
    flat_logprobs: bool | None = None  # has no effect on the answer
    skip_clone: bool | None = None
    extra_args: dict[str, Any] | None = neutral({})


class GenerateRequest(EngineFields):
    """Tokens to continue."""

    token_ids: Annotated[Tokens, Field(min_length=1)]
    sampling_params: GenerateSampling
    model: str | None = None  # None: the served model
    request_id: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\w.:-]+$")] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None  # the answer has the prompt's tokens, too; a stream has them once
    output_mode: Literal["tokens", "text"] = "tokens"  # text: the answer has text, too, and log-probabilities have it
    token_offsets: Any = None  # has no effect
    features: Any = neutral()
    content_parts: list[Any] | None = neutral([])
    reasoning_ended: bool | None = neutral()
    reasoning_parser_kwargs: dict[str, Any] | None = neutral({})
    ec_transfer_params: dict[str, Any] | None = neutral({})

    def check(self) -> None:
        """Raises ParameterError for fields that contradict each other."""
        given = self.stream_options and self.stream_options.model_dump(exclude_defaults=True)
        if not self.stream and given:
            raise ParameterError("stream_options needs stream: true", "stream_options")
        if self.stream and self.sampling_params.prompt_logprobs is not None:
            raise ParameterError("prompt_logprobs needs stream: false", "sampling_params.prompt_logprobs")
        if self.sampling_params.use_beam_search:
            raise ParameterError("use_beam_search is an option of /v1/completions", "sampling_params.use_beam_search")

    def params(self, max_tokens: int | None) -> SamplingParams:
        """Returns the sampling parameters. Raises ValueError that names the wrong one."""
        sampling = self.sampling_params
        return params_of(
            SamplingParams(),
            sampling.chosen(),
            max_tokens=max_tokens,
            logprobs=sampling.logprobs,
            prompt_logprobs=sampling.prompt_logprobs,
            stream=bool(self.stream),
        )


class GenerateLogprob(Reply):
    """A token that could have been chosen."""

    token_id: int
    logprob: float
    rank: int | None


class GenerateTokenLogprob(GenerateLogprob):
    """A chosen token, and it again among those that it was chosen from."""

    top_logprobs: list[GenerateLogprob]


class GenerateLogprobs(Reply):
    """The log-probabilities of all tokens of a choice, or of a chunk of it."""

    content: list[GenerateTokenLogprob]


class GenerateVersionSpan(Reply):
    """The tokens from `start` to before `end` were sampled by weights of this version."""

    version: str
    start: int
    end: int


class GenerateChoice(Reply):
    """One completion. The token that ends it is the last of its tokens."""

    index: int
    text: str | None = None  # with output_mode text
    logprobs: GenerateLogprobs | ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    token_ids: list[int]
    # The experts that each token but the last has chosen, with --enable-return-routed-experts: base64 of a .npy file
    # with [tokens - 1, layers with experts, experts of a token]. A stream has it at the end of the choice.
    routed_experts: str | None = None
    weight_versions: list[GenerateVersionSpan] | None = None  # of all its tokens; a stream has them at its end


class GenerateResponse(Reply):
    """A response with all completions. An event of a stream has some of their tokens."""

    request_id: str
    output_mode: Literal["tokens", "text"]
    model: str | None = None
    created: int | None = None
    choices: list[GenerateChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobList | None = None
    kv_transfer_params: dict[str, Any] | None = None


def generate_choice(completion: CompletionOutput, body: GenerateRequest) -> dict[str, Any]:
    """Returns a `GenerateChoice` with what is new of a completion."""
    count = body.sampling_params.shown_logprobs(body.sampling_params.logprobs)
    if body.output_mode == "text":
        text: dict[str, Any] = {"text": completion.text}
        logprobs = chat_logprobs(completion, count, as_ids=False)
    else:
        text, logprobs = {}, token_id_logprobs(completion, count)
    experts, versions = completion.routed_experts, completion.weight_versions
    return text | {
        "index": completion.index,
        "logprobs": logprobs,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "token_ids": completion.token_ids,
        "routed_experts": None if experts is None else write_npy(experts),
        "weight_versions": None if versions is None else [asdict(span) for span in versions],
    }
