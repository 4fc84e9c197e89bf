"""`DraftSpans`: which parts of a completion's text were accepted drafts of speculative decoding."""

from collections import deque

from jaxvllm.text.completion_text import CompletionText, StopMatch


class DraftSpans:
    """Follows one completion's text, and says of each part whether all tokens that spell it were accepted drafts.

    A token that ends a character and begins the next text is one part with it.
    """

    def __init__(self) -> None:
        self._marks: deque[bool] = deque()  # of the tokens that will be pushed next
        self._parts: deque[tuple[int, bool]] = deque()  # of text that was not split yet: characters, accepted drafts
        self._open: bool | None = None  # whether all tokens were drafts that wait to be text; None: no token waits

    def expect(self, is_draft: bool) -> None:
        """Says whether the next token that is to be pushed was an accepted draft."""
        self._marks.append(is_draft)

    def push(self, text: CompletionText, token_ids: list[int]) -> StopMatch | None:
        """Pushes tokens to `text`, all of which were expected."""
        for token_id in token_ids:
            is_draft, before = self._marks.popleft(), text.num_chars
            match = text.push((token_id,))
            is_open = is_draft and self._open is not False
            if (new := text.num_chars - before) > 0:
                self._parts.append((new, is_open))
                is_open = is_draft
            self._open = None if text.is_whole else is_open
            if match is not None:
                return match
        return None

    def split(self, text: str) -> list[tuple[str, bool]]:
        """Returns the next text that was released, in parts, each with whether it was accepted drafts.

        Neighbours differ. Text of no token, and of beams, is no draft.
        """
        spans: list[tuple[str, bool]] = []
        while text:
            count, is_draft = self._parts.popleft() if self._parts else (len(text), bool(self._open))
            part, text = text[:count], text[count:]
            if len(part) < count:  # the rest is held back
                self._parts.appendleft((count - len(part), is_draft))
            if spans and spans[-1][1] == is_draft:
                part = spans.pop()[0] + part
            spans.append((part, is_draft))
        return spans
