"""The state of a dialogue between a person and a model: a chat, or prompts that are completed one by one."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class Dialogue(Protocol):
    """Makes requests of a person's texts, and remembers their answers."""

    path: str
    help: str  # the commands that a person may type
    needs_max_tokens: bool  # whether a request without max_tokens ends after a few tokens, however much room there is

    def request(self, text: str) -> dict[str, Any]:
        """Returns the fields of a request's body that ask for an answer to `text`."""

    def keep(self, text: str, answer: str) -> None:
        """Remembers the answer to `text` for the next request."""


class Completions:
    """Prompts to /v1/completions. Each is independent of the others."""

    path = "/v1/completions"
    help = "/exit ends"
    needs_max_tokens = True  # OpenAI's default is 16

    def request(self, text: str) -> dict[str, Any]:
        return {"prompt": text}

    def keep(self, text: str, answer: str) -> None:
        pass


class Conversation:
    """Messages to /v1/chat/completions. Each request contains all earlier messages."""

    path = "/v1/chat/completions"
    help = "/clear forgets what was said, /system TEXT sets the system message, /save FILE writes JSON, /exit ends"
    needs_max_tokens = False

    def __init__(self, system: str | None = None):
        self.system = system
        self._turns: list[dict[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self._turns]

    def request(self, text: str) -> dict[str, Any]:
        return {"messages": [*self.messages, {"role": "user", "content": text}]}

    def keep(self, text: str, answer: str) -> None:
        """Keeps the question and the answer, even if the answer is incomplete. If it is empty, forgets both."""
        if answer:
            self._turns += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    def clear(self) -> None:
        """Forgets everything but the system message."""
        self._turns.clear()

    def save(self, path: Path, fields: Mapping[str, Any]) -> None:
        """Writes the conversation as the body of a request that would continue it."""
        body = {**fields, "messages": self.messages}
        path.write_text(json.dumps(body, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
