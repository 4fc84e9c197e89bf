"""`Explanation`: what the engine did for one completion, step by step, as plain values that travel and become JSON.

It tells the steps that really ran. It counts the other requests in these steps, and never has their tokens or ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

# The steps that one completion keeps. Of a longer one the first are told, and how many more there were. A step takes
# about 1 KB, so that a request that asks for its explanation costs the engine at most half a megabyte more.
MAX_STEPS = 512
MAX_CANDIDATES = 20  # of a token, beside itself

# forced: a grammar left no choice, so the model was not asked. imported: another engine generated it.
type Origin = Literal["sampled", "draft", "forced", "imported"]
type StepKind = Literal["prefill", "decode", "forced"]


@dataclass(frozen=True)
class TokenCandidate:
    """A token that could have come, with its natural log-probability before temperature and filters."""

    token_id: int
    text: str | None  # None: the engine has no tokenizer
    logprob: float
    rank: int | None = None  # 1 = the most probable


@dataclass(frozen=True)
class PromptToken:
    """A token of the prompt."""

    token_id: int
    text: str | None


@dataclass(frozen=True)
class OutputToken:
    """A token of the completion, and what else could have come in its place."""

    token_id: int
    text: str | None
    origin: Origin
    candidates: tuple[TokenCandidate, ...] = ()  # the token itself first, then the best ones; none without logprobs


@dataclass(frozen=True)
class WholeStep:
    """The whole step that a row was a part of."""

    replica: int
    number: int  # of the replica's steps, from 0; one program of several decode steps has one number
    num_rows: int
    num_decode_rows: int
    num_tokens: int  # that the model computed at once: one of each decoding row, and the chunks
    bucket_tokens: int  # the size that the program was compiled for; the rest is padding
    bucket_rows: int
    device_seconds: float
    host_seconds: float  # to plan and dispatch it

    @property
    def num_padding(self) -> int:
        """Tokens that were computed for nothing."""
        return self.bucket_tokens - self.num_tokens


@dataclass(frozen=True)
class Admitted:
    """The slot and the pages that a request got when it left the queue."""

    slot: int
    pages: tuple[int, ...]  # its page table
    num_cached_tokens: int  # leading tokens whose KV the first of these pages had already
    num_preemptions: int  # how often it had lost its slot before


@dataclass(frozen=True)
class KVWrite:
    """Keys and values that a step wrote to neighbouring places of the pool.

    The place of a position is `page_table[position // page_size] * page_size + position % page_size`.
    """

    first_position: int
    num_tokens: int
    first_place: int


@dataclass(frozen=True)
class Decode:
    """One decode step of a row: its query is the last known token, whatever drafts stand after it."""

    position: int  # of that token
    kv_length: int  # the tokens that it attends to, itself included
    num_tokens: int  # that came out: accepted drafts, then a sampled one
    num_accepted: int


@dataclass(frozen=True)
class ExplainedStep:
    """One step of the request's life.

    A `prefill` step computes a chunk of the prompt (or of all tokens so far, after a preemption), a `forced` one the
    tokens that a grammar forced, or again the last token before a wrong guess. A `decode` step computes one token, or
    several decode steps in one program.
    """

    kind: StepKind
    batch: WholeStep
    slot: int
    start: int  # position of the first token that was computed
    query_length: int  # tokens that were computed: of a decode step, one for each that came out, and at least one
    kv_length: int  # tokens that the last of them attends to, itself included
    first_column: int  # of the page table, where the new pages went
    new_pages: tuple[int, ...]
    writes: tuple[KVWrite, ...]
    first_output: int  # index of the first output token that this step made known
    num_tokens: int  # so many output tokens
    admitted: Admitted | None = None  # in the step with which the request got its slot
    decodes: tuple[Decode, ...] = ()
    num_drafted: int = 0
    num_accepted: int = 0
    num_allowed: int | None = None  # tokens of the vocabulary that the grammar's mask left; None: there was no mask
    num_refused: int = 0  # tokens that were sampled without a mask, and that the grammar then refused
    # Its output was ignored: meanwhile the row had been preempted, or sent back, or a grammar had forced other tokens.
    # In the last case the keys and values of the last known token stay, and `writes` has them.
    is_dropped: bool = False


@dataclass(frozen=True)
class Explanation:
    """The story of one completion of a request, from its prompt's tokens to its end."""

    request_id: str
    prompt: tuple[PromptToken, ...]
    tokens: tuple[OutputToken, ...]
    steps: tuple[ExplainedStep, ...]  # the first `MAX_STEPS`
    num_steps_left_out: int
    page_size: int  # tokens
    num_groups: int  # groups of layers with page tables of their own; the pages told are those of the first
    vocab_size: int
    finish_reason: str | None
    stop_reason: int | str | None
    queued_seconds: float | None  # from its arrival to the first step
    first_token_seconds: float | None
    total_seconds: float | None

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that the prefix cache had when the request first left the queue."""
        return self.steps[0].admitted.num_cached_tokens if self.steps and self.steps[0].admitted else 0


@dataclass
class Trail:
    """The steps of a request so far, which become its `Explanation`."""

    page_size: int
    num_groups: int
    vocab_size: int
    num_imported: int = 0  # output tokens that another engine generated
    steps: list[ExplainedStep] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)  # of the output tokens after those
    num_left_out: int = 0
    num_computed: int = 0  # positions whose keys and values the steps so far have left

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""
        return self.num_imported + len(self.origins)

    def add(self, step: ExplainedStep, origins: Sequence[Origin]) -> None:
        """Adds a step, and the origins of the tokens that it made known."""
        self.origins += origins
        if not step.is_dropped:
            self.num_computed = step.kv_length
        if len(self.steps) < MAX_STEPS:
            self.steps.append(step)
        else:
            self.num_left_out += 1

    def keep_dropped(self, writes: tuple[KVWrite, ...]) -> None:
        """Takes note that the step added last, whose output was ignored, has left these keys and values."""
        if self.num_left_out or not self.steps or not self.steps[-1].is_dropped:
            return
        first, length = writes[0].first_position, sum(write.num_tokens for write in writes)
        self.steps[-1] = replace(
            self.steps[-1], start=first, query_length=length, kv_length=first + length, writes=writes
        )

    def origin(self, index: int) -> Origin:
        """Returns where output token `index` came from."""
        return "imported" if index < self.num_imported else self.origins[index - self.num_imported]
