"""`CompletionText`: detokenizes one completion, ends it at stop strings, and releases text once it is certain."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.text.detokenizer import Detokenizer, SilentDetokenizer
from jaxvllm.text.stop_strings import StopStrings
from jaxvllm.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class StopMatch:
    """The end of a completion by a stop string. Only its first `num_tokens` tokens count, the rest are dropped."""

    stop_reason: str
    num_tokens: int


class CompletionText:
    """The growing text of a completion. Released text is final: the beginning of a stop string is held back.

    Tokens may be pushed one by one, in groups, or all at once at the end: the text is the same. The token that ended a
    completion (EOS, stop_token_ids) is pushed only with `include_stop_str_in_output`.
    """

    def __init__(self, detokenizer: Detokenizer, params: SamplingParams, stops: StopStrings | None) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._state = stops.root if stops else None
        self._keeps_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._text = ""  # the whole text, including the part that is held back
        self._num_held = 0
        self._num_taken = 0
        self._match: StopMatch | None = None

    @classmethod
    def open(
        cls,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt_token_ids: Sequence[int] = (),
        stops: StopStrings | None = None,
    ) -> "CompletionText":
        """Starts the text of one completion of the prompt. Several completions may share the automaton `stops`."""
        if not params.detokenize:
            return cls(SilentDetokenizer(), params, None)
        if stops is None and params.stop:
            stops = StopStrings(params.stop)
        return cls(tokenizer.detokenizer(params.skip_special_tokens, prompt_token_ids), params, stops)

    @property
    def text(self) -> str:
        """All text released so far."""
        return self._text[: len(self._text) - self._num_held]

    @property
    def num_chars(self) -> int:
        """The length of all text so far, with what is held back."""
        return len(self._text)

    @property
    def is_whole(self) -> bool:
        """Whether all tokens are text, and none waits for others that end its character."""
        return self._detokenizer.is_whole

    def take(self) -> str:
        """Returns the text released since the last call."""
        end = len(self._text) - self._num_held
        new = self._text[self._num_taken : end]
        self._num_taken = end
        return new

    def push(self, token_ids: Sequence[int]) -> StopMatch | None:
        """Adds the next tokens. Returns a StopMatch when a stop string is complete, after which no token counts."""
        assert self._match is None, "push after a stop string"
        if self._stops is None:
            self._num_tokens += len(token_ids)
            self._text += self._detokenizer.push(token_ids)
            return None
        for token_id in token_ids:  # pushed one by one, because a match must say how many tokens count
            self._num_tokens += 1
            if (match := self._append(self._detokenizer.push((token_id,)))) is not None:
                return match
        return None

    def finish(self) -> StopMatch | None:
        """Releases the text that was held back, unless it completes a stop string. Does nothing after a match."""
        if self._match is not None:
            return None
        match = self._append(self._detokenizer.flush())
        self._num_held = 0
        return match

    def _append(self, new: str) -> StopMatch | None:
        if self._stops is None or self._state is None:
            self._text += new
            return None
        ignore = self._num_tokens <= self._min_tokens
        self._state, num_read, stop = self._stops.advance(self._state, new, ignore)
        self._text += new[:num_read]
        if stop is None:
            self._num_held = 0 if self._keeps_stop else self._state.depth
            return None
        if not self._keeps_stop:
            self._text = self._text[: len(self._text) - len(stop)]
        self._num_held = 0
        self._match = StopMatch(stop, self._num_tokens)
        return self._match
