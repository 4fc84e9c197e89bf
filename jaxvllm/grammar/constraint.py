"""`CompiledGrammar`, which requests share, and `GrammarConstraint`, which follows it through one sequence."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray


class GrammarError(RuntimeError):
    """Raised when a grammar gives up on a sequence that it has taken so far, because it met a limit of its work."""


@dataclass(frozen=True, eq=False)
class CompiledGrammar:
    """A grammar that at least one text satisfies, with what is true of every text at its start."""

    matcher: LLMatcher  # at its start, and never advanced: each sequence copies it
    first_mask: NDArray[np.int32]  # i32[words]
    first_forced: tuple[int, ...]  # tokens with which every text begins
    warnings: tuple[str, ...]  # what is not enforced of what was asked for
    eos_token_ids: frozenset[int] = frozenset()

    def begins_with_any(self, token_ids: Sequence[int]) -> bool:
        """Returns whether a text may begin with one of these tokens of the vocabulary."""
        ids = np.array(token_ids, np.int64)
        return bool((self.first_mask.view(np.uint32)[ids // 32] >> (ids % 32).astype(np.uint32) & 1).any())

    def constraint(self) -> "GrammarConstraint":
        """Returns a constraint for a new sequence."""
        return GrammarConstraint(self)


class GrammarConstraint:
    """Allows the tokens after which the text can still become one that the grammar takes, and EOS where it is one.

    It is a `core.token_constraint.TokenConstraint`. llguidance never raises, so every call here looks for its error.
    """

    def __init__(self, grammar: CompiledGrammar):
        self._grammar = grammar
        self._matcher: LLMatcher | None = None  # from the first token on
        self._forced: Sequence[int] = grammar.first_forced
        self._is_complete = False

    @property
    def is_complete(self) -> bool:
        """Whether the text is over: nothing may follow, or EOS came."""
        return self._is_complete

    def advance(self, token_ids: Sequence[int]) -> int:
        """Takes tokens up to the first that is not allowed. Raises GrammarError when the grammar gives up."""
        if not token_ids:
            return 0
        if self._is_complete:  # the matcher takes no more
            return next((i for i, token in enumerate(token_ids) if not self._allows(token)), len(token_ids))
        if self._matcher is None:
            self._matcher = self._grammar.matcher.deep_copy()
        count: int = self._matcher.try_consume_tokens(list(token_ids))
        is_named_eos = False
        if count < len(token_ids):  # a matcher that gave up takes no token
            self._check(self._matcher)
            # A grammar may name EOS, as a structural tag does that ends with it. A matcher's mask allows it then, and
            # the matcher does not take it.
            is_named_eos = token_ids[count] in self._grammar.eos_token_ids and self._allows(token_ids[count])
            count += is_named_eos
        self._is_complete = is_named_eos or self._matcher.is_stopped()
        self._forced = () if self._is_complete else self._up_to_eos(self._matcher.compute_ff_tokens())
        return count + (self.advance(token_ids[count:]) if self._is_complete else 0)

    def _up_to_eos(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Returns those of forced tokens that precede EOS, with which the answer is over."""
        eos = self._grammar.eos_token_ids
        return token_ids if eos.isdisjoint(token_ids) else tuple(takewhile(lambda token: token not in eos, token_ids))

    def _allows(self, token: int) -> bool:
        words = np.zeros(len(self._grammar.first_mask), np.int32)
        self.fill(words)
        return bool(words.view(np.uint32)[token // 32] >> token % 32 & 1)

    def forced(self) -> Sequence[int]:
        """Returns the tokens that must come next, as far as they are known."""
        return self._forced

    def fill(self, words: NDArray[np.int32]) -> None:
        """Writes the mask of allowed next tokens. Raises GrammarError when the grammar gives up."""
        if self._matcher is None:
            words[:] = self._grammar.first_mask[: len(words)]
            return
        fill_mask(self._matcher, words, len(self._grammar.first_mask))
        self._check(self._matcher)

    @staticmethod
    def _check(matcher: LLMatcher) -> None:
        if error := matcher.get_error():
            raise GrammarError(f"the grammar of the request gave up: {one_line(error)}")


def fill_mask(matcher: LLMatcher, words: NDArray[np.int32], num_words: int) -> None:
    """Writes the mask of `matcher`, which has `num_words`, into `words`, which may be fewer."""
    if len(words) == num_words and words.flags.c_contiguous:
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    else:  # the vocabulary of the tokenizer is larger than that of the model
        mask = np.empty(num_words, np.int32)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        words[:] = mask[: len(words)]


def one_line(error: str) -> str:
    """Returns an error of llguidance without its line breaks, and not longer than people read."""
    text = " ".join(error.replace("<non-verbose/>", "").split())
    return text if len(text) <= 300 else text[:297] + "..."
