"""Requests: a `GenerationRequest` as the caller made it, and a `Request` for each sequence that is scheduled."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from jaxvllm.core.beam import BeamSearch, BeamSearchParams
from jaxvllm.core.explanation import Trail
from jaxvllm.core.lora import LoraAdapter, LoRARequest
from jaxvllm.core.page_pool import extend_page_hashes
from jaxvllm.core.pooler import Pooling
from jaxvllm.core.repetition import RepetitionDetector
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.core.side_input import SideInput
from jaxvllm.core.token_constraint import GuardedConstraint
from jaxvllm.core.weight_version import WeightStarts

type TokenIds = NDArray[np.int32]

# Tokens of all bad words of a request together, as in vLLM.
MAX_BAD_WORD_TOKENS = 1024


class FinishReason(enum.StrEnum):
    """The reason why a completion ended. The values are OpenAI's, where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    REPETITION = "repetition"  # vLLM's: the output repeated itself
    ERROR = "error"  # its constraint failed


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt that the model can take: at least one token, at most the model's length, all in the vocabulary.

    Where `side_inputs` have values for positions, the token ids are placeholders. They are in order and do not overlap.
    """

    text: str | None  # None when the caller gave token ids
    token_ids: TokenIds
    cache_salt: str | None = None  # the prefix cache shares pages only between prompts with the same salt
    side_inputs: tuple[SideInput, ...] = ()

    def __post_init__(self) -> None:
        end = 0
        for side in self.side_inputs:
            if side.first < end or side.end > len(self.token_ids):
                raise ValueError(
                    f"a side input for positions {side.first} to {side.end - 1} overlaps another, or is not in order, "
                    f"or outside of a prompt of {len(self.token_ids)} tokens"
                )
            end = side.end

    @cached_property
    def token_list(self) -> list[int]:
        """The token ids as the list that outputs contain. It is made once, on first use."""
        ids: list[int] = self.token_ids.tolist()
        return ids

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Prompt):
            return NotImplemented
        same_ids = np.array_equal(self.token_ids, other.token_ids)
        mine, theirs = ((one.text, one.cache_salt, one.side_inputs) for one in (self, other))
        return same_ids and mine == theirs

    @property
    def last_tokens(self) -> list[int]:
        """The tokens after the last side input, which are all where there is none. A text goes on after them."""
        return self.token_list[self.side_inputs[-1].end :] if self.side_inputs else self.token_list

    @property
    def known_token_ids(self) -> TokenIds:
        """The token ids without the placeholders."""
        if not self.side_inputs:
            return self.token_ids
        return np.delete(self.token_ids, np.concatenate([np.arange(s.first, s.end) for s in self.side_inputs]))

    def extra_keys(self, start: int, end: int) -> list[bytes]:
        """Returns what the hash of a page with the positions from `start` to `end` has beside its tokens."""
        keys = (side.key(start, end) for side in self.side_inputs)
        return [key for key in keys if key is not None]


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to complete `params.num_sequences` times, as a caller asked for it.

    It is made and checked where a request enters: in `LLM`, `AsyncLLM` or a route of the server. From there the same
    value goes to the engine's process and to the scheduler. So a new field is declared here and in `RequestOptions`.
    """

    request_id: str
    prompt: Prompt
    params: SamplingParams
    priority: int = 0  # lower values run first
    beam_search: BeamSearchParams | None = None  # searches for `params.n` sequences instead of drawing them
    # What is known of the request's KV in other engines, with vLLM's names: see `jaxvllm.kv_transfer.tickets`.
    kv_transfer_params: Mapping[str, Any] | None = None
    wants_draft_spans: bool = False  # outputs that are deltas tell which parts of their text were accepted drafts
    session_id: str | None = None  # equal in the requests of a conversation, which session affinity keeps together
    wants_explanation: bool = False  # the last output of each completion tells what each step did for it
    pooling: Pooling | None = None  # nothing is generated: the output is a vector of the prompt
    lora_request: LoRARequest | None = None  # the adapter that changes the model for it
    answer_id: str | None = None  # the id of the server's answer that it is a part of; None: `request_id`

    @property
    def is_prompt_only(self) -> bool:
        """Whether no token is generated, so that the prompt may be as long as the model."""
        return self.params.scores_only or self.pooling is not None

    def sequences(self) -> "tuple[GenerationRequest, ...]":
        """Returns one request for each completion. Several share the prompt and have numbered ids; one is `self`.

        All beams of a search are one request, whatever it finds.
        """
        if self.beam_search is not None:
            params = replace(self.params, n=1, logprobs=self.beam_search.num_candidates)
            return (replace(self, params=params),)
        if self.params.num_sequences == 1:
            return (self,)
        return tuple(
            replace(self, request_id=f"{self.request_id}#{index}", params=self.params.child(index))
            for index in range(self.params.num_sequences)
        )


class RequestOptions(TypedDict, total=False):
    """The fields of a `GenerationRequest` that have defaults, as keyword arguments of the functions that make one."""

    priority: int
    beam_search: BeamSearchParams | None
    kv_transfer_params: Mapping[str, Any] | None
    wants_draft_spans: bool
    session_id: str | None
    wants_explanation: bool
    pooling: Pooling | None
    lora_request: LoRARequest | None
    answer_id: str | None


@dataclass(frozen=True, order=True)
class QueueKey:
    """A request's place in the queue. The smaller key runs first and is preempted last; no two requests share one."""

    priority: int
    arrival: int


@dataclass(eq=False, slots=True)
class Request:
    """One sequence to complete. Only the fields that must survive a preemption ever change.

    `asked` is the caller's request for this sequence, made by `GenerationRequest.sequences`: its `n` is 1.
    `seed` is the caller's, or else one drawn at admission, so that a preempted request draws the same tokens again.
    `limit` is the largest number of tokens, prompt included, that the sequence may reach.
    """

    asked: GenerationRequest
    seed: int
    stop_token_ids: tuple[int, ...]  # EOS included, unless ignored
    limit: int
    key: QueueKey
    eos_token_ids: tuple[int, ...] = ()  # the model's, also where they are ignored
    constraint: GuardedConstraint | None = None
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # sequences of tokens that the output must not complete
    repetition: RepetitionDetector | None = None
    search: BeamSearch | None = None
    tells_experts: bool = False  # the caller is told which experts each token has chosen
    adapter: LoraAdapter | None = None
    output_token_ids: TokenIds = field(default_factory=lambda: np.empty(0, np.int32))
    page_hashes: list[bytes] = field(default_factory=list)
    masks_commute: bool = True  # with what the engine does to all logits: see `guesses`
    num_cached_tokens: int | None = None  # of the prompt; None until first admitted
    num_preemptions: int = 0
    asked_for_pages: int | None = None  # how often it had been preempted when it was last asked for pages elsewhere
    num_unreported: int = 0  # the last of its output tokens that no update has reported: they were forced
    trail: Trail | None = None  # its steps so far; None: nobody wants them explained
    weight_starts: WeightStarts = field(default_factory=list)
    # Whether some of its KV is of weights that were replaced since, so that nobody else may have its pages.
    has_old_pages: bool = False
    request_id: str = field(init=False)  # a field for speed: it is read twice for every token of a watched request

    def __post_init__(self) -> None:
        self.request_id = self.asked.request_id

    @property
    def late_token_ids(self) -> tuple[int, ...]:
        """The tokens that `min_tokens` keeps away: all that may end the request, and EOS also where it is ignored."""
        return tuple(dict.fromkeys((*self.eos_token_ids, *self.stop_token_ids)))

    @property
    def prompt_token_ids(self) -> TokenIds:
        return self.asked.prompt.token_ids

    @property
    def sampling_params(self) -> SamplingParams:
        return self.asked.params

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def wants_scores(self) -> bool:
        """Whether the caller wants the log-probabilities of the prompt's tokens. Then all of them are computed."""
        return self.sampling_params.prompt_logprobs is not None

    @property
    def wants_few_scores(self) -> bool:
        """Whether these are the best few of each token."""
        return self.wants_scores and not self.wants_wide_scores

    @property
    def wants_wide_scores(self) -> bool:
        """Whether these are more than the best few of each token. A step computes no more than `SCORE_BATCH` such."""
        return self.sampling_params.wants_wide_scores

    @property
    def is_pooled(self) -> bool:
        """Whether the caller wants one vector of the prompt's hidden states."""
        return self.asked.pooling is not None

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether the request may begin after pages that others have computed."""
        pooling = self.asked.pooling
        if self.wants_scores or self.tells_experts or (pooling is not None and pooling.reads_all):
            return False
        return not self.sampling_params.skip_reading_prefix_cache

    @property
    def takes_forced(self) -> bool:
        """Whether forced tokens need no sampling.

        Log-probabilities do, and penalties count what was sampled. Bad words and logits processors may forbid a token
        that is forced, which only sampling finds out.
        """
        params = self.sampling_params
        return (
            self.constraint is not None
            and self.masks_commute
            and self.repetition is None
            and not self.bad_word_ids
            and not params.wants_logprobs
            and not params.is_penalized
        )

    @property
    def guesses(self) -> bool:
        """Whether a token that is sampled without a mask is what it would be with the mask, if the mask allows it.

        The largest value is still the largest when others are gone: greedy rows take the largest logit, and random rows
        the largest sum of logit and noise. Filters look at the other tokens, penalties count what was sampled, and
        log-probabilities are those of the tokens that a mask leaves.
        """
        params = self.sampling_params
        has_filters = params.top_p < 1 or params.top_k > 0 or params.min_p > 0
        return (
            self.constraint is not None
            and self.masks_commute
            and not params.wants_logprobs
            and (params.greedy or not has_filters)
            and not params.is_penalized
        )

    def forced(self, most: int) -> list[int]:
        """Returns up to `most` tokens that its constraint forces, as far as none of them may end it or is excluded."""
        if not self.takes_forced or most <= 0:
            return []
        assert self.constraint is not None
        return list(takewhile(self._comes_alone, self.constraint.forced()[:most]))

    def _comes_alone(self, token: int) -> bool:
        """Returns whether a forced `token` needs no sampling, which finds out whether it ends the request, or is
        excluded.
        """
        return token not in self.stop_token_ids and self.allows(token)

    def allows(self, token: int) -> bool:
        """Returns whether the caller's list of allowed tokens, if there is one, has `token`."""
        allowed = self.sampling_params.allowed_token_ids
        return allowed is None or token in allowed

    @property
    def num_beams(self) -> int | None:
        """The most beams that search for it. None: it is no beam search."""
        return None if self.search is None else self.search.params.beam_width

    @property
    def logit_divisor(self) -> float:
        """The divisor of logits before the log-probabilities are taken that the host gets."""
        return 1.0 if self.search is None else self.search.params.logit_divisor

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def token_ids(self) -> TokenIds:
        """Returns the prompt's tokens and the output tokens known so far, i32[num_tokens]."""
        if not len(self.output_token_ids):
            return self.prompt_token_ids
        return np.concatenate([self.prompt_token_ids, self.output_token_ids])

    def hashes(self, page_size: int) -> list[bytes]:
        """Returns the hash chain of all full pages of `token_ids()`. Each page is hashed once in a request's life."""
        if len(self.page_hashes) < self.num_tokens // page_size:
            prompt = self.asked.prompt
            extra_keys = prompt.extra_keys if prompt.side_inputs else None
            extend_page_hashes(self.page_hashes, self.token_ids(), page_size, prompt.cache_salt, extra_keys)
        return self.page_hashes
