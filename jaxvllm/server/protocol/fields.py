"""Fields that the requests and responses of several endpoints have in common."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import islice
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, FailFast, Field

from jaxvllm.core.beam import BeamSearchParams
from jaxvllm.core.errors import ParameterError
from jaxvllm.core.request import GenerationRequest, Prompt
from jaxvllm.core.sampling_params import RequestOutputKind, SamplingParams
from jaxvllm.core.value_checks import MAX_INT32
from jaxvllm.engine.outputs import CompletionOutput, RequestOutput
from jaxvllm.server.errors import UNKNOWN_TYPE
from jaxvllm.text.chat_messages import RESERVED_VARIABLES

# The count of log-probabilities for the whole vocabulary.
ALL_LOGPROBS = -1


class Strict(BaseModel):
    """The base of all request bodies. An unknown field is an error, and no value is converted: "1" is no number."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Reply(BaseModel):
    """The base of all response bodies."""

    model_config = ConfigDict(extra="forbid")


# The description of an unsupported field begins with these words, and goes on with the values that it may have.
NOT_SUPPORTED = "not supported"


def _neutral(*values: Any) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if value is not None and value not in values:
            # Only the part that is shown is encoded, because the value may have a million items.
            shown = "".join(islice(json.JSONEncoder().iterencode(value), 61))
            raise ValueError(f"{shown if len(shown) <= 60 else shown[:57] + '...'} is not supported: leave it out")
        return value

    return check


def neutral(*values: Any) -> Any:
    """Declares a field that is not supported. Clients may send it with `values`, which change nothing."""
    told = f"{NOT_SUPPORTED}: {' or '.join(map(json.dumps, (None, *values)))}"
    field: Any = Field(default=None, description=told, examples=[None])
    field.metadata.append(AfterValidator(_neutral(*values)))
    return field


def by_type(*kinds: str, default: str | None = None, others: Mapping[str, str] | None = None) -> Discriminator:
    """Returns the discriminator of a union of objects by their `type`. Its members have tags such as `<message>`.

    An object without a type has the type `default`. `others` are further types, each with the name of its tag.
    """

    def tag(value: Any) -> str | None:
        if not isinstance(value, dict | BaseModel):
            return f"<{kinds[0]}>"  # which says that the value is no object
        kind = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", default)
        return f"<{(others or {}).get(kind, kind)}>" if isinstance(kind, str) else None

    told = f"Input should be {' or '.join(map(repr, (*kinds, *(others or ()))))}"
    return Discriminator(tag, custom_error_type=UNKNOWN_TYPE, custom_error_message=told)


# The most messages of a conversation: rendering 50,000 keeps all other requests waiting for half a second.
MAX_MESSAGES = 10_000


def _template_variables(variables: dict[str, Any]) -> dict[str, Any]:
    for name in RESERVED_VARIABLES:
        if name in variables:
            raise ValueError(f"{name} cannot be set as a template's variable: use the field of the request")
    return variables


# Clients' lists may have millions of items, and without FailFast each wrong item would be an error with a location:
# 1.5 MB of them took 9.5 s and 1.8 GB.
type Strings = Annotated[list[str], FailFast()]
type Tokens = Annotated[list[int], FailFast()]
type Messages = Annotated[
    list[dict[str, Any]],
    FailFast(),
    Field(min_length=1, max_length=MAX_MESSAGES, examples=[[{"role": "user", "content": "Hello"}]]),
]

type TemplateVariables = Annotated[dict[str, Any], AfterValidator(_template_variables)]


# The most tokens to generate, in a field that is not called max_tokens. It is checked here, so that an error names the
# field that was given.
type Limit = Annotated[int, Field(ge=1, le=MAX_INT32)]


type ShortString = Annotated[str, Field(max_length=1024)]

# How much a model that reasons should do of it, for templates that know such a variable.
type ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def effort_variables(effort: ReasoningEffort | None) -> dict[str, Any]:
    """Returns the variables that tell a chat template how much the model should reason."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})


# OpenAI's tiers. All requests have the same one here.
type ServiceTier = Literal["auto", "default", "flex", "scale", "priority"]

# JSON has integers of any length, but the messages to the engine do not.
type Priority = Annotated[int, Field(ge=-MAX_INT32, le=MAX_INT32)]


class StreamOptions(Strict):
    """The information that a stream contains in addition to its text."""

    include_usage: bool = False  # send the usage in a last chunk without choices
    continuous_usage_stats: bool = False  # send the usage in every chunk; only with include_usage
    include_draft_spans: bool = False  # choices have `draft_spans`: what guesses wrote of the text
    include_obfuscation: bool | None = None  # has no effect: no chunk is padded

    @property
    def usage_in_chunks(self) -> bool:
        """Whether every chunk has the usage so far."""
        return self.include_usage and self.continuous_usage_stats


class SamplingFields(Strict):
    """The fields that say how to draw tokens: OpenAI's and vLLM's."""

    n: int | None = None
    best_of: int | None = None  # completions to generate; the n that are most likely as a whole come back, unstreamed
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Strings | None = None
    stop_token_ids: Tokens | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None

    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: Tokens | None = None
    bad_words: Strings | None = None
    structured_outputs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    repetition_detection: dict[str, int] | None = None
    logprob_token_ids: Tokens | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = neutral("left")  # the last tokens are kept
    skip_reading_prefix_cache: bool | None = None
    stream_interval: int | None = None

    use_beam_search: bool | None = None  # the n most likely answers that n beams find; a stream of it has one chunk
    length_penalty: float | None = None  # of beam search: above 0 favors long answers, below 0 short ones; 1 by default
    # Of beam search. true: it ends when n answers are complete; "never" is the same as false.
    early_stopping: bool | Literal["never"] | None = None
    logits_processors: list[Any] | None = neutral([])

    def shown_logprobs(self, count: int | None) -> int:
        """Returns how many log-probabilities to show of each token if the client wants `count`; all that it named."""
        return (count or 0) if self.logprob_token_ids is None else ALL_LOGPROBS

    def chosen(self) -> dict[str, Any]:
        """Returns the fields of `SamplingParams` that the client set."""
        return {name: value for name in _PARAMS if (value := getattr(self, name)) is not None}

    def beams(self, params: SamplingParams, max_tokens: int) -> BeamSearchParams | None:
        """Returns the parameters of the beam search that the client asks for, if it asks for one.

        `params` are those of the request without it. Raises ValueError for a field that a beam search does not have.
        """
        if not self.use_beam_search:
            for name, neutral_values in (("length_penalty", (None, 1.0)), ("early_stopping", (None, False, "never"))):
                if (value := getattr(self, name)) not in neutral_values:
                    raise ParameterError(f"{name} {value} needs use_beam_search: true", name)
            return None
        if params.prompt_logprobs is not None:
            raise ParameterError("prompt_logprobs cannot be had of a beam search: leave it out", "prompt_logprobs")
        if params.structured_outputs is not None:  # of response_format or tool_choice, too
            raise ParameterError(
                "structured outputs cannot be had of a beam search: leave one of them out", "use_beam_search"
            )
        for field in fields(SamplingParams):
            if field.name in self.chosen().keys() - _OF_BEAMS and getattr(params, field.name) != field.default:
                raise ParameterError(f"{field.name} has no meaning for a beam search: leave it out", field.name)
        return BeamSearchParams(
            beam_width=params.n,
            max_tokens=max_tokens,
            ignore_eos=params.ignore_eos,
            temperature=params.temperature,
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
            include_stop_str_in_output=params.include_stop_str_in_output,
            early_stopping=self.early_stopping or False,
        )


# The fields that have the same name in `SamplingParams`.
_PARAMS = tuple(field.name for field in fields(SamplingParams) if field.name in SamplingFields.model_fields)


# Those of them that a beam search has too, and the seed, which many clients always send.
_OF_BEAMS = frozenset(
    (
        "n",
        "temperature",
        "ignore_eos",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "truncate_prompt_tokens",
        "skip_reading_prefix_cache",
        "stream_interval",
        "seed",
    )
)


def as_prompts(given: Any, field: str, most: int) -> list[str | list[int]]:
    """Returns one text, its tokens, or several of either as a list. Raises ParameterError for none and for too many."""
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not given:
        raise ParameterError(f"{field} is an empty list: give at least one prompt", field)
    if len(given) > most:
        raise ParameterError(f"{field} has {len(given)} prompts, and {most} are the most: send several requests", field)
    return list(given)


class KVTransferParams(BaseModel):
    """Parameters that proxies between engines add, or pass on from the first answer.

    Fields of other engines are ignored.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    do_remote_decode: bool | None = None  # compute the prompt; the answer says where its KV can be fetched
    do_remote_prefill: bool | None = None  # fetch the KV of the prompt from where the other fields say
    remote_engine_id: ShortString | None = None
    remote_request_id: ShortString | None = None
    remote_host: ShortString | None = None
    remote_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    remote_num_tokens: Annotated[int, Field(ge=0, le=MAX_INT32)] | None = None
    remote_prompt: ShortString | None = None
    remote_expires: Annotated[int, Field(ge=0, le=1 << 53)] | None = None
    signature: ShortString | None = None
    # The prompt as the engine that computed it has tokenized it. It replaces the text, unless that is echoed.
    prompt_token_ids: Annotated[Tokens, Field(min_length=1)] | None = None


class EngineFields(Strict):
    """The fields for the engine beside the prompt and the sampling. Every endpoint has them."""

    priority: Priority = 0  # lower values run first, if the engine has scheduling_policy="priority"
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None  # equal salts share cached prefixes
    kv_transfer_params: KVTransferParams | None = None  # of a prompt that one engine computes for another
    # Equal in all requests of a conversation, which routing by session keeps together; None: the header X-Session-ID.
    session_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None

    @property
    def forwarded_prompt(self) -> list[int] | None:
        """The tokens of the prompt that a proxy has passed on, if any."""
        return None if self.kv_transfer_params is None else self.kv_transfer_params.prompt_token_ids

    def request(
        self,
        request_id: str,
        answer_id: str,
        prompt: Prompt,
        params: SamplingParams,
        beams: BeamSearchParams | None = None,
        wants_draft_spans: bool = False,
        wants_explanation: bool = False,
    ) -> GenerationRequest:
        """Makes the engine's request for one prompt of this HTTP request, which gets the answer `answer_id`."""
        salted = replace(prompt, cache_salt=self.cache_salt)
        transfer = None
        if self.kv_transfer_params is not None:
            transfer = self.kv_transfer_params.model_dump(exclude_none=True, exclude={"prompt_token_ids"})
            if not transfer and self.kv_transfer_params.prompt_token_ids is not None:
                transfer = None
        if beams is not None:
            params = beams.sampling_params(params)
        return GenerationRequest(
            request_id,
            salted,
            params,
            self.priority,
            beams,
            transfer,
            wants_draft_spans,
            session_id=self.session_id,
            wants_explanation=wants_explanation,
            answer_id=answer_id,
        )


class RequestFields(Strict):
    """The fields that do not depend on the kind of prompt."""

    model: str | None = None  # None: the served model
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Fields for the client's own use, or for what other servers do with a request: they have no effect.
    user: Any = None
    metadata: Any = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    chat_id: str | None = None
    num_ctx: int | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\w.:-]+$")] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False  # write tokens in logprobs as "token_id:17" instead of their text
    add_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = neutral({"type": "text"})
    service_tier: ServiceTier | None = None  # has no effect: there is one tier
    vllm_xargs: dict[str, Any] | None = neutral({})

    @property
    def streaming(self) -> StreamOptions:
        """The options of a stream, which a request may leave out."""
        return self.stream_options or StreamOptions()

    def check_stream(self) -> None:
        """Raises ValueError for a field that needs a stream when there is none, or that a stream cannot have."""
        if not self.stream and self.stream_options and self.stream_options.model_dump(exclude_defaults=True):
            raise ParameterError("stream_options needs stream: true", "stream_options")


class CompletionFields(RequestFields):
    """The fields of a request that may also score its prompt, and have its answer explained."""

    prompt_logprobs: Annotated[int, Field(ge=-1)] | None = None  # best of each prompt token; -1: all; not in a stream
    explain: bool = False  # each choice ends with `explanation`: what each step of the engine did for it

    def check_stream(self) -> None:
        super().check_stream()
        if self.stream and self.prompt_logprobs is not None:
            raise ParameterError("prompt_logprobs needs stream: false", "prompt_logprobs")


def transfer_params_of(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Returns the field `kv_transfer_params` of an answer, which is null if no other engine is to go on from it."""
    found = next((output.kv_transfer_params for output in outputs if output.kv_transfer_params), None)
    return {"kv_transfer_params": found}


class DraftSpan(Reply):
    """A part of the text that the model wrote."""

    text: str
    accepted: bool  # whether all tokens that spell it were drafts of speculative decoding, which were accepted


def draft_spans_of(completion: CompletionOutput) -> dict[str, Any]:
    """Returns the field `draft_spans` of a choice, or none if the request does not want it."""
    if completion.draft_spans is None:
        return {}
    return {"draft_spans": [{"text": text, "accepted": accepted} for text, accepted in completion.draft_spans]}


def explanation_of(completion: CompletionOutput) -> dict[str, Any]:
    """Returns the field `explanation` of a choice that has ended, or none if the request does not want it."""
    return {} if completion.explanation is None else {"explanation": completion.explanation}


class PromptTokensDetails(Reply):
    """Details about the prompt's tokens."""

    cached_tokens: int  # tokens that were found in the prefix cache


class CompletionTokensDetails(Reply):
    """Details about the answer's tokens."""

    reasoning_tokens: int  # tokens of the reasoning, without its marks


class Usage(Reply):
    """The number of tokens of one response."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None  # only with --reasoning-parser


def usage(num_prompt: int, num_output: int, num_cached: int, num_reasoning: int | None = None) -> dict[str, Any]:
    """Returns a `Usage` as it is encoded."""
    details = {} if num_reasoning is None else {"completion_tokens_details": {"reasoning_tokens": num_reasoning}}
    return details | {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def usage_of(outputs: list[RequestOutput], num_reasoning: int | None = None) -> dict[str, Any]:
    """Returns the usage of the finished requests that one response answers."""
    return usage(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(len(completion.token_ids) for output in outputs for completion in output.outputs),
        sum(output.num_cached_tokens for output in outputs),
        num_reasoning,
    )


def params_of(
    defaults: SamplingParams,
    chosen: dict[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    stream: bool,
) -> SamplingParams:
    """Returns the sampling parameters of a request. Raises ValueError that names the wrong field."""
    return replace(
        defaults,
        **chosen,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
    )


def new_id(prefix: str) -> str:
    """Returns a new unique id."""
    return f"{prefix}{uuid4().hex}"


def now() -> int:
    """Returns the Unix time in seconds, as for the field `created`."""
    return int(time.time())


type FinishReason = Literal["stop", "length", "repetition", "abort"]
# The names of functions and the most of them in one request.
type FunctionName = Annotated[str, Field(min_length=1, max_length=256)]
MAX_TOOLS = 1024
