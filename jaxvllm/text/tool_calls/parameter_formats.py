"""The formats in which each parameter of a call has marks of its own, and its value is plain text."""

from collections.abc import Mapping

from jaxvllm.text.tool_calls.format import Mark, ReadingState, ToolCallFormat, state
from jaxvllm.text.tool_calls.headers import plain, quoted


def _functions(section: Mapping[str, str], closing: str) -> dict[str, ReadingState]:
    """Returns the states of Qwen's XML, in which each call is a function with parameters."""
    return {
        "content": state("content", {**section, "<function=": "name"}),
        "open": state("space", {"<function=": "name"}),
        "name": state("header", {">": "parameters"}, header=quoted),
        "parameters": state("space", {"<parameter=": "key"}, Mark("</function>", "close", ends_call=True)),
        "key": state("key", {">": "value"}),
        "value": state("value", {"</parameter>": "parameters"}),
        "close": state("space", {closing: "content", "<function=": "name"}),
    }


def _invokes(tag: str, after: str) -> dict[str, ReadingState]:
    """Returns the states of calls that are invoke tags with parameter tags, whose names begin with `tag`."""
    return {
        "name": state("header", {'">': "parameters"}, header=plain),
        "parameters": state(
            "space", {f'<{tag}parameter name="': "key"}, Mark(f"</{tag}invoke>", after, ends_call=True)
        ),
        "key": state("key", {'">': "value"}),
        "value": state("value", {f"</{tag}parameter>": "parameters"}, trims="nothing"),
    }


def _pairs(closing: str, after: str, tag: str = "") -> dict[str, ReadingState]:
    """Returns the states of calls with pairs of tags, one for a parameter's name and one for its value."""
    key = f"<{tag}arg_key>"
    return {
        "name": state(
            "header", {}, Mark(key, "parameters", stays=True), Mark(closing, "parameters", stays=True), header=plain
        ),
        "parameters": state("space", {key: "key"}, Mark(closing, after, ends_call=True)),
        "key": state("key", {f"</{tag}arg_key>": "between"}),
        "between": state("space", {f"<{tag}arg_value>": "value"}),
        "value": state("value", {f"</{tag}arg_value>": "parameters"}, trims="space", untyped="json"),
    }


def _dsml(section: str) -> dict[str, ReadingState]:
    """Returns the states of DeepSeek's markup language, in which marks tell texts from JSON."""
    tag = "｜DSML｜"
    return _invokes(tag, "section") | {
        "content": state("content", {f"<{tag}{section}>": "section"}),
        "section": state("space", {f'<{tag}invoke name="': "name", f"</{tag}{section}>": "content"}),
        "key": state("key", {'" string="true">': "text", '" string="false">': "value"}),
        "text": state("value", {f"</{tag}parameter>": "parameters"}, trims="nothing", is_text=True),
        "value": state("value", {f"</{tag}parameter>": "parameters"}, trims="nothing", untyped="json"),
    }


QWEN3_CODER = ToolCallFormat(
    _functions({"<tool_call>": "open"}, "</tool_call>"),
    signs=(("<tool_call>", "<function="), ("<tool_call>", "<parameter=")),
)

SEED_OSS = ToolCallFormat(_functions({"<seed:tool_call>": "open"}, "</seed:tool_call>"), signs=(("<seed:tool_call>",),))

MINIMAX_M2 = ToolCallFormat(
    _invokes("", "section")
    | {
        "content": state("content", {"<minimax:tool_call>": "section"}),
        "section": state("space", {'<invoke name="': "name", "</minimax:tool_call>": "content"}),
    },
    signs=(("<minimax:tool_call>",),),
)

DEEPSEEK_V32 = ToolCallFormat(_dsml("function_calls"), signs=(("｜DSML｜", "function_calls>"),))

DEEPSEEK_V4 = ToolCallFormat(_dsml("tool_calls"), signs=(("｜DSML｜", "tool_calls>"),))

# Its marks resemble those of DeepSeek V3, with _ in the place of ▁.
STEP3 = ToolCallFormat(
    _invokes("steptml:", "close")
    | {
        "content": state("content", {"<｜tool_calls_begin｜>": "section"}),
        "section": state("space", {"<｜tool_call_begin｜>": "kind", "<｜tool_calls_end｜>": "content"}),
        "kind": state("space", {"function<｜tool_sep｜>": "open"}),
        "open": state("space", {'<steptml:invoke name="': "name"}),
        "value": state("value", {"</steptml:parameter>": "parameters"}, trims="space"),
        "close": state("space", {"<｜tool_call_end｜>": "section"}),
    },
    signs=(("<｜tool_calls_begin｜>",),),
)

# GLM 4.5 has a line for each mark, and GLM 4.7 has no white space between them.
GLM45 = ToolCallFormat(
    {"content": state("content", {"<tool_call>": "name"})} | _pairs("</tool_call>", "content"),
    signs=(("<tool_call>", "<arg_key>"),),
)

HY_V3 = ToolCallFormat(
    _pairs("</tool_call>", "section")
    | {
        "content": state("content", {"<tool_calls>": "section"}),
        "section": state("space", {"<tool_call>": "name", "</tool_calls>": "content"}),
        "name": state("header", {"<tool_sep>": "parameters"}, header=plain),
        "value": state("value", {"</arg_value>": "parameters"}, trims="nothing"),
    },
    signs=(("<tool_calls>", "<tool_sep>"),),
)

# Its model cards show a JSON object; what the models write is often pairs of tags.
LONGCAT = ToolCallFormat(
    _pairs("</longcat_tool_call>", "content", tag="longcat_")
    | {
        "content": state("content", {"<longcat_tool_call>": "open"}),
        "open": state("space", {}, Mark("{", "call", stays=True), otherwise="name"),
        "call": state("call", then="close"),
        "close": state("space", {"</longcat_tool_call>": "content"}),
    },
    signs=(("<longcat_tool_call>",),),
)

SOLAR_OPEN2 = ToolCallFormat(
    {
        "content": state("content", {"<|tool_call:start|>": "name"}),
        "name": state(
            "header",
            {},
            Mark("<|tool_arg:start|>", "parameters", stays=True),
            Mark("<|tool_call:end|>", "parameters", stays=True),
            header=plain,
        ),
        "parameters": state(
            "space", {"<|tool_arg:start|>": "key"}, Mark("<|tool_call:end|>", "content", ends_call=True)
        ),
        "key": state("key", {"<|tool_arg:value|>": "value"}),
        "value": state("value", {"<|tool_arg:end|>": "parameters"}, trims="nothing"),
    },
    signs=(("<|tool_call:start|>",),),
)
