"""What an engine in a process of its own and its client tell each other: MessagePack by msgspec, never pickle."""

import msgspec

from jaxvllm.config import EngineConfig
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.engine.admission import QueueLimits
from jaxvllm.engine.outputs import CompletionOutput, Logprob, RequestMetrics
from jaxvllm.engine.page_view import PoolView
from jaxvllm.engine.stats import EngineStats, StepReport


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One message. Its class goes first on the wire, so either side decodes it into the class that was sent."""


# ---- from the client ----


class Start(Message, frozen=True):
    """The first one: what to build, and how many requests may wait in it."""

    config: EngineConfig
    limits: QueueLimits


class Add(Message, frozen=True):
    """A request whose prompt was checked. Answered by `Accepted` or `Rejected`, then by `Outputs`.

    Answers carry its `serial`, which no other has: its id may be used again while they are on their way.
    """

    serial: int
    request_id: str
    token_ids: list[int]
    params: SamplingParams
    priority: int
    cache_salt: str | None


class Abort(Message, frozen=True):
    """Ends requests; unknown ones, which have just ended, are ignored."""

    request_ids: list[str]


class Ping(Message, frozen=True):
    """Answered by `Pulse`, between two steps: the engine is alive and not stuck."""


class ShowPages(Message, frozen=True):
    """Answered by `Pages`."""


class ResetPrefixCache(Message, frozen=True):
    """Forgets every cached prefix. Answered by `PrefixCacheReset`."""


class Stop(Message, frozen=True):
    """Closes the engine and ends the process."""


type Command = Start | Add | Abort | Ping | ShowPages | ResetPrefixCache | Stop

# ---- from the engine ----


class EngineFacts(msgspec.Struct, frozen=True):
    """What a client must know about a model to read prompts for it."""

    tokenizer_directory: str | None  # None: token ids alone go in and out
    vocab_size: int
    max_model_len: int
    default_params: SamplingParams  # the checkpoint's recommendation
    num_replicas: int
    num_pages: int  # that requests may own, of all replicas
    page_size: int
    max_num_seqs: int  # of all replicas


class Ready(Message, frozen=True):
    """The engine takes requests."""

    facts: EngineFacts


class Failed(Message, frozen=True):
    """The engine cannot be built. `usage`: what it was given is wrong."""

    reason: str
    usage: bool


class Followed(Message, frozen=True):
    """The process was one of several and not the first: it computed for process 0 until that closed its engine."""


class Accepted(Message, frozen=True):
    """A request is queued."""

    serial: int


class Rejected(Message, frozen=True):
    """A request breaks a rule that only the engine could check, or too many wait (`overloaded`)."""

    serial: int
    reason: str
    overloaded: bool
    param: str | None = None  # the parameter that is wrong


class Output(msgspec.Struct, frozen=True, array_like=True):
    """A `RequestOutput` without what the client knows already: its id and the prompt."""

    serial: int
    completions: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # of a request's first output only


class Outputs(Message, frozen=True):
    """What a step brought."""

    outputs: list[Output]


class Broken(Message, frozen=True):
    """A step broke off. Every request has ended with it; the engine goes on."""

    reason: str


class Pulse(Message, frozen=True):
    """The engine's counters, and the steps since the last pulse."""

    stats: EngineStats
    steps: list[StepReport]


class Pages(Message, frozen=True):
    """The page pools, one a replica."""

    pools: list[PoolView]


class PrefixCacheReset(Message, frozen=True):
    """No prefix that was cached before can be found any more, in any replica. Answers come in the order of commands."""


type Report = Ready | Failed | Followed | Accepted | Rejected | Outputs | Broken | Pulse | Pages | PrefixCacheReset

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
