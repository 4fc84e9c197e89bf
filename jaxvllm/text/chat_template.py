"""Renders chat messages to a prompt with the checkpoint's Jinja template, in a sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxvllm.core.errors import ParameterError
from jaxvllm.text.chat_messages import (
    Message,
    as_parts,
    checked_messages,
    ends_with,
    text_of,
    with_one_system_message,
)
from jaxvllm.text.content_format import ContentFormat, find_content_format, tests_for_text

DEFAULT = "default"
TOOL_USE = "tool_use"  # the name that checkpoints give to their template with tools
# Marks the place where a continued message ends. A template may move it, but never splits it.
CONTINUE_HERE = "<<continue-from-here>>"


class GenerationTag(Extension):
    """The tag `{% generation %}...{% endgeneration %}`. It marks words to train on, and has no effect here."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """The named templates of one checkpoint, compiled on first use.

    `special_tokens` (bos_token, eos_token, ...) are variables of every template. When a template fails or refuses the
    messages, rendering raises a ValueError with the template's own message.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        content_format: ContentFormat | None = None,
    ) -> None:
        """Takes the `content_format` that the templates expect. None: what they show."""
        self._sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._content_format = content_format
        self._compiled: dict[str, _Compiled] = {}

    def replaced(self, source: str | None = None, content_format: ContentFormat | None = None) -> "ChatTemplate":
        """Returns the templates with another content format, or `source` as the only one, with the same variables."""
        sources = self._sources if source is None else {DEFAULT: source}
        return ChatTemplate(sources, self._special_tokens, content_format)

    @property
    def source_with_tools(self) -> str | None:
        """The source of the template that renders conversations with tools, or None if there is no template."""
        return self._sources.get(TOOL_USE) or self._sources.get(DEFAULT)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Renders the prompt for `messages`. Encode it without adding special tokens, since the template writes them.

        `continue_final_message` leaves the last message open, so that the model continues it. `variables` are passed
        to the template unchanged (for example enable_thinking=False).
        """
        if add_generation_prompt and continue_final_message:
            raise ParameterError(
                "add_generation_prompt and continue_final_message exclude each other: set one to False",
                "add_generation_prompt",
            )
        template = self._template(TOOL_USE if tools and TOOL_USE in self._sources else DEFAULT)
        conversation = template.checked(messages)
        if continue_final_message:
            conversation[-1] = ends_with(conversation[-1], CONTINUE_HERE)
        fixed = dict(tools=_checked_tools(tools), add_generation_prompt=add_generation_prompt)
        prompt = template.render(conversation, self._special_tokens | variables | fixed)
        if not continue_final_message:
            return prompt
        head, mark, _ = prompt.rpartition(CONTINUE_HERE)
        if not mark:
            raise ParameterError(
                "the chat template leaves out the final message: continue_final_message cannot continue it",
                "continue_final_message",
            )
        return head

    def _template(self, name: str) -> "_Compiled":
        if name not in self._sources:
            raise ValueError("the checkpoint has no chat template: use a chat model, or generate() with a prompt")
        if name not in self._compiled:
            self._compiled[name] = _Compiled(self._sources[name], self._content_format)
        return self._compiled[name]


class _Compiled:
    """One template, and the form in which it takes messages."""

    def __init__(self, source: str, content_format: ContentFormat | None) -> None:
        self._template = _compiled(source, "the checkpoint's chat template")
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


def read_chat_template(given: str) -> str:
    """Returns the chat template that is given as a file or as itself. Raises ValueError if it is not valid Jinja."""
    try:
        source = Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        if not any(mark in given for mark in "{}\n"):
            raise ValueError(f"chat_template {given} is neither a file that can be read nor a template") from error
        source = given
    _compiled(source, "chat_template")
    return source


def _compiled(source: str, name: str) -> Template:
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


def _checked_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    if not tools:
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ParameterError(f"tools must be a list of JSON schemas (objects), not {str(tools)[:60]!r}", "tools")
    return [dict(tool) for tool in tools]
