"""The formats of tool calls by vLLM's names of their parsers, and which of them a chat template teaches."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from jaxvllm.text.reasoning import FORMATS
from jaxvllm.text.tool_calls.format import Header, Mark, ReadingState, ToolCallFormat, framed, state
from jaxvllm.text.tool_calls.headers import channel, numbered, plain
from jaxvllm.text.tool_calls.parameter_formats import (
    DEEPSEEK_V4,
    DEEPSEEK_V32,
    GLM45,
    HY_V3,
    LONGCAT,
    MINIMAX_M2,
    QWEN3_CODER,
    SEED_OSS,
    SOLAR_OPEN2,
    STEP3,
)


def _tagged_objects(opening: str, closing: str) -> dict[str, ReadingState]:
    """Returns the states of formats with a JSON object between two marks."""
    return {
        "content": state("content", {opening: "call"}),
        "call": state("call", then="close"),
        "close": state("space", {closing: "content"}),
    }


def _arrays(*openings: str, closings: Mapping[str, str] | None = None) -> dict[str, ReadingState]:
    """Returns the states of formats with a JSON array of objects after a mark."""
    return {
        "content": state("content", dict.fromkeys(openings, "array")),
        "array": state("space", {"[": "call"}),
        "call": state("call", then="next"),
        "next": state("space", {",": "call", "]": "close" if closings else "content"}),
    } | ({"close": state("space", closings)} if closings else {})


def _python_list(opening: str, closing: str) -> dict[str, ReadingState]:
    """Returns the states of formats with a list of Python's calls after a mark."""
    return {
        "content": state("content", {opening: "open"}),
        "open": state("space", {"[": "name"}),
        "name": state("header", {"(": "keywords"}, header=plain),
        "keywords": state("keywords", then="next"),
        "next": state("space", {",": "name", "]": "close"}),
        "close": state("space", {closing: "content"}, otherwise="content"),
    }


def _gemma(opening: str, closing: str, quote: str) -> dict[str, ReadingState]:
    """Returns the states of formats with calls in Gemma's notation between two marks."""
    return {
        "content": state("content", {opening: "open"}),
        "open": state("space", {"call:": "name"}),
        "name": state("header", {}, Mark("{", "object", stays=True), header=plain),
        "object": state("object", then="close", quote=quote),
        "close": state("space", {closing: "content"}),
    }


HERMES = ToolCallFormat(_tagged_objects("<tool_call>", "</tool_call>"), signs=(("<tool_call>",),))

ERNIE45 = ToolCallFormat(framed(HERMES.states, FORMATS["ernie45"].frame), signs=(("<tool_call>", "<response>"),))

LLAMA3_JSON = ToolCallFormat(
    {
        "start": state("space", {"<|python_tag|>": "call"}, Mark("{", "call", stays=True)),
        "content": state("content", {"<|python_tag|>": "call"}),
        "call": state("call", then="next", is_bare=True),
        "next": state("space", {";": "call", "<|python_tag|>": "call"}),
    },
    start="start",
    signs=(("<|python_tag|>",), ('{"name": function name, "parameters"',)),
)

PYTHONIC = ToolCallFormat(
    _python_list("<|python_start|>", "<|python_end|>")
    | {"start": state("space", {"[": "name", "<|python_start|>": "open"})},
    start="start",
    signs=(("[func_name1(params_name1=params_value1",), ("<|python_start|>",)),
)

LFM2 = ToolCallFormat(
    _python_list("<|tool_call_start|>", "<|tool_call_end|>"), signs=(("<|tool_list_start|>",), ("<|tool_call_start|>",))
)

# Each call has a line of its own.
OLMO3 = ToolCallFormat(
    {
        "content": state("content", {"<function_calls>": "next"}),
        "next": state("space", {"</function_calls>": "content"}, otherwise="name"),
        "name": state("header", {"(": "keywords"}, header=plain),
        "keywords": state("keywords", then="next"),
    },
    signs=(("<function_calls>",),),
)

# From version 11 of Mistral's tokenizer on, each call has a mark of its own; before, one array had all calls.
MISTRAL = ToolCallFormat(
    {
        "content": state("content", {"[TOOL_CALLS]": "open"}),
        "open": state("space", {"[": "call"}, otherwise="name"),
        "call": state("call", then="next"),
        "next": state("space", {",": "call", "]": "content"}),
        "name": state(
            "header",
            {"[ARGS]": "arguments", "[CALL_ID]": "id"},
            Mark("{", "arguments", stays=True),
            header=plain,
        ),
        "id": state("header", {"[ARGS]": "arguments"}, header=lambda text: Header()),
        "arguments": state("arguments", then="after"),
        "after": state("space", {"[TOOL_CALLS]": "open"}),
    },
    ids="mistral",
    signs=(("[TOOL_CALLS]",),),
)

_DEEPSEEK = {
    "content": state("content", {"<｜tool▁calls▁begin｜>": "section"}),
    "section": state("space", {"<｜tool▁call▁begin｜>": "name", "<｜tool▁calls▁end｜>": "content"}),
    "close": state("space", {"<｜tool▁call▁end｜>": "section"}),
}

DEEPSEEK_V31 = ToolCallFormat(
    _DEEPSEEK
    | {
        "name": state("header", {"<｜tool▁sep｜>": "arguments"}, header=plain),
        "arguments": state("arguments", then="close"),
    },
    signs=(("<｜tool▁calls▁begin｜>",),),
)

DEEPSEEK_V3 = ToolCallFormat(
    _DEEPSEEK
    | {
        "section": state("space", {"<｜tool▁call▁begin｜>": "kind", "<｜tool▁calls▁end｜>": "content"}),
        "kind": state("space", {"function<｜tool▁sep｜>": "name"}),
        "name": state("header", {"```json": "arguments"}, header=plain),
        "arguments": state("arguments", then="fence"),
        "fence": state("space", {"```": "close"}),
    },
    signs=(("<｜tool▁calls▁begin｜>", "```json"),),
)

KIMI_K2 = ToolCallFormat(
    {
        "content": state("content", {"<|tool_calls_section_begin|>": "section"}),
        "section": state("space", {"<|tool_call_begin|>": "name", "<|tool_calls_section_end|>": "content"}),
        "name": state("header", {"<|tool_call_argument_begin|>": "arguments"}, header=numbered),
        "arguments": state("arguments", then="close"),
        "close": state("space", {"<|tool_call_end|>": "section"}),
    },
    signs=(("<|tool_calls_section_begin|>",),),
)

# gpt-oss. An answer is several messages, each with a header; reasoning is one of their channels.
HARMONY = ToolCallFormat(
    {
        "start": state(
            "space",
            {"<|start|>": "header"},
            Mark("<|channel|>", "header", stays=True),
            Mark("to=", "header", stays=True),
            Mark("assistant<", "header", stays=True),
        ),
        "header": state("header", {"<|message|>": "content"}, header=channel),
        "content": state("content", {"<|end|>": "between", "<|return|>": "between", "<|start|>": "header"}),
        "reasoning": state("reasoning", {"<|end|>": "between", "<|start|>": "header"}),
        "arguments": state("arguments", then="between"),
        "between": state(
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
    | {"start": state("space", {"<|tool_call|>": "array", "<tool_call>": "array"}, Mark("[", "array", stays=True))},
    start="start",
    signs=(("<|tool_call|>",),),
)

GRANITE_20B_FC = ToolCallFormat(
    {
        "content": state("content", {"<function_call>": "call"}),
        "call": state("call", then="next"),
        "next": state("space", {"<function_call>": "call"}),
    },
    signs=(("<function_call>",),),
)

JAMBA = ToolCallFormat(_arrays("<tool_calls>", closings={"</tool_calls>": "content"}), signs=(("<tool_calls>[",),))

COHERE_COMMAND = ToolCallFormat(
    framed(_arrays("<|START_ACTION|>", closings={"<|END_ACTION|>": "content"}), FORMATS["cohere_command3"].frame),
    signs=(("<|START_ACTION|>",),),
)

# The name of the function is the only key of an object.
APERTUS = ToolCallFormat(
    {
        "content": state("content", {"<|tools_prefix|>": "array"}),
        "array": state("space", {"[": "object"}),
        "object": state("space", {"{": "key"}),
        "key": state("space", {'"': "name"}),
        "name": state("header", {'"': "colon"}, header=plain),
        "colon": state("space", {":": "arguments"}),
        "arguments": state("arguments", then="end"),
        "end": state("space", {"}": "next"}),
        "next": state("space", {",": "object", "]": "close"}),
        "close": state("space", {"<|tools_suffix|>": "content"}),
    },
    signs=(("<|tools_prefix|>",),),
)

INTERNLM = ToolCallFormat(
    _tagged_objects("<|plugin|>", "<|action_end|>")
    | {
        "content": state("content", {"<|action_start|>": "kind"}),
        "kind": state("space", {"<|plugin|>": "call"}),
    },
    signs=(("<|action_start|>", "<|plugin|>"),),
)

_GIGACHAT3 = {"function call<|role_sep|>": "call", "<|function_call|>": "call"}

GIGACHAT3 = ToolCallFormat(
    {
        "content": state("content", {"<|message_sep|>": "content", **_GIGACHAT3}),
        "call": state("call", then="next"),
        "next": state("space", {"<|message_sep|>": "next", **_GIGACHAT3}),
    },
    signs=(("function call<|role_sep|>",), ("<|function_call|>", "<|message_sep|>")),
)

PHI4_MINI_JSON = ToolCallFormat(_arrays("functools"), signs=(("functools[",),))

_XLAM = _arrays("```json", "<tool_call>", closings={"```": "content", "</tool_call>": "content"})

# An array of calls, alone or within marks of other formats.
XLAM = ToolCallFormat(
    _XLAM
    | {
        "start": state("space", {}, *_XLAM["content"].marks, Mark("[", "array", stays=True)),
        "call": state("call", then="next", is_bare=True),
        "close": replace(_XLAM["close"], otherwise="content"),
    },
    start="start",
    signs=(('[{"name": "tool_call_name", "arguments"',),),
)

GEMMA4 = ToolCallFormat(_gemma("<|tool_call>", "<tool_call|>", '<|"|>'), signs=(("<|tool_call>", "<tool_call|>"),))

FUNCTIONGEMMA = ToolCallFormat(
    _gemma("<start_function_call>", "<end_function_call>", "<escape>"), signs=(("<start_function_call>",),)
)

# All text is content.
NO_CALLS = ToolCallFormat({"content": ReadingState("content")})

TOOL_CALL_FORMATS: Mapping[str, ToolCallFormat] = MappingProxyType(
    {
        "apertus": APERTUS,
        "cohere_command3": COHERE_COMMAND,
        "cohere_command4": COHERE_COMMAND,
        "deepseek_v3": DEEPSEEK_V3,
        "deepseek_v31": DEEPSEEK_V31,
        "deepseek_v32": DEEPSEEK_V32,
        "deepseek_v4": DEEPSEEK_V4,
        "ernie45": ERNIE45,
        "functiongemma": FUNCTIONGEMMA,
        "gemma4": GEMMA4,
        "gigachat3": GIGACHAT3,
        "glm45": GLM45,
        "glm47": GLM45,
        "granite": GRANITE,
        "granite-20b-fc": GRANITE_20B_FC,
        "granite4": HERMES,
        "hermes": HERMES,
        "hunyuan_a13b": JAMBA,
        "hy_v3": HY_V3,
        "internlm": INTERNLM,
        "jamba": JAMBA,
        "kimi_k2": KIMI_K2,
        "lfm2": LFM2,
        "ling3": GLM45,
        "llama3_json": LLAMA3_JSON,
        "llama4_json": LLAMA3_JSON,
        "llama4_pythonic": PYTHONIC,
        "longcat": LONGCAT,
        "mimo": QWEN3_CODER,
        "minimax_m2": MINIMAX_M2,
        "mistral": MISTRAL,
        "olmo3": OLMO3,
        "openai": HARMONY,
        "phi4_mini_json": PHI4_MINI_JSON,
        "poolside_v1": GLM45,
        "pythonic": PYTHONIC,
        "qwen3_coder": QWEN3_CODER,
        "qwen3_xml": QWEN3_CODER,
        "seed_oss": SEED_OSS,
        "solar_open2": SOLAR_OPEN2,
        "step3": STEP3,
        "step3p5": QWEN3_CODER,
        "xlam": XLAM,
    }
)

# Formats by the signs of a template, those with more signs before others that they contain.
_GUESSES = (
    HARMONY,
    HY_V3,
    GLM45,
    QWEN3_CODER,
    SEED_OSS,
    MINIMAX_M2,
    LONGCAT,
    DEEPSEEK_V32,
    DEEPSEEK_V4,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    STEP3,
    KIMI_K2,
    SOLAR_OPEN2,
    MISTRAL,
    PYTHONIC,
    LFM2,
    OLMO3,
    LLAMA3_JSON,
    GRANITE,
    PHI4_MINI_JSON,
    COHERE_COMMAND,
    APERTUS,
    GEMMA4,
    FUNCTIONGEMMA,
    INTERNLM,
    GIGACHAT3,
    JAMBA,
    XLAM,
    ERNIE45,
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

    def name(key: str) -> str:
        return key if key == "content" else f"answer {key}"

    def answering(text: str) -> Header | None:
        header = channel(text)
        return Header(to=name(answer.start)) if header is not None and header.to == "content" else header

    states = dict(HARMONY.states)
    for key, old in answer.states.items():
        marks = tuple(replace(mark, to=name(mark.to)) for mark in old.marks)
        if key == "content":
            states[key] = replace(states[key], marks=states[key].marks + marks)
        else:
            then, otherwise = (None if to is None else name(to) for to in (old.then, old.otherwise))
            states[name(key)] = replace(old, marks=marks, then=then, otherwise=otherwise)
    states["header"] = replace(HARMONY.states["header"], header=answering)
    return ToolCallFormat(states, HARMONY.start, answer.ids, is_forced=answer.is_forced)


def required_calls() -> ToolCallFormat:
    """Returns the format of an answer that is a JSON array of calls, and nothing else."""
    states = _arrays() | {"start": state("space", {}, Mark("[", "array", stays=True))}
    return ToolCallFormat(states, start="start", is_forced=True)


def named_call(name: str) -> ToolCallFormat:
    """Returns the format of an answer that is the arguments of one function as JSON, and nothing else."""
    return ToolCallFormat(
        {
            "content": ReadingState("content"),
            "arguments": state("arguments", then="content", name=name),
        },
        start="arguments",
        is_forced=True,
    )
