"""What a person and a model said: the state of a chat, or of prompts that are completed one by one."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class Dialogue(Protocol):
    """From what a person types to a request, and back."""

    path: str
    help: str  # what else a person may type
    needs_max_tokens: bool  # else the server stops after a few tokens, however much room there is

    def request(self, text: str) -> dict[str, Any]:
        """The fields of the body that ask for an answer to `text`."""

    def keep(self, text: str, answer: str) -> None:
        """Notes what was answered; the next request knows it."""


class Completions:
    """Prompts to /v1/completions: each stands alone."""

    path = "/v1/completions"
    help = "/quit ends"
    needs_max_tokens = True  # 16 are OpenAI's default

    def request(self, text: str) -> dict[str, Any]:
        return {"prompt": text}

    def keep(self, text: str, answer: str) -> None:
        pass


class Conversation:
    """Messages to /v1/chat/completions: each request holds everything said before."""

    path = "/v1/chat/completions"
    help = "/clear forgets what was said, /system TEXT sets the system message, /save FILE writes JSON, /quit ends"
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
        """An answer that was stopped half way is kept as far as it came; without any, the question is forgotten."""
        if answer:
            self._turns += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    def clear(self) -> None:
        """Forgets everything but the system message."""
        self._turns.clear()

    def save(self, path: Path, fields: Mapping[str, Any]) -> None:
        """Writes the conversation as the body of a request that would continue it."""
        body = {**fields, "messages": self.messages}
        path.write_text(json.dumps(body, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
