"""Beam search decides which continuations of a prompt survive a step, and which are the best. It knows no device.

At each step every beam proposes its `2 * beam_width` most likely next tokens. EOS completes a sequence.
The `beam_width` other ones with the largest cumulative log-probability are the beams of the next step. The score that
ranks sequences at the end is vLLM's: the cumulative log-probability divided by a power of the length, which is the
prompt's and the output's together, without EOS.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from jaxvllm.core.errors import ParameterError
from jaxvllm.core.sampling_params import GREEDY_TEMPERATURE, MAX_N, MAX_TEMPERATURE, SamplingParams
from jaxvllm.core.value_checks import MAX_INT32, boolean, integer, number

# Any length to this power, and a log-probability divided by it, is a number.
MAX_LENGTH_PENALTY = 10.0


@dataclass(frozen=True)
class BeamSearchParams:
    """The options of a beam search. The names and meanings are vLLM's, but for `early_stopping`, which is new here.

    Every instance is valid: the constructor raises ValueError for a bad value.
    """

    beam_width: int  # beams, and sequences that are returned
    max_tokens: int  # of an output, at most
    ignore_eos: bool = False  # EOS ends no sequence
    temperature: float = 0.0  # divides the logits before log-probabilities are taken; 0 = as 1
    length_penalty: float = 1.0  # above 0 favors long sequences, below 0 short ones
    include_stop_str_in_output: bool = False  # an output that EOS has ended ends with it
    # True: the search ends when beam_width sequences are complete. False, or "never": when none that would be returned
    # can change any more.
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "beam_width", integer("beam_width", self.beam_width, 1, MAX_N))
        put(self, "max_tokens", integer("max_tokens", self.max_tokens, 1, MAX_INT32))
        put(self, "temperature", number("temperature", self.temperature, 0.0, MAX_TEMPERATURE))
        penalty = number("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        put(self, "length_penalty", penalty)
        for name in ("ignore_eos", "include_stop_str_in_output"):
            boolean(name, getattr(self, name))
        if self.early_stopping == "never":
            put(self, "early_stopping", False)
        elif type(self.early_stopping) is not bool:
            raise ParameterError(
                f'early_stopping must be true, false or "never", not {self.early_stopping!r}', "early_stopping"
            )

    @property
    def num_candidates(self) -> int:
        """The number of next tokens that each beam proposes."""
        return 2 * self.beam_width

    @property
    def logit_divisor(self) -> float:
        """The divisor of logits before their log-probabilities are taken."""
        return 1.0 if self.temperature < GREEDY_TEMPERATURE else self.temperature

    def sampling_params(self, like: SamplingParams) -> SamplingParams:
        """Returns the parameters of a request for this search. What they say of prompts and outputs is as in `like`."""
        return SamplingParams(
            n=self.beam_width,
            temperature=0.0,
            max_tokens=self.max_tokens,
            ignore_eos=True,
            logprobs=like.logprobs,
            flat_logprobs=like.flat_logprobs,
            truncate_prompt_tokens=like.truncate_prompt_tokens,
            skip_reading_prefix_cache=like.skip_reading_prefix_cache,
            detokenize=like.detokenize,
            skip_special_tokens=like.skip_special_tokens,
            spaces_between_special_tokens=like.spaces_between_special_tokens,
            output_kind=like.output_kind,
        )


@dataclass(frozen=True)
class Candidates:
    """The most likely next tokens of one beam, most likely first."""

    token_ids: NDArray[np.int32]  # i32[N]
    logprobs: NDArray[np.float32]  # f32[N]

    @classmethod
    def best(cls, logprobs: NDArray[np.float32], count: int) -> "Candidates":
        """Returns the `count` most likely of all tokens, or all of fewer. The earlier of two equal tokens is better."""
        at = np.arange(len(logprobs))
        if count < len(at):  # sorting these alone is ten times as fast, with 152k tokens
            at = np.flatnonzero(logprobs >= np.partition(logprobs, -count)[-count])
        best = at[np.argsort(-logprobs[at], kind="stable")][:count].astype(np.int32)
        return cls(best, logprobs[best])


@dataclass(frozen=True, eq=False)
class Beam:
    """An output so far. Beams share their beginnings: each has one token and the beam that it continues."""

    parent: "Beam | None" = None  # None: no token yet
    token_id: int = 0
    candidates: Candidates | None = None  # among which the token was chosen
    cumulative_logprob: float = 0.0
    num_tokens: int = 0
    is_complete: bool = False  # its token is EOS, which ended it

    def path(self) -> "list[Beam]":
        """Returns the beams from the first token on, this one last."""
        beams: list[Beam] = []
        beam = self
        while beam.parent is not None:
            beams.append(beam)
            beam = beam.parent
        return beams[::-1]


@dataclass(frozen=True)
class Survivor:
    """A beam of the next step: the beam of this step that it continues, by its place, and its next token."""

    parent: int
    token_id: int


class BeamSearch:
    """One search. It may be restarted at any time, and then comes to the same result."""

    def __init__(self, params: BeamSearchParams, num_prompt_tokens: int, limit: int, eos_token_ids: Sequence[int]):
        """Begins a search. `limit` is the most tokens of a sequence, prompt included."""
        self.params = params
        self._num_prompt_tokens = num_prompt_tokens
        self._limit = limit
        self._eos_token_ids = frozenset(eos_token_ids)
        self.restart()

    def restart(self) -> None:
        """Forgets everything but the question."""
        self.beams: list[Beam] = [Beam()]
        self._completed: list[Beam] = []  # the best, best first

    def advance(self, proposed: Sequence[Candidates]) -> list[Survivor]:
        """Takes what each of `beams` proposes, and makes the next step's `beams`. Returns where they come from."""
        width, ends = self.params.beam_width, () if self.params.ignore_eos else self._eos_token_ids
        found: list[tuple[int, Beam]] = []
        for index, (beam, candidates) in enumerate(zip(self.beams, proposed, strict=True)):
            count = self.params.num_candidates
            candidates = Candidates(candidates.token_ids[:count], candidates.logprobs[:count])
            pairs = zip(candidates.token_ids.tolist(), candidates.logprobs.tolist(), strict=True)
            for token_id, logprob in pairs:
                if logprob == -np.inf:
                    continue
                total = beam.cumulative_logprob + logprob
                is_complete = token_id in ends
                longer = Beam(beam, token_id, candidates, total, beam.num_tokens + 1, is_complete)
                if is_complete:
                    self._completed.append(longer)
                else:
                    found.append((index, longer))
        # Sorting is stable: of equal ones the earlier is better, as in vLLM.
        self._completed = sorted(self._completed, key=self.score, reverse=True)[:width]
        best = sorted(found, key=lambda one: one[1].cumulative_logprob, reverse=True)[:width]
        self.beams = [beam for _, beam in best]
        return [Survivor(index, beam.token_id) for index, beam in best]

    @property
    def is_over(self) -> bool:
        """Whether `best` is final."""
        if not self.beams or self._has_reached_limit or self._stops_early:
            return True
        if len(self._completed) < self.params.beam_width:
            return False
        # All beams have the same length, so the first is the one with the best prospects.
        return self._prospect(self.beams[0]) <= self.score(self._completed[-1])

    def best(self) -> list[Beam]:
        """Returns the best sequences, at most `beam_width`, best first."""
        unfinished = self.beams if self._has_reached_limit and not self._stops_early else []
        return sorted([*self._completed, *unfinished], key=self.score, reverse=True)[: self.params.beam_width]

    def score(self, beam: Beam) -> float:
        """Returns the cumulative log-probability, divided by the length to the power of `length_penalty`."""
        length = self._num_prompt_tokens + beam.num_tokens - (beam.token_id in self._eos_token_ids)
        return float(beam.cumulative_logprob / length**self.params.length_penalty)

    @property
    def _stops_early(self) -> bool:
        return bool(self.params.early_stopping) and len(self._completed) == self.params.beam_width

    @property
    def _has_reached_limit(self) -> bool:
        return bool(self.beams) and self._num_prompt_tokens + self.beams[0].num_tokens >= self._limit

    def _prospect(self, beam: Beam) -> float:
        """Returns a score that no continuation of `beam` exceeds, since no log-probability is positive."""
        length = self._limit if self.params.length_penalty > 0 else self._num_prompt_tokens + beam.num_tokens
        return float(beam.cumulative_logprob / length**self.params.length_penalty)
