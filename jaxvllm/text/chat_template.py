"""Renders chat messages to a prompt with the checkpoint's Jinja template.

Jinja is imported when a template is compiled: 0.02 s that an engine's start need not wait for.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxvllm.core.errors import ParameterError
from jaxvllm.text.chat_messages import ends_with

if TYPE_CHECKING:
    from jaxvllm.text.compiled_template import CompiledTemplate
    from jaxvllm.text.content_format import ContentFormat

DEFAULT = "default"
TOOL_USE = "tool_use"  # the name that checkpoints give to their template with tools
# Marks the place where a continued message ends. A template may move it, but never splits it.
CONTINUE_HERE = "<<continue-from-here>>"


class ChatTemplate:
    """The named templates of one checkpoint, compiled on first use.

    `special_tokens` (bos_token, eos_token, ...) are variables of every template. When a template fails or refuses the
    messages, rendering raises a ValueError with the template's own message.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        content_format: "ContentFormat | None" = None,
    ) -> None:
        """Takes the `content_format` that the templates expect. None: what they show."""
        self._sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._content_format = content_format
        self._compiled: dict[str, CompiledTemplate] = {}

    def replaced(self, source: str | None = None, content_format: "ContentFormat | None" = None) -> "ChatTemplate":
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

    def _template(self, name: str) -> "CompiledTemplate":
        if name not in self._sources:
            raise ValueError("the checkpoint has no chat template: use a chat model, or generate() with a prompt")
        if name not in self._compiled:
            from jaxvllm.text.compiled_template import CompiledTemplate

            self._compiled[name] = CompiledTemplate(self._sources[name], self._content_format)
        return self._compiled[name]


def read_chat_template(given: str) -> str:
    """Returns the chat template that is given as a file or as itself. Raises ValueError if it is not valid Jinja."""
    from jaxvllm.text.compiled_template import parsed

    try:
        source = Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        if not any(mark in given for mark in "{}\n"):
            raise ValueError(f"chat_template {given} is neither a file that can be read nor a template") from error
        source = given
    parsed(source, "chat_template")
    return source


def _checked_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    if not tools:
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ParameterError(f"tools must be a list of JSON schemas (objects), not {str(tools)[:60]!r}", "tools")
    return [dict(tool) for tool in tools]
