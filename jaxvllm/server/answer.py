"""`Answer`: one completion of a conversation, read as reasoning, content and tool calls while it comes."""

from jaxvllm.core.request import Prompt
from jaxvllm.engine.outputs import CompletionOutput
from jaxvllm.server.argument_check import ForcedCall
from jaxvllm.server.service import Service
from jaxvllm.text.assistant_message import AnswerFormat
from jaxvllm.text.message_events import Arguments, CallBegin, CallEnd, Content, Event, Reasoning
from jaxvllm.text.reasoning_tokens import ReasoningTokens


class Answer:
    """One of the completions of `prompt`, as far as it has come. It continues the text `continued`, if any."""

    def __init__(
        self,
        format: AnswerFormat,
        service: Service,
        prompt: Prompt,
        continued: str | None,
        shows_reasoning: bool,
    ):
        """Takes the parts. Without `shows_reasoning`, the reasoning is counted and not told."""
        self.has_calls = False
        self.forced_calls: list[ForcedCall] = []  # those that are whole
        self._schemas = format.schemas if format.calls is not None and format.calls.is_forced else {}
        self._call = ""  # the name of the function that is called
        self._arguments: list[str] = []
        prompt_text = prompt.text or ""
        self._reader = None if format.is_plain else format.reader(prompt_text, continued)
        self._shows_reasoning = shows_reasoning
        self._reasoning: list[str] = []
        self._tokens: ReasoningTokens | None = None
        if format.reasoning is not None:
            is_open = format.reasoning.opens(prompt_text, continued)
            self._tokens = ReasoningTokens(format.reasoning, service.tokenizer, is_open)

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self._tokens is None else self._tokens.total("".join(self._reasoning))

    def read(self, completion: CompletionOutput) -> list[Event]:
        """Returns what the new text of the completion says, and what its end says if it has ended."""
        if self._reader is None:
            return [Content(completion.text)]
        events = self._reader.push(completion.text)
        if completion.finish_reason is not None:
            events += self._reader.finish(is_cut=completion.finish_reason != "stop")
        if self._tokens is not None:
            self._tokens.add(completion.token_ids)
            self._reasoning += [event.text for event in events if isinstance(event, Reasoning)]
        self.has_calls = self.has_calls or any(isinstance(event, CallEnd) for event in events)
        if self._schemas:
            self._note_calls(events)
        return events if self._shows_reasoning else [event for event in events if not isinstance(event, Reasoning)]

    def _note_calls(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case CallBegin(_, _, name):
                    self._call, self._arguments = name, []
                case Arguments(_, text):
                    self._arguments.append(text)
                case CallEnd() if (schema := self._schemas.get(self._call)) is not None:
                    self.forced_calls.append(ForcedCall(self._call, "".join(self._arguments), schema))
