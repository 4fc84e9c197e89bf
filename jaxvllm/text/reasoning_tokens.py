"""`ReasoningTokens`: counts the tokens that a completion spent on its reasoning."""

from collections.abc import Sequence

from jaxvllm.text.reasoning import ReasoningFormat
from jaxvllm.text.tokenizer import Tokenizer


class ReasoningTokens:
    """Counts the tokens of one completion's reasoning, without the marks."""

    def __init__(self, format: ReasoningFormat, tokenizer: Tokenizer, is_open: bool) -> None:
        self._tokenizer = tokenizer
        self._start, self._end = (tokenizer.backend.token_to_id(mark) for mark in (format.start, format.end))
        self._is_inside = is_open
        self._count = 0

    def add(self, token_ids: Sequence[int]) -> None:
        """Takes the next tokens of the completion."""
        for token_id in token_ids:
            if token_id in (self._start, self._end):
                self._is_inside = token_id == self._start
            else:
                self._count += self._is_inside

    def total(self, reasoning: str) -> int:
        """Returns the count. `reasoning` is the text, which is tokenized again where a mark is not one token."""
        if self._start is None or self._end is None:
            return len(self._tokenizer.encode(reasoning, add_special_tokens=False)) if reasoning else 0
        return self._count
