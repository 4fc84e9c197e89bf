"""A chat template that Jinja has compiled, in a sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxvllm.text.chat_messages import (
    Message,
    as_parts,
    checked_messages,
    text_of,
    with_one_system_message,
)
from jaxvllm.text.content_format import ContentFormat, find_content_format, tests_for_text


class GenerationTag(Extension):
    """The tag `{% generation %}...{% endgeneration %}`. It marks words to train on, and has no effect here."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class CompiledTemplate:
    """One template, and the form in which it takes messages."""

    def __init__(self, source: str, content_format: ContentFormat | None) -> None:
        """Compiles `source`, or raises ValueError. `content_format` is what it expects; None: what it shows."""
        self._template = parsed(source, "the checkpoint's chat template")
        environment = _environment()
        self._takes_parts = (content_format or find_content_format(environment, source)) == "openai"
        # As in transformers, a text stays a text where the template asks for both.
        self._takes_text = content_format is None and tests_for_text(environment, source)
        self._knows_developers = "developer" in source

    def checked(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Returns the checked messages. A developer is the system where the template does not know developers."""
        checked = checked_messages(messages, self._takes_parts)
        if self._knows_developers or all(message["role"] != "developer" for message in checked):
            return checked
        named = [message | {"role": "system"} if message["role"] == "developer" else message for message in checked]
        return with_one_system_message(named)

    def render(self, conversation: Sequence[Message], variables: Mapping[str, Any]) -> str:
        """Renders the template. Raises ValueError if it refuses the messages.

        Messages of the system after the first message stay where they are if the template writes them there. Many
        templates refuse them, or leave them out: then they join the system's message at the beginning.
        """
        later = [text_of(message).strip() for message in conversation[1:] if message["role"] == "system"]
        if not later:
            return self._render(conversation, variables)
        try:
            prompt = self._render(conversation, variables)
            if all(text in prompt for text in later):
                return prompt
        except ValueError:
            pass
        return self._render(with_one_system_message(conversation, everywhere=True), variables)

    def _render(self, conversation: Sequence[Message], variables: Mapping[str, Any]) -> str:
        as_text = self._takes_text or not self._takes_parts
        messages = list(conversation) if as_text else [as_parts(message) for message in conversation]
        try:
            return self._template.render({**variables, "messages": messages})
        except Exception as error:  # a template may raise any class
            raise ValueError(f"the chat template refused the messages: {error}") from error


def parsed(source: str, name: str) -> Template:
    """Returns a template. Raises ValueError, which calls it `name`, if it is not valid Jinja."""
    try:
        return _environment().from_string(source)
    except TemplateError as error:
        raise ValueError(f"{name} is not valid Jinja: {error}") from error


def _environment() -> ImmutableSandboxedEnvironment:
    """Returns Jinja as Hugging Face templates expect it, in a sandbox because strangers wrote the templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Converts `value` to JSON. Jinja's own filter would also escape HTML, which is wrong in a prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
