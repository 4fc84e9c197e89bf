"""The messages between an engine in its own process and its client: MessagePack by msgspec, never pickle."""

from typing import Any, Literal, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from jaxvllm.config import EngineConfig
from jaxvllm.core.pooler import Pooler
from jaxvllm.core.request import GenerationRequest
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.core.side_input import SideInputRules
from jaxvllm.engine.commands import AnyCommand
from jaxvllm.engine.outputs import CompletionOutput, FlatLogprobs, Logprob, RequestMetrics, RequestOutput
from jaxvllm.engine.stats import EngineStats, StepReport
from jaxvllm.worker.queue_limits import QueueLimits


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A message. Its class name comes first on the wire, so either side decodes it into the class that was sent."""


# ---- from the client ----


class Start(Message, frozen=True):
    """The first message: the engine to build, and how many requests may wait in it."""

    config: EngineConfig
    limits: QueueLimits


class Add(Message, frozen=True):
    """Queues a checked request. The engine answers with `Accepted` or `Rejected`, and then with `Outputs`.

    Answers have the request's unique `serial`, because its id may be used again while they are still in transit.
    """

    serial: int
    request: GenerationRequest


class Abort(Message, frozen=True):
    """Ends requests. Unknown ones are ignored, because they have just ended."""

    request_ids: list[str]


class Ping(Message, frozen=True):
    """Asks for a `Pulse`, which the engine sends between two steps and which shows that it is not stuck."""


class Ask(Message, frozen=True):
    """Makes the engine do something beside requests. It answers with a `CommandAnswer` of the same number."""

    number: int
    command: AnyCommand


class Stop(Message, frozen=True):
    """Closes the engine and ends the process."""


class CountHttp(Message, frozen=True):
    """Tells what an API process has answered over HTTP so far, for the metrics of all API processes together.

    An API process sends it to the process that holds the engines. Engines never get it.
    """

    answers: list[tuple[str, str, int]]  # path, status, and how many
    num_streams: int  # that are open


class ShowMetrics(Message, frozen=True):
    """Asks the process that holds the engines for `MetricsText`. Engines never get it."""


type Command = Start | Add | Abort | Ping | Ask | Stop | CountHttp | ShowMetrics

# ---- from the engine ----


class EngineFacts(msgspec.Struct, frozen=True):
    """The facts about an engine and its model that a client needs, for example to read prompts."""

    tokenizer_directory: str | None  # None: prompts and outputs are only token ids
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    default_params: SamplingParams  # the checkpoint's recommendation
    num_replicas: int
    num_pages: int  # pages that requests may own, in all replicas together
    page_size: int
    max_num_seqs: int  # in all replicas together
    default_max_tokens: int | None = None  # of a request without a limit of its own
    most_tokens: int | None = None  # that any request may generate
    pooler: Pooler | None = None  # None: prompts cannot be pooled
    side_inputs: SideInputRules | None = None  # None: prompts have none


class Ready(Message, frozen=True):
    """Says that the engine takes requests."""

    facts: EngineFacts


class Failed(Message, frozen=True):
    """Says that the engine cannot be built. With `usage`, the reason is a wrong option."""

    reason: str
    usage: bool


class Follows(Message, frozen=True):
    """Says that the process is one of several and not process 0, so that it will take no requests."""


class FollowerEnded(Message, frozen=True):
    """Says that the process was one of several and not process 0, and that process 0 has closed its engine."""


class Accepted(Message, frozen=True):
    """Says that a request is queued."""

    serial: int
    warnings: list[str] = []  # what it asked for and cannot be enforced


class Rejected(Message, frozen=True):
    """Says that a request breaks a rule that only the engine could check, or that too many wait (`overloaded`)."""

    serial: int
    reason: str
    overloaded: bool
    param: str | None = None  # the parameter that is wrong


class Output(msgspec.Struct, frozen=True, array_like=True):
    """A `RequestOutput` without its id and its prompt, which the client knows already."""

    serial: int
    completions: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int
    prompt_logprobs: list[dict[int, Logprob] | None] | FlatLogprobs | None = None  # only in a request's first output
    warnings: list[str] = []
    kv_transfer_params: dict[str, Any] | None = None
    pooled: bytes | None = None  # f32[dimensions], little-endian

    @classmethod
    def of(cls, serial: int, output: RequestOutput, scores: Any) -> Self:
        """Returns `output` for the wire, with these `scores` of its prompt."""
        assert output.metrics is not None
        return cls(
            serial,
            output.outputs,
            output.finished,
            output.metrics,
            output.num_cached_tokens,
            scores,
            output.warnings,
            None if output.kv_transfer_params is None else dict(output.kv_transfer_params),
            None if output.pooled is None else output.pooled.astype("<f4").tobytes(),
        )


class Outputs(Message, frozen=True):
    """Contains the outputs of a step."""

    outputs: list[Output]


class Broken(Message, frozen=True):
    """Says that a step broke off and ended every request. The engine continues."""

    reason: str


class Pulse(Message, frozen=True):
    """Contains the engine's counters, and the steps since the last pulse."""

    stats: EngineStats
    steps: list[StepReport]
    started: list[int] = []  # serials of requests that have had their first token since the last pulse, and go on


AnswerKind = Literal["wrong", "unsupported", "unavailable", "died"]


class CommandAnswer(Message, frozen=True):
    """Contains the answer of a command, in its own encoding, or the reason why there is none."""

    number: int
    answer: bytes = b""
    reason: str | None = None
    # What kind of error the reason is: one of the caller's, or of something that this engine cannot do, or that there
    # was no engine, or that it died meanwhile.
    kind: AnswerKind | None = None

    @classmethod
    def of(cls, number: int, answer: Any) -> Self:
        """Returns the message for what a command has answered."""
        return cls(number, encode(answer))


class Lost(Message, frozen=True):
    """Says that a request has ended without its last output, or that no engine was there to take it (`unavailable`).

    An engine says it of a request at which something failed that no rule foresees, such as one that cannot be decoded.
    """

    serial: int
    reason: str
    unavailable: bool = False


class Away(Message, frozen=True):
    """Says that there is no engine, until the next `Ready`. It comes from the process that holds the engines."""

    reason: str


class MetricsText(Message, frozen=True):
    """Contains what Prometheus reads, and its content type."""

    body: bytes
    kind: str


type Report = (
    Ready
    | Failed
    | Follows
    | FollowerEnded
    | Accepted
    | Rejected
    | Outputs
    | Broken
    | Pulse
    | CommandAnswer
    | Lost
    | Away
    | MetricsText
)


def _encode_array(array: NDArray[Any]) -> memoryview | tuple[str, tuple[int, ...], bytes]:
    """Returns the memory of token ids as it is, and that of other arrays with their dtype and shape.

    The other side can read token ids because it is on the same host.
    """
    if array.dtype == np.int32:
        return array.data
    return array.dtype.str, array.shape, array.tobytes()


def _decode_array(_: Any, data: bytes | list[Any]) -> NDArray[Any]:
    if isinstance(data, bytes):
        return np.frombuffer(data, np.int32)
    dtype, shape, values = data
    return np.frombuffer(values, dtype).reshape(shape)


class _AddHead(Message, frozen=True, tag="Add"):
    """The beginning of an `Add`."""

    serial: int


encode = msgspec.msgpack.Encoder(enc_hook=_encode_array).encode
_command_decoder = msgspec.msgpack.Decoder(Command, dec_hook=_decode_array)


def decode_command(data: bytes) -> Command:
    """Returns the command that `encode` converted to these bytes. Raises msgspec.DecodeError for any other bytes."""
    try:
        command: Command = _command_decoder.decode(data)
    except UnicodeDecodeError as error:  # raised when the bytes of the class name are no text
        raise msgspec.DecodeError(str(error)) from error
    return command


def serial_of_add(data: bytes) -> int | None:
    """Returns the serial of an `Add`, also of one whose request cannot be decoded. None for any other bytes."""
    try:
        return msgspec.msgpack.decode(data, type=_AddHead).serial
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


decode_report = msgspec.msgpack.Decoder(Report, dec_hook=_decode_array).decode
