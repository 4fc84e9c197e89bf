"""The tools of `/v1/responses`: what a request declares, and the functions that the model gets to know instead."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, FailFast, Field, Tag

from jaxvllm.core.errors import ParameterError
from jaxvllm.core.structured_outputs import StructuredOutputsParams
from jaxvllm.server.protocol.fields import MAX_TOOLS, FunctionName, Strict, Strings, by_type, neutral
from jaxvllm.text.assistant_message import INPUT
from jaxvllm.text.tool_use import Tool, ToolUse

# The tools that OpenAI's own servers run, or that only their models know.
HOSTED = (
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
    "file_search",
    "code_interpreter",
    "image_generation",
    "computer",
    "computer_use",
    "computer_use_preview",
    "local_shell",
    "shell",
    "apply_patch",
    "mcp",
    "tool_search",
    "programmatic_tool_calling",
)


class _ClientTool(Strict):
    """The fields that functions and custom tools have in common."""

    name: FunctionName
    description: str | None = None
    defer_loading: bool | None = None  # has no effect: the model sees all tools at once
    allowed_callers: Strings | None = neutral(["direct"])
    is_async: bool | None = Field(default=None, alias="async")  # has no effect: the client runs the tool


class FunctionTool(_ClientTool):
    """A function that the model may call."""

    type: Literal["function"]
    parameters: dict[str, Any] | None = None  # a JSON schema; null: the function has no parameters
    output_schema: dict[str, Any] | None = None  # for the client's own use
    # true: a schema of which something cannot be enforced is refused. Only tool_choice "required" and named functions
    # force it.
    strict: bool | None = None


class CustomInputFormat(Strict):
    """The form of a custom tool's input. A call that `tool_choice` forces has it; otherwise the model is told of it."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None  # of a grammar
    definition: Annotated[str, Field(min_length=1)] | None = None  # of a grammar


class CustomTool(_ClientTool):
    """A tool that takes one text, which the model writes freely or by a grammar."""

    type: Literal["custom"]
    format: CustomInputFormat | None = None  # null: any text


type ClientTool = Annotated[
    Annotated[FunctionTool, Tag("<function>")] | Annotated[CustomTool, Tag("<custom>")], by_type("function", "custom")
]


class NamespaceTool(Strict):
    """Several tools under one name. The model gets to know each as a function `namespace__name`."""

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None  # begins the description of each of its tools
    tools: Annotated[list[ClientTool], FailFast(), Field(min_length=1, max_length=MAX_TOOLS)]


class HostedTool(Strict):
    """A tool that cannot run here: it is ignored, with a line in the server's log, unless `tool_choice` forces it."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal[HOSTED]  # type: ignore[valid-type]


type AnyTool = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[CustomTool, Tag("<custom>")]
    | Annotated[NamespaceTool, Tag("<namespace>")]
    | Annotated[HostedTool, Tag("<hosted>")],
    by_type("function", "custom", "namespace", others=dict.fromkeys(HOSTED, "hosted")),
]
type AnyTools = Annotated[list[AnyTool], FailFast(), Field(max_length=MAX_TOOLS)]


class NamedFunction(Strict):
    """A function of `tools`."""

    type: Literal["function"]
    name: FunctionName


class NamedCustomTool(Strict):
    """A custom tool of `tools`."""

    type: Literal["custom"]
    name: FunctionName


type NamedTool = Annotated[
    Annotated[NamedFunction, Tag("<function>")]
    | Annotated[NamedCustomTool, Tag("<custom>")]
    | Annotated[HostedTool, Tag("<hosted>")],
    by_type("function", "custom", others=dict.fromkeys(HOSTED, "hosted")),
]


class AllowedTools(Strict):
    """The tools of `tools` that the model may call now."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], FailFast(), Field(min_length=1, max_length=MAX_TOOLS)]


type OneOrSomeTools = Annotated[
    Annotated[NamedFunction, Tag("<function>")]
    | Annotated[NamedCustomTool, Tag("<custom>")]
    | Annotated[AllowedTools, Tag("<allowed_tools>")]
    | Annotated[HostedTool, Tag("<hosted>")],
    by_type("function", "custom", "allowed_tools", others=dict.fromkeys(HOSTED, "hosted")),
]
type ToolChoice = Literal["auto", "none", "required"] | OneOrSomeTools


def model_name(namespace: str | None, name: str) -> str:
    """Returns the name by which the model knows a tool."""
    return name if namespace is None else f"{namespace}__{name}"


def as_arguments(text: str) -> str:
    """Returns the input of a custom tool as the arguments of the function that stands for it."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


@dataclass(frozen=True)
class OfferedTool:
    """A tool that the client runs, and the function by which the model knows it."""

    name: str  # the client's
    namespace: str | None
    is_custom: bool
    function: Tool


@dataclass(frozen=True)
class OfferedTools:
    """All tools of one request that its client runs. Constructing it raises ParameterError for names that clash."""

    tools: tuple[OfferedTool, ...] = ()
    hosted: tuple[str, ...] = ()  # the types of those that cannot run here

    def __post_init__(self) -> None:
        if len(self.tools) > MAX_TOOLS:
            raise ParameterError(f"tools has {len(self.tools)} tools, the limit is {MAX_TOOLS}: give fewer", "tools")
        for tool in self.tools:
            known = self.by_name[tool.function.name]
            if (known.namespace, known.is_custom) != (tool.namespace, tool.is_custom):
                raise ParameterError(f"two tools have the name {tool.function.name!r:.60}: rename one", "tools")

    @classmethod
    def of(cls, declared: Sequence[AnyTool]) -> "OfferedTools":
        """Returns the tools that a request declares. Raises ParameterError for a format that is not complete."""
        hosted = tuple(tool.type for tool in declared if isinstance(tool, HostedTool))
        return cls(tuple(_flattened(declared)), hosted)

    @cached_property
    def by_name(self) -> Mapping[str, OfferedTool]:
        """The tools by the model's name for them."""
        return {tool.function.name: tool for tool in self.tools}

    def use(self, choice: ToolChoice | None, parallel: bool) -> ToolUse:
        """Returns what the model may call. Raises ParameterError for a choice that the tools do not allow."""
        functions = tuple(tool.function for tool in self.tools)
        match choice:
            case HostedTool(type=kind):
                raise ParameterError(
                    f"tool_choice forces {kind!r}, which cannot run here: choose a function or a custom tool, or leave "
                    "tool_choice out",
                    "tool_choice",
                )
            case NamedFunction() | NamedCustomTool():
                return ToolUse(functions, "named", self._find(choice, "tool_choice").function.name, parallel)
            case AllowedTools(mode=mode, tools=allowed):
                wanted = {
                    self._find(one, f"tool_choice.tools[{index}]").function.name
                    for index, one in enumerate(allowed)
                    if not isinstance(one, HostedTool)
                }
                some = tuple(function for function in functions if function.name in wanted)
                return ToolUse(some, mode, parallel=parallel)
            case _:
                return ToolUse(functions, choice or "auto", parallel=parallel)

    def _find(self, wanted: NamedFunction | NamedCustomTool, field: str) -> OfferedTool:
        """Returns the tool of this name, which may leave out a namespace if no other tool has the name."""
        is_custom = isinstance(wanted, NamedCustomTool)
        kind = [tool for tool in self.tools if tool.is_custom is is_custom]
        found = [tool for tool in kind if tool.function.name == wanted.name]
        found = found or [tool for tool in kind if tool.name == wanted.name]
        if len({tool.function.name for tool in found}) == 1:
            return found[0]
        if not self.tools:
            raise ParameterError(f"{field} needs tools: give some, or leave it out", field)
        names = [tool.function.name for tool in kind][:20]
        what = "custom tools" if is_custom else "tools"
        raise ParameterError(f"{field} is {wanted.name!r:.60}, and the {what} are {names}", field)


def _flattened(declared: Sequence[AnyTool]) -> Iterator[OfferedTool]:
    for index, tool in enumerate(declared):
        match tool:
            case FunctionTool() | CustomTool():
                yield _offered(tool, None, f"tools[{index}]")
            case NamespaceTool(name=namespace, description=about, tools=inner):
                for number, one in enumerate(inner):
                    yield _offered(one, namespace, f"tools[{index}].tools[{number}]", about)


def _offered(
    tool: FunctionTool | CustomTool, namespace: str | None, field: str, about: str | None = None
) -> OfferedTool:
    name = model_name(namespace, tool.name)
    told = [text for text in (about, tool.description) if text]
    if isinstance(tool, FunctionTool):
        description = "\n".join(told) if told else tool.description
        return OfferedTool(tool.name, namespace, False, Tool(name, tool.parameters, description, tool.strict is True))
    form, text = None, {"type": "string", "description": "the whole input, as plain text"}
    if tool.format is not None and tool.format.type == "grammar":
        syntax, definition = tool.format.syntax, tool.format.definition
        if syntax is None or definition is None:
            where = f"{field}.format.{'syntax' if syntax is None else 'definition'}"
            raise ParameterError(f"{where} is missing", where)
        told.append(f"The input must match this {syntax} grammar:\n{definition}")
        if syntax == "lark":
            form = StructuredOutputsParams(grammar=definition)
        else:
            form = StructuredOutputsParams(regex=definition)
            text["pattern"] = f"^(?:{definition})$"
    parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    return OfferedTool(
        tool.name, namespace, True, Tool(name, parameters, "\n\n".join(told) or None, form is not None, form)
    )
