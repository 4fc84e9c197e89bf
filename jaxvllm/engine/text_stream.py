"""The text of one completion: detokenized, stopped at stop strings, released when it is certain."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.engine.detokenizer import Detokenizer, SilentDetokenizer
from jaxvllm.engine.stop_strings import StopStrings
from jaxvllm.engine.tokenizer import Tokenizer


@dataclass(frozen=True)
class StopMatch:
    """A stop string ended the completion: its first `num_tokens` tokens count, the rest are to be dropped."""

    stop_reason: str
    num_tokens: int


class TextStream:
    """Text that is never taken back: a beginning of a stop string is held until the next tokens decide.

    Push tokens one by one, in groups, or all at once at the end: the text is the same. The token that ended a
    completion (EOS, stop_token_ids) is not pushed unless `include_stop_str_in_output`.
    """

    def __init__(self, detokenizer: Detokenizer, params: SamplingParams, stops: StopStrings | None) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._state = stops.root if stops else None
        self._keeps_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._text = ""  # all of it, held back or not
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
    ) -> "TextStream":
        """A stream for one completion of the prompt. `stops` shares one automaton between several."""
        if not params.detokenize:
            return cls(SilentDetokenizer(), params, None)
        if stops is None and params.stop:
            stops = StopStrings(params.stop)
        return cls(tokenizer.detokenizer(params.skip_special_tokens, prompt_token_ids), params, stops)

    @property
    def text(self) -> str:
        """Everything released so far."""
        return self._text[: len(self._text) - self._num_held]

    def take(self) -> str:
        """What was released since the last call."""
        end = len(self._text) - self._num_held
        new = self._text[self._num_taken : end]
        self._num_taken = end
        return new

    def push(self, token_ids: Sequence[int]) -> StopMatch | None:
        """Takes the next tokens; a StopMatch when a stop string is complete: then nothing more counts."""
        assert self._match is None, "push after a stop string"
        if self._stops is None:
            self._num_tokens += len(token_ids)
            self._text += self._detokenizer.push(token_ids)
            return None
        for token_id in token_ids:  # one by one: a match must say how many tokens count
            self._num_tokens += 1
            if (match := self._append(self._detokenizer.push((token_id,)))) is not None:
                return match
        return None

    def finish(self) -> StopMatch | None:
        """Releases all that was held, unless it completes a stop string. Does nothing after a match."""
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
