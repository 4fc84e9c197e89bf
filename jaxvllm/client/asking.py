"""Asking a server one thing, with the answer on the screen while it arrives."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from jaxvllm.client.answer import Answer
from jaxvllm.client.api import Api
from jaxvllm.client.conversation import Dialogue
from jaxvllm.client.screen import Screen


@dataclass(frozen=True)
class Asker:
    """Sends what a person types. `fields` are those of every request: the model and how to sample."""

    api: Api
    screen: Screen
    fields: Mapping[str, Any]
    shows_stats: bool = False

    def ask(self, dialogue: Dialogue, text: str) -> None:
        """Prints the answer to `text`, and keeps it. Ctrl-C stops the answer, which is then kept as far as it came.

        ServerError when there is none; then nothing is kept. KeyboardInterrupt is raised again.
        """
        body = {**self.fields, **dialogue.request(text), "stream": True, "stream_options": {"include_usage": True}}
        if dialogue.needs_max_tokens and "max_tokens" not in body:
            room = self.api.room_behind(text, body["model"])
            body |= {} if room is None else {"max_tokens": room}
        answer = Answer()
        try:
            with closing(self.api.stream(dialogue.path, body)) as chunks:
                for piece in answer.read(chunks):
                    self.screen.text(piece)
        except KeyboardInterrupt:
            dialogue.keep(text, answer.text)
            raise
        finally:
            self.screen.end()
        dialogue.keep(text, answer.text)
        if answer.finish_reason == "length":
            self.screen.note("(cut at the most tokens that an answer may have: --max-tokens)")
        if self.shows_stats:
            self.screen.note(str(answer.stats))
