"""`ReasoningConstraint`: leaves the reasoning free, up to a budget, and constrains the answer behind it."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from jaxvllm.core.token_constraint import TokenConstraint
from jaxvllm.text.reasoning import ReasoningFormat
from jaxvllm.text.tokenizer import Tokenizer

# The last tokens of a prompt that are read for a mark. The longest mark has seven words.
PROMPT_TAIL = 32
_ALL = -1  # a word of a mask that allows every token


class ReasoningMarks:
    """The marks of a model's reasoning as tokens."""

    def __init__(self, format: ReasoningFormat, tokenizer: Tokenizer):
        self._format = format
        self._tokenizer = tokenizer
        self.end = tuple(tokenizer.encode(format.end, add_special_tokens=False))
        start = tokenizer.encode(format.start, add_special_tokens=False)
        self.start = start[0] if len(start) == 1 else None  # None: it is several tokens
        # Characters of the mark, and so the most tokens that it may be, plus one that ends with its first character.
        self._most = len(format.end) + 1

    def opens(self, prompt: Sequence[int]) -> bool:
        """Returns whether an answer to `prompt` begins inside the reasoning."""
        return self._format.opens(self._tail(prompt))

    def is_over(self, prompt: Sequence[int]) -> bool:
        """Returns whether `prompt` ends with the end of the reasoning."""
        return self._tail(prompt).rstrip().endswith(self._format.end)

    def ends(self, reasoning: Sequence[int]) -> bool:
        """Returns whether the last token of `reasoning` completes the end mark."""
        if len(self.end) == 1:
            return reasoning[-1] == self.end[0]
        # The model may spell the mark in other tokens than the tokenizer.
        return self._format.end in self._text(reasoning[-self._most :])

    def _tail(self, prompt: Sequence[int]) -> str:
        return self._text(list(prompt[-PROMPT_TAIL:]))

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


class ReasoningConstraint:
    """Constrains nothing until the reasoning has ended, and from there on what `answer` does.

    It is a `core.token_constraint.TokenConstraint`. After `budget` tokens of reasoning it forces the end mark. A model
    that may answer at once may begin with the start mark or with the answer, where the start mark is one token.
    """

    def __init__(
        self, marks: ReasoningMarks, prompt: Sequence[int], answer: TokenConstraint | None, budget: int | None
    ):
        self._marks = marks
        self._answer = answer
        self._budget = budget
        self._reasoning: list[int] = []  # those that the end mark may still be part of
        self._count = 0  # tokens of reasoning
        self._forced: tuple[int, ...] = ()  # what is left of the end mark
        self._is_inside = marks.opens(prompt)
        self._may_open = not self._is_inside and not marks.is_over(prompt)  # the reasoning, by the next token
        if self._may_open and marks.start is None:
            self._is_inside, self._may_open = True, False
        self._force_end()

    @property
    def is_complete(self) -> bool:
        """Whether the answer is complete."""
        return not self._is_inside and self._answer is not None and self._answer.is_complete

    def advance(self, token_ids: Sequence[int]) -> int:
        """Takes tokens up to the first that is not allowed."""
        for index, token in enumerate(token_ids):
            if self._is_inside:
                if self._forced and token != self._forced[0]:
                    return index
                self._reason(token)
            elif self._may_open and token == self._marks.start:
                self._is_inside, self._may_open = True, False
                self._force_end()
            elif self._answer is None:
                self._may_open = True  # without a form the answer is free, and may think again
            elif self._answer.advance([token]):
                self._may_open = False
            else:
                return index
        return len(token_ids)

    def forced(self) -> Sequence[int]:
        """Returns the rest of an end mark that is forced, or what the answer must continue with."""
        if self._is_inside or self._may_open or self._answer is None:
            return self._forced
        return self._answer.forced()

    def fill(self, words: NDArray[np.int32]) -> None:
        """Writes the mask of allowed next tokens."""
        if self._forced:
            words[:] = 0
            self._allow(words, self._forced[0])
        elif self._is_inside or self._answer is None:
            words[:] = _ALL
        else:
            self._answer.fill(words)
            if self._may_open:
                assert self._marks.start is not None
                self._allow(words, self._marks.start)

    @staticmethod
    def _allow(words: NDArray[np.int32], token: int) -> None:
        words.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)

    def _reason(self, token: int) -> None:
        self._reasoning.append(token)
        if self._forced:
            self._forced = self._forced[1:]
            ended = not self._forced
        else:
            self._count += 1
            ended = self._marks.ends(self._reasoning)
        if ended:
            self._is_inside = False
            self._may_open = self._answer is None and self._marks.start is not None
            self._reasoning.clear()
            self._count = 0
        else:
            self._force_end()

    def _force_end(self) -> None:
        if self._is_inside and not self._forced and self._budget is not None and self._count >= self._budget:
            self._forced = self._marks.end
