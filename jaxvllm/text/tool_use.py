"""`ToolUse`: the tools that a caller offers, and whether the model must use one."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxvllm.core.errors import ParameterError
from jaxvllm.core.structured_outputs import StructuredOutputsParams
from jaxvllm.text.assistant_message import AnswerFormat
from jaxvllm.text.reasoning import ReasoningFormat
from jaxvllm.text.tool_calls.format import ToolCallFormat
from jaxvllm.text.tool_calls.formats import named_call, required_calls
from jaxvllm.text.tool_schema import moved, pointer_to

_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any] | None = None  # a JSON schema; None: it has none
    description: str | None = None
    is_strict: bool = False  # a forced call keeps every rule of its schema; False: as many as can be enforced
    # The form of the one text that it takes. Where the model must call it, this text is the whole answer.
    form: StructuredOutputsParams | None = None

    def for_template(self) -> dict[str, Any]:
        """Returns the tool in OpenAI's form, which chat templates read."""
        told: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            told["description"] = self.description
        told["parameters"] = dict(self.parameters or _NO_PARAMETERS)
        return {"type": "function", "function": told}


@dataclass(frozen=True)
class ToolUse:
    """The tools of one request. With `required` the model must call at least one, with `named` the one called `name`.

    Constructing it raises ParameterError for a choice that the tools do not allow.
    """

    tools: tuple[Tool, ...] = ()
    choice: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None
    parallel: bool = True  # False: only the first call counts
    # The fields in which the caller gave them, for errors.
    tools_field: str = "tools"
    choice_field: str = "tool_choice"

    def __post_init__(self) -> None:
        tools, choice = self.tools_field, self.choice_field
        if self.choice in ("required", "named") and not self.tools:
            raise ParameterError(f"{choice} needs {tools}: give some, or leave it out", choice)
        if self.choice == "named" and self.name not in (names := [tool.name for tool in self.tools]):
            shown = ", ".join(names[:20])
            raise ParameterError(f"{choice} names {self.name!r:.60}, and the {tools} are {shown}", choice)
        if self.choice == "required" and len(self.tools) > 1:
            for tool in self.tools:
                if tool.form is not None and tool.form.grammar is not None:  # which cannot be a part of JSON
                    raise ParameterError(
                        f"{choice} forces one of several {tools}, and {tool.name!r:.60} has a grammar, which can "
                        "only be forced alone: name one of them",
                        choice,
                    )

    @property
    def is_forced(self) -> bool:
        """Whether the answer must be a call, so that a schema forces it."""
        return self.choice in ("required", "named")

    @property
    def is_free(self) -> bool:
        """Whether the model decides if it calls a tool, so that its own format of calls must be known."""
        return bool(self.tools) and self.choice == "auto"

    def for_template(self) -> list[dict[str, Any]] | None:
        """Returns the tools as chat templates read them, or None if there are none."""
        return [tool.for_template() for tool in self.tools] or None

    def structured_outputs(self) -> StructuredOutputsParams | None:
        """Returns the form that the answer must have, as in vLLM, or None if it is free.

        What cannot be enforced of the schema of a tool that is not strict is ignored, with a warning.
        """
        if not self.is_forced:
            return None
        if (tool := self._written_plainly) is not None:
            return tool.form
        form, strict = self._named_form() if self.choice == "named" else self._required_form()
        try:
            return StructuredOutputsParams(json=json.dumps(form, ensure_ascii=False), lenient=True, strict_parts=strict)
        except ParameterError as error:  # the schema is too large
            raise ParameterError(f"{self.tools_field}: {error}", self.tools_field) from error

    def answer_format(self, reasoning: ReasoningFormat | None, calls: ToolCallFormat | None) -> AnswerFormat:
        """Returns how an answer is read. `calls` is the model's own format of calls."""
        if (tool := self._written_plainly) is not None:
            return AnswerFormat(reasoning, input_of=tool.name)
        if self.choice == "required":
            calls = required_calls()
        elif self.choice == "named" and self.name is not None:
            calls = named_call(self.name)
        elif not self.is_free:
            calls = None
        schemas = {tool.name: tool.parameters for tool in self.tools if tool.parameters is not None}
        return AnswerFormat(reasoning, calls, schemas, self.parallel)

    @property
    def _written_plainly(self) -> Tool | None:
        """The only tool that the model may call and must call, if it takes a text that has a form."""
        able = [tool for tool in self.tools if self.choice != "named" or tool.name == self.name]
        return able[0] if self.is_forced and len(able) == 1 and able[0].form is not None else None

    def _named_form(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Returns the schema of the arguments of the one tool that is called, and its strict parts."""
        tool = next(tool for tool in self.tools if tool.name == self.name)
        return dict(tool.parameters or _NO_PARAMETERS), ("#",) if tool.is_strict else ()

    def _required_form(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Returns the schema of a list of calls, and its strict parts."""
        # Each schema has a place of its own, to which its references lead: two tools may have definitions of one name.
        definitions: dict[str, Any] = {}
        strict = []
        calls = []
        for tool in self.tools:
            name = tool.name
            while name in definitions:  # two tools have the same name
                name += "'"
            place = pointer_to("$defs", name)
            definitions[name] = moved(tool.parameters or _NO_PARAMETERS, place)
            strict += [place] if tool.is_strict else []
            call = {"name": {"type": "string", "enum": [tool.name]}, "parameters": {"$ref": place}}
            calls.append({"properties": call, "required": ["name", "parameters"]})
        schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": calls}}
        if not self.parallel:  # further calls would not count, so the model need not write them
            schema["maxItems"] = 1
        return schema | {"$defs": definitions}, tuple(strict)
