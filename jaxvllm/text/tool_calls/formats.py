"""The formats of tool calls by vLLM's names of their parsers, and which of them a chat template teaches."""

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from jaxvllm.text.tool_calls.format import Header, Mark, ReadingState, ToolCallFormat

_NAME = re.compile(r"\s*([^\s<>()\[\]{}'\"`,=|]+)\s*")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")


def _plain(text: str) -> Header | None:
    """Reads a header that is the function's name."""
    match = _NAME.fullmatch(text)
    return Header(match[1]) if match else None


def _quoted(text: str) -> Header | None:
    """Reads a header that is the function's name, perhaps in quotes."""
    return _plain(text.strip().strip('"'))


def _numbered(text: str) -> Header | None:
    """Reads a header such as functions.get_weather:0, which is the call's id as well."""
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    name = match[1].removeprefix("functions.").partition(":")[0]
    return Header(name, id=match[1] if len(match[1]) >= 9 else None) if name else None


def _channel(text: str) -> Header | None:
    """Reads the header of a message of harmony, which names its channel and who it is for."""
    if match := _RECIPIENT.search(text):
        return Header(match[1], to="arguments")
    return Header(to="reasoning" if "analysis" in text else "content")


def _state(reads: str, marks: Mapping[str, str] | None = None, *others: Mark, **options: object) -> ReadingState:
    simple = tuple(Mark(text, to) for text, to in (marks or {}).items())
    return ReadingState(reads, simple + others, **options)  # type: ignore[arg-type]


def _tagged_objects(opening: str, closing: str) -> dict[str, ReadingState]:
    """Returns the states of formats with a JSON object between two marks."""
    return {
        "content": _state("content", {opening: "call"}),
        "call": _state("call", then="close"),
        "close": _state("space", {closing: "content"}),
    }


def _arrays(*openings: str, closings: Mapping[str, str] | None = None) -> dict[str, ReadingState]:
    """Returns the states of formats with a JSON array of objects after a mark."""
    return {
        "content": _state("content", dict.fromkeys(openings, "array")),
        "array": _state("space", {"[": "call"}),
        "call": _state("call", then="next"),
        "next": _state("space", {",": "call", "]": "close" if closings else "content"}),
    } | ({"close": _state("space", closings)} if closings else {})


def _xml(section: Mapping[str, str], closing: str) -> dict[str, ReadingState]:
    """Returns the states of Qwen's XML, in which each call is a function with parameters."""
    return {
        "content": _state("content", {**section, "<function=": "name"}),
        "open": _state("space", {"<function=": "name"}),
        "name": _state("header", {">": "parameters"}, header=_quoted),
        "parameters": _state("space", {"<parameter=": "key"}, Mark("</function>", "close", ends_call=True)),
        "key": _state("key", {">": "value"}),
        "value": _state("value", {"</parameter>": "parameters"}),
        "close": _state("space", {closing: "content", "<function=": "name"}),
    }


HERMES = ToolCallFormat(_tagged_objects("<tool_call>", "</tool_call>"), signs=(("<tool_call>",),))

QWEN3_CODER = ToolCallFormat(
    _xml({"<tool_call>": "open"}, "</tool_call>"), signs=(("<tool_call>", "<function="), ("<tool_call>", "<parameter="))
)

SEED_OSS = ToolCallFormat(_xml({"<seed:tool_call>": "open"}, "</seed:tool_call>"), signs=(("<seed:tool_call>",),))

GLM45 = ToolCallFormat(
    {
        "content": _state("content", {"<tool_call>": "name"}),
        "name": _state(
            "header",
            {},
            Mark("<arg_key>", "parameters", stays=True),
            Mark("</tool_call>", "parameters", stays=True),
            header=_plain,
        ),
        "parameters": _state("space", {"<arg_key>": "key"}, Mark("</tool_call>", "content", ends_call=True)),
        "key": _state("key", {"</arg_key>": "between"}),
        "between": _state("space", {"<arg_value>": "value"}),
        "value": _state("value", {"</arg_value>": "parameters"}, trims="space", untyped="json"),
    },
    signs=(("<tool_call>", "<arg_key>"),),
)

LLAMA3_JSON = ToolCallFormat(
    {
        "start": _state("space", {"<|python_tag|>": "call"}, Mark("{", "call", stays=True)),
        "content": _state("content", {"<|python_tag|>": "call"}),
        "call": _state("call", then="next", is_bare=True),
        "next": _state("space", {";": "call", "<|python_tag|>": "call"}),
    },
    start="start",
    signs=(("<|python_tag|>",), ('{"name": function name, "parameters"',)),
)

PYTHONIC = ToolCallFormat(
    {
        "start": _state("space", {"[": "name", "<|python_start|>": "open"}),
        "content": _state("content", {"<|python_start|>": "open"}),
        "open": _state("space", {"[": "name"}),
        "name": _state("header", {"(": "keywords"}, header=_plain),
        "keywords": _state("keywords", then="next"),
        "next": _state("space", {",": "name", "]": "close"}),
        "close": _state("space", {"<|python_end|>": "content"}, otherwise="content"),
    },
    start="start",
    signs=(("[func_name1(params_name1=params_value1",), ("<|python_start|>",)),
)

# From version 11 of Mistral's tokenizer on, each call has a mark of its own; before, one array had all calls.
MISTRAL = ToolCallFormat(
    {
        "content": _state("content", {"[TOOL_CALLS]": "open"}),
        "open": _state("space", {"[": "call"}, otherwise="name"),
        "call": _state("call", then="next"),
        "next": _state("space", {",": "call", "]": "content"}),
        "name": _state(
            "header",
            {"[ARGS]": "arguments", "[CALL_ID]": "id"},
            Mark("{", "arguments", stays=True),
            header=_plain,
        ),
        "id": _state("header", {"[ARGS]": "arguments"}, header=lambda text: Header()),
        "arguments": _state("arguments", then="after"),
        "after": _state("space", {"[TOOL_CALLS]": "open"}),
    },
    ids="mistral",
    signs=(("[TOOL_CALLS]",),),
)

_DEEPSEEK = {
    "content": _state("content", {"<｜tool▁calls▁begin｜>": "section"}),
    "section": _state("space", {"<｜tool▁call▁begin｜>": "name", "<｜tool▁calls▁end｜>": "content"}),
    "close": _state("space", {"<｜tool▁call▁end｜>": "section"}),
}

DEEPSEEK_V31 = ToolCallFormat(
    _DEEPSEEK
    | {
        "name": _state("header", {"<｜tool▁sep｜>": "arguments"}, header=_plain),
        "arguments": _state("arguments", then="close"),
    },
    signs=(("<｜tool▁calls▁begin｜>",),),
)

DEEPSEEK_V3 = ToolCallFormat(
    _DEEPSEEK
    | {
        "section": _state("space", {"<｜tool▁call▁begin｜>": "kind", "<｜tool▁calls▁end｜>": "content"}),
        "kind": _state("space", {"function<｜tool▁sep｜>": "name"}),
        "name": _state("header", {"```json": "arguments"}, header=_plain),
        "arguments": _state("arguments", then="fence"),
        "fence": _state("space", {"```": "close"}),
    },
    signs=(("<｜tool▁calls▁begin｜>", "```json"),),
)

KIMI_K2 = ToolCallFormat(
    {
        "content": _state("content", {"<|tool_calls_section_begin|>": "section"}),
        "section": _state("space", {"<|tool_call_begin|>": "name", "<|tool_calls_section_end|>": "content"}),
        "name": _state("header", {"<|tool_call_argument_begin|>": "arguments"}, header=_numbered),
        "arguments": _state("arguments", then="close"),
        "close": _state("space", {"<|tool_call_end|>": "section"}),
    },
    signs=(("<|tool_calls_section_begin|>",),),
)

# gpt-oss. An answer is several messages, each with a header; reasoning is one of their channels.
HARMONY = ToolCallFormat(
    {
        "start": _state(
            "space",
            {"<|start|>": "header"},
            Mark("<|channel|>", "header", stays=True),
            Mark("to=", "header", stays=True),
            Mark("assistant<", "header", stays=True),
        ),
        "header": _state("header", {"<|message|>": "content"}, header=_channel),
        "content": _state("content", {"<|end|>": "between", "<|return|>": "between", "<|start|>": "header"}),
        "reasoning": _state("reasoning", {"<|end|>": "between", "<|start|>": "header"}),
        "arguments": _state("arguments", then="between"),
        "between": _state(
            "space",
            {"<|start|>": "header", "<|call|>": "between", "<|end|>": "between"},
            Mark("<|channel|>", "header", stays=True),
        ),
    },
    start="start",
    signs=(("<|channel|>", "functions."),),
)

GRANITE = ToolCallFormat(
    _arrays("<|tool_call|>", "<tool_call>")
    | {"start": _state("space", {"<|tool_call|>": "array", "<tool_call>": "array"}, Mark("[", "array", stays=True))},
    start="start",
    signs=(("<|tool_call|>",),),
)

GRANITE_20B_FC = ToolCallFormat(
    {
        "content": _state("content", {"<function_call>": "call"}),
        "call": _state("call", then="next"),
        "next": _state("space", {"<function_call>": "call"}),
    },
    signs=(("<function_call>",),),
)

JAMBA = ToolCallFormat(_arrays("<tool_calls>", closings={"</tool_calls>": "content"}))

PHI4_MINI_JSON = ToolCallFormat(_arrays("functools"), signs=(("functools[",),))

# All text is content.
NO_CALLS = ToolCallFormat({"content": ReadingState("content")})

TOOL_CALL_FORMATS: Mapping[str, ToolCallFormat] = MappingProxyType(
    {
        "deepseek_v3": DEEPSEEK_V3,
        "deepseek_v31": DEEPSEEK_V31,
        "glm45": GLM45,
        "granite": GRANITE,
        "granite-20b-fc": GRANITE_20B_FC,
        "granite4": HERMES,
        "hermes": HERMES,
        "jamba": JAMBA,
        "kimi_k2": KIMI_K2,
        "llama3_json": LLAMA3_JSON,
        "llama4_json": LLAMA3_JSON,
        "llama4_pythonic": PYTHONIC,
        "mistral": MISTRAL,
        "openai": HARMONY,
        "phi4_mini_json": PHI4_MINI_JSON,
        "pythonic": PYTHONIC,
        "qwen3_coder": QWEN3_CODER,
        "qwen3_xml": QWEN3_CODER,
        "seed_oss": SEED_OSS,
    }
)

# Formats by the signs of a template, those with more signs before others that they contain.
_GUESSES = (
    HARMONY,
    GLM45,
    QWEN3_CODER,
    SEED_OSS,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    KIMI_K2,
    MISTRAL,
    PYTHONIC,
    LLAMA3_JSON,
    GRANITE,
    PHI4_MINI_JSON,
    HERMES,
)


def guessed_format(template: str) -> ToolCallFormat | None:
    """Returns the format that the source of a chat template teaches, or None if that is not plain."""
    for format in _GUESSES:
        if any(all(sign in template for sign in signs) for signs in format.signs):
            return format
    return None


def in_harmony(answer: ToolCallFormat) -> ToolCallFormat:
    """Returns harmony with an answer that has a format of its own, in the channel that otherwise has content."""

    def name(state: str) -> str:
        return state if state == "content" else f"answer {state}"

    def channel(text: str) -> Header | None:
        header = _channel(text)
        return Header(to=name(answer.start)) if header is not None and header.to == "content" else header

    states = dict(HARMONY.states)
    for key, state in answer.states.items():
        marks = tuple(replace(mark, to=name(mark.to)) for mark in state.marks)
        if key == "content":
            states[key] = replace(states[key], marks=states[key].marks + marks)
        else:
            then, otherwise = (None if to is None else name(to) for to in (state.then, state.otherwise))
            states[name(key)] = replace(state, marks=marks, then=then, otherwise=otherwise)
    states["header"] = replace(HARMONY.states["header"], header=channel)
    return ToolCallFormat(states, HARMONY.start, answer.ids, is_forced=answer.is_forced)


def required_calls() -> ToolCallFormat:
    """Returns the format of an answer that is a JSON array of calls, and nothing else."""
    states = _arrays() | {"start": _state("space", {}, Mark("[", "array", stays=True))}
    return ToolCallFormat(states, start="start", is_forced=True)


def named_call(name: str) -> ToolCallFormat:
    """Returns the format of an answer that is the arguments of one function as JSON, and nothing else."""
    return ToolCallFormat(
        {
            "content": ReadingState("content"),
            "arguments": _state("arguments", then="content", name=name),
        },
        start="arguments",
        is_forced=True,
    )
