"""The host values that cross between host and device: one plan down, one output up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvllm.core.beam import Beam
from jaxvllm.core.lora import NO_ADAPTER
from jaxvllm.core.request import FinishReason, Request
from jaxvllm.core.side_store import SideRows

type Ints = NDArray[np.int32]

NOT_SCORED = -1
# The most tokens of prompts of which one step reports more than the best few. Their values, and the copies that sorting
# makes of them, are hundreds of MB where a vocabulary of 152k tokens is reported.
SCORE_BATCH = 64


@dataclass(frozen=True)
class PageEntries:
    """Pages that slots open in one group: `pages[i]` goes to `columns[i]` of the page table of `slots[i]`."""

    slots: Ints  # i32[N]
    columns: Ints  # i32[N]
    pages: Ints  # i32[N]

    def __len__(self) -> int:
        return len(self.pages)

    @classmethod
    def none(cls) -> "PageEntries":
        return _NO_ENTRIES

    @classmethod
    def joined(cls, parts: "Sequence[PageEntries]") -> "PageEntries":
        """Returns all of `parts`, in order."""
        if sum(map(bool, parts)) < 2:
            return next(filter(None, parts), _NO_ENTRIES)
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("slots", "columns", "pages")))


_NO_ENTRIES = PageEntries(*(np.zeros(0, np.int32),) * 3)


@dataclass(frozen=True)
class StepRoom:
    """The most that a step may compute."""

    num_tokens: int
    num_rows: int


@dataclass(frozen=True)
class Admission:
    """A request that got a slot in this step: the device must learn its pages and sampling parameters first."""

    slot: int
    request: Request
    pages: Ints  # i32[groups, columns]: its page tables; trash where it needs no page, or none yet
    num_cached: int = 0  # leading tokens whose KV the pages hold already
    side_rows: tuple[SideRows, ...] = ()  # rows of the side store that are to be filled for it
    adapter_slot: int = NO_ADAPTER
    brings_adapter: bool = False  # whether that slot is to be filled with the request's adapter first


@dataclass(frozen=True)
class StepPlan:
    """One step. Decode rows come first (the device knows their position and token), then prefill chunks.

    A decode row computes the next token of slot `slots[r]`, `num_steps` times in a row, each time with as many draft
    tokens after it as `num_drafts` allows, and yields at most `max_new[r]` tokens. A prefill row computes `lengths[r]`
    known tokens from position `starts[r]` on, and yields one token where they end the prompt, or where a constraint
    forced them. Decode rows have length 1, and as `starts[r]` the last position that may come first: how far a row got
    is known on the device, and here when an output was read.

    `new_pages` are the pages that rows may need beyond those they have. `token_ids` are the prefill rows' inputs, row
    after row; `-1 - r` stands for row r of the side store, so that inputs of both kinds are one array and one transfer.
    `next_tokens[r]` is the token after a chunk of a prompt that is scored (any one after the last chunk),
    else NOT_SCORED. `epochs` tell a slot's tenants apart when the output comes back.
    """

    slots: Ints  # i32[R]
    epochs: Ints  # i32[R]
    starts: Ints  # i32[R]
    lengths: Ints  # i32[R]
    new_pages: tuple[PageEntries, ...]  # one a group
    max_new: Ints  # i32[R], 0 for a chunk after which more of its prompt follows
    num_decode: int
    token_ids: Ints  # i32[T - num_decode]
    next_tokens: Ints  # i32[R]
    wants_logprobs: bool  # whether any row does
    has_logit_rules: bool = True  # whether any row has some
    has_adapters: bool = False  # whether any row has one
    row_tokens: int = 1  # the most that a row yields; more than 1 only where all rows decode
    num_drafts: int = 0  # of a row in each decode step
    is_blind: bool = False  # whether what guesses tokens need not see the step
    masked: NDArray[np.bool_] | None = None  # bool[R]: rows whose token waits for a mask of the host; None: no row
    readouts: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)  # bool[R]: rows that want each, if any does
    admissions: tuple[Admission, ...] = ()

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        """Tokens that the model computes at once."""
        return self.num_decode + len(self.token_ids)

    @property
    def num_steps(self) -> int:
        """Decode steps in one."""
        return self.row_tokens // (1 + self.num_drafts)

    @property
    def samples(self) -> NDArray[np.bool_]:
        """The rows that yield tokens, bool[R]."""
        return self.max_new > 0

    @property
    def is_masked(self) -> bool:
        """Whether a row waits for the host between the forward pass and sampling."""
        return self.masked is not None

    @property
    def is_split(self) -> bool:
        """Whether something comes between the forward pass and sampling, so that the two are separate programs."""
        return self.masked is not None or bool(self.readouts)

    @property
    def is_plain(self) -> bool:
        """Whether rows are sampled from the logits as they are, and nothing is reported of these."""
        return not (self.has_logit_rules or self.wants_logprobs or self.is_split)

    def without_drafts(self) -> "StepPlan":
        """Returns a plan of decode rows for one step without drafts. Its `max_new` stays as the scheduler counted it.

        A row may always yield less than that. Its `new_pages` fit a program of one token a row, because one step with
        drafts opens at most one page for a row, as one token does: no page is smaller than `MAX_DRAFTS` + 1.
        """
        return replace(self, num_drafts=0, row_tokens=1) if self.num_drafts else self


@dataclass(frozen=True)
class PageCopy:
    """A page that gets the content of another, and comes into a slot's page table in its place."""

    column: int
    source: int
    page: int


@dataclass(frozen=True)
class Fork:
    """Makes `slot` a copy of `source`, which may be itself, whose last token is `token_id`."""

    source: int
    slot: int
    token_id: int
    copies: tuple[PageCopy | None, ...]  # one a group; None: all pages are shared


@dataclass(frozen=True)
class TopLogprobs:
    """Log-probabilities of N raw distributions: each one's token, sampled or given, and the best ones."""

    token: NDArray[np.float32]  # f32[N]
    ranks: Ints  # i32[N], 1 = the most probable
    top_ids: Ints  # i32[N, K], most probable first; K is MAX_LOGPROBS but for wide scores
    top: NDArray[np.float32]  # f32[N, K]


@dataclass(frozen=True)
class DraftCounts:
    """The fate of drafts, by row and by their place after the row's last token."""

    drafted: Ints  # i32[R, K]: how often there was one
    accepted: Ints  # i32[R, K]: how often it was what was sampled


@dataclass(frozen=True)
class StepOutput:
    """The results of a plan's rows, on the host. Log-probabilities are there only if a row asked for them.

    Row r yields the first `counts[r]` of `tokens[r]`: none where it had ended, fewer than planned where it ended.
    The log-probabilities of `tokens[r, y]` are number `r * Y + y`. `reports` are what `core/readout.py` names, for the
    rows of `plan.readouts`.
    """

    tokens: Ints  # i32[R, Y]
    counts: Ints  # i32[R]
    logprobs: TopLogprobs | None = None  # of R * Y tokens
    reports: Mapping[str, Any] = field(default_factory=dict)
    drafts: DraftCounts | None = None  # of the plan's rows, if it has drafts
    were_drafts: NDArray[np.bool_] | None = None  # bool[R, Y]: tokens that were accepted drafts; None: no token was

    @property
    def num_steps(self) -> Ints:
        """i32[R]: decode steps in which each row took part.

        Each yields accepted drafts and a token after them, but for a row's last one, which may end with a draft.
        """
        if self.were_drafts is None:
            return self.counts
        last = np.take_along_axis(self.were_drafts, np.maximum(self.counts - 1, 0)[:, None], axis=1)[:, 0]
        steps: Ints = self.counts - self.were_drafts.sum(axis=1, dtype=np.int32) + last
        return steps


@dataclass(frozen=True)
class Emitted:
    """A new token of a watched request; `at` finds what the StepOutput tells of it, where it was sampled."""

    request: Request
    at: int
    token_id: int


@dataclass(frozen=True)
class Finished:
    """A request that ended, its outputs in `request.output_token_ids`.

    `stop_reason` is the stop token, unless that is EOS, a word that says more than `reason`, or an error. `wrong_param`
    is the parameter of the caller that is to blame for the error, if one is.
    """

    request: Request
    reason: FinishReason
    stop_reason: int | str | None = None
    hides_last: bool = False  # the last token says that the text is over, and is no part of it
    beams: tuple[Beam, ...] | None = None  # of a beam search, the best sequences, best first
    wrong_param: str | None = None


@dataclass(frozen=True)
class Scored:
    """Tokens of a request's prompt, by position. The report of SCORES or WIDE_SCORES has theirs from `first` on."""

    request: Request
    tokens: range
    first: int


@dataclass(frozen=True)
class Pooled:
    """A chunk of a pooled prompt, whose report is that of `row`. It begins at position `start`."""

    request: Request
    start: int
    row: int


@dataclass(frozen=True)
class Routed:
    """Tokens of a request from position `start` on, whose experts are the `rows` of the report."""

    request: Request
    start: int
    rows: slice


@dataclass(frozen=True)
class StepUpdate:
    """The consequences of an output.

    Requests that nobody watches appear when they start and when they end, not per token.
    """

    num_new_tokens: int
    started: tuple[Request, ...]  # got their first token
    emitted: tuple[Emitted, ...]
    finished: tuple[Finished, ...]
    scored: tuple[Scored, ...] = ()
    pooled: tuple[Pooled, ...] = ()
    forks: tuple[Fork, ...] = ()  # to be done before the next step, in this order
    routed: tuple[Routed, ...] = ()
