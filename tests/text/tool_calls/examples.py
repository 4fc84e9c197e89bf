"""Answers as models write them, with what they say."""

from dataclasses import dataclass
from typing import Any

from jaxvllm.text.assistant_message import AnswerFormat, AssistantMessage, MessageReader
from jaxvllm.text.message_events import Event

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "detailed": {"type": "boolean"}},
    },
    "write": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "text": {"type": "string"},
            "mode": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "tags": {"$ref": "#/$defs/tags"},
        },
        "$defs": {"tags": {"type": "array", "items": {"type": "string"}}},
    },
}

type Calls = list[tuple[str, dict[str, Any]]]


@dataclass(frozen=True)
class Example:
    """An answer in one of the formats."""

    format: str
    text: str
    calls: Calls
    content: str = ""
    reasoning: str = ""


OSLO = ("get_weather", {"city": "Oslo"})
BOTH: Calls = [OSLO, ("get_time", {})]

EXAMPLES = [
    Example("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>', [OSLO]),
    Example(
        "hermes",
        "I look it up.\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {}, "name": "get_time"}\n</tool_call>',
        BOTH,
        "I look it up.",
    ),
    Example(
        "hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": [1]}"}</tool_call> ok', [("f", {"a": [1]})], "ok"
    ),
    Example("hermes", 'a < b <tool_call>{"name": "f"}</tool_call>\n', [("f", {})], "a < b"),
    Example("hermes", '<tool_call>{"name": "f", "arguments": null, "id": [1, {}]}', [("f", {})]),
    Example(
        "hermes",
        '<tool_call>{"name": "unknown", "arguments": {"k": "ü\\u00e9\\n\\"<"}}</tool_c',
        [("unknown", {"k": 'üé\n"<'})],
    ),
    Example("hermes", "<tool_call>not a call</tool_call>", [], "<tool_call>not a call</tool_call>"),
    Example(
        "hermes",
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        [],
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
    ),
    Example(
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>',
        [],
        '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>',
    ),
    Example(
        "hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', [], '<tool_call>{"name": "f", "arguments": {"a": 1'
    ),
    Example("hermes", '<tool_call>x<tool_call>{"name": "f", "arguments": {}}</tool_call>', [("f", {})], "<tool_call>x"),
    Example("hermes", "Just text with a < and <tool_ca", [], "Just text with a < and <tool_ca"),
    Example("llama3_json", '{"name": "get_weather", "parameters": {"city": "Oslo"}}', [OSLO]),
    Example(
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": {"city": "Oslo"}}; '
        '{"name": "get_time", "arguments": {}}',
        BOTH,
    ),
    Example("llama3_json", '{"name": "Zamira", "age": 31}', [], '{"name": "Zamira", "age": 31}'),
    Example("llama3_json", 'It is {"name": "f", "parameters": {}}', [], 'It is {"name": "f", "parameters": {}}'),
    Example("llama3_json", '<|python_tag|>print("a")', [], '<|python_tag|>print("a")'),
    Example("pythonic", "[get_weather(city='Oslo'), get_time()]", BOTH),
    Example(
        "pythonic",
        '[f(a=[1, -2.5, "x\\\'y"], b={"k": None, \'l\': True,}, c=1e3), pkg.g(t="tab\\tü\\x41\\u00e9")]',
        [("f", {"a": [1, -2.5, "x'y"], "b": {"k": None, "l": True}, "c": 1000.0}), ("pkg.g", {"t": "tab\tüAé"})],
    ),
    Example("llama4_pythonic", '<|python_start|>[get_weather(city="Oslo")]<|python_end|>', [OSLO]),
    Example("pythonic", "[see this](http://x)", [], "[see this](http://x)"),
    Example("pythonic", "[f(__import__('os').system('true'))]", [], "[f(__import__('os').system('true'))]"),
    Example("pythonic", "[f(a=open('x'))]", [], "[f(a=open('x'))]"),
    Example("pythonic", "[f(a=1+1)]", [], "[f(a=1+1)]"),
    Example(
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo"}}, {"name": "get_time", "arguments": {}}]',
        BOTH,
    ),
    Example("mistral", 'Well.[TOOL_CALLS]get_weather{"city": "Oslo"}[TOOL_CALLS]get_time[ARGS]{}', BOTH, "Well."),
    Example("mistral", '[TOOL_CALLS]get_weather[CALL_ID]abc123def[ARGS]{"city": "Oslo"}', [OSLO]),
    Example("mistral", "[TOOL_CALLS] what is this {}", [], "[TOOL_CALLS] what is this {}"),
    Example(
        "deepseek_v3",
        "Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Oslo"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n{}\n'
        "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        BOTH,
        "Sure.",
    ),
    Example(
        "deepseek_v31",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Oslo"}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        BOTH,
    ),
    Example(
        "qwen3_coder",
        "I write.\n<tool_call>\n<function=write>\n<parameter=path>\na/b.py\n</parameter>\n<parameter=text>\n"
        'if a < b:\n    print("</p>")\n\n</parameter>\n<parameter=mode>\n420\n</parameter>\n<parameter=tags>\n'
        '["x", "y"]\n</parameter>\n<parameter=extra>\n7\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
        [
            (
                "write",
                {
                    "path": "a/b.py",
                    "text": 'if a < b:\n    print("</p>")\n',
                    "mode": 420,
                    "tags": ["x", "y"],
                    "extra": "7",
                },
            ),
            ("get_time", {}),
        ],
        "I write.",
    ),
    Example(
        "qwen3_coder",
        "<function=get_weather><parameter=city>Oslo</parameter><parameter=days>many</parameter>"
        "<parameter=detailed>True</parameter></function></tool_call>",
        [("get_weather", {"city": "Oslo", "days": "many", "detailed": True})],
    ),
    Example(
        "qwen3_coder", "<tool_call>\n<function=f>\nhello</function>", [], "<tool_call>\n<function=f>\nhello</function>"
    ),
    Example(
        "seed_oss",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Oslo</parameter>\n</function>\n</seed:tool_call>",
        [OSLO],
    ),
    Example(
        "glm45",
        "I ask.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value> Oslo\n </arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
        "<arg_key>more</arg_key><arg_value>{'a': [1, None]}</arg_value>\n</tool_call>\n"
        "<tool_call>get_time</tool_call>",
        [("get_weather", {"city": "Oslo", "days": 3, "more": {"a": [1, None]}}), ("get_time", {})],
        "I ask.",
    ),
    Example(
        "kimi_k2",
        "Hm. <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Oslo"}<|tool_call_end|><|tool_call_begin|>functions.get_time:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        BOTH,
        "Hm.",
    ),
    Example(
        "openai",
        "<|channel|>analysis<|message|>They ask for the weather.<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>I look it up.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        '<|constrain|>json<|message|>{"city": "Oslo"}<|call|>',
        [OSLO],
        "I look it up.",
        "They ask for the weather.",
    ),
    Example(
        "openai",
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|><|start|>assistant'
        " to=functions.get_time<|channel|>commentary<|message|>{}",
        BOTH,
    ),
    Example("openai", "<|channel|>final<|message|>It is cold.", [], "It is cold."),
    Example("openai", "It is cold.", [], "It is cold."),
    Example(
        "granite", '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}, {"name": "get_time"}]', BOTH
    ),
    Example("granite", ' [{"name": "get_weather", "arguments": {"city": "Oslo"}}]', [OSLO]),
    Example("granite", "[1, 2]", [], "[1, 2]"),
    Example(
        "granite-20b-fc",
        '<function_call> {"name": "get_weather", "arguments": {"city": "Oslo"}} <function_call>'
        '{"name": "get_time", "arguments": {}}',
        BOTH,
    ),
    Example("jamba", '<tool_calls>[\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n]</tool_calls>', [OSLO]),
    Example("phi4_mini_json", 'functools[{"name": "get_weather", "arguments": {"city": "Oslo"}}]', [OSLO]),
    Example(
        "glm47",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>"
        "<tool_call>get_time</tool_call> ok",
        BOTH,
        "ok",
    ),
    Example(
        "minimax_m2",
        'I write.\n<minimax:tool_call>\n<invoke name="write">\n<parameter name="path">a.py</parameter>\n'
        '<parameter name="text">if a < b:\n    pass\n</parameter>\n<parameter name="mode">420</parameter>\n'
        '<parameter name="tags">["x"]</parameter>\n</invoke>\n<invoke name="get_time">\n</invoke>\n'
        "</minimax:tool_call>\nDone.",
        [
            ("write", {"path": "a.py", "text": "if a < b:\n    pass\n", "mode": 420, "tags": ["x"]}),
            ("get_time", {}),
        ],
        "I write.\nDone.",
    ),
    Example(
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="f">hello</invoke>',
        [],
        '<minimax:tool_call>\n<invoke name="f">hello</invoke>',
    ),
    Example(
        "deepseek_v32",
        'Sure.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="write">\n'
        '<｜DSML｜parameter name="text" string="true">\n5\n</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="mode" string="true">null</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="tags" string="false">["x"]</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="more" string="false">{"a": [1, null]}</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="get_time">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        [("write", {"text": "\n5\n", "mode": "null", "tags": ["x"], "more": {"a": [1, None]}}), ("get_time", {})],
        "Sure.",
    ),
    Example(
        "deepseek_v32",
        '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="maybe">1',
        [],
        '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="maybe">1',
    ),
    Example(
        "deepseek_v4",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Oslo'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
        [OSLO],
    ),
    Example(
        "step3",
        'Hm.<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">\n'
        '<steptml:parameter name="city"> Oslo\n</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>\n'
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_time">\n</steptml:invoke>'
        "<｜tool_call_end｜>\n<｜tool_calls_end｜>\nSo.",
        BOTH,
        "Hm.\nSo.",
    ),
    Example(
        "hy_v3",
        "Hm.<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
        "</tool_call>\n<tool_call>get_time<tool_sep></tool_call>\n</tool_calls>",
        BOTH,
        "Hm.",
    ),
    Example("hy_v3", "<tool_calls>\n<tool_call>f</tool_call>", [], "<tool_calls>\n<tool_call>f</tool_call>"),
    Example(
        "longcat",
        'Hm.\n<longcat_tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</longcat_tool_call>\n'
        "<longcat_tool_call>get_time\n</longcat_tool_call>",
        BOTH,
        "Hm.",
    ),
    Example(
        "longcat",
        "<longcat_tool_call>get_weather\n<longcat_arg_key>city</longcat_arg_key>\n"
        "<longcat_arg_value>Oslo</longcat_arg_value>\n</longcat_tool_call> ok",
        [OSLO],
        "ok",
    ),
    Example(
        "longcat",
        "<longcat_tool_call>not a call</longcat_tool_call>",
        [],
        "<longcat_tool_call>not a call</longcat_tool_call>",
    ),
    Example(
        "solar_open2",
        "Hm.\n<|tool_call:start|>get_weather\n<|tool_arg:start|>city<|tool_arg:value|>Oslo<|tool_arg:end|>\n"
        "<|tool_arg:start|>days<|tool_arg:value|>3<|tool_arg:end|>\n<|tool_call:end|>\n"
        "<|tool_call:start|>get_time\n<|tool_call:end|>",
        [("get_weather", {"city": "Oslo", "days": 3}), ("get_time", {})],
        "Hm.",
    ),
    Example(
        "lfm2",
        'Hm. <|tool_call_start|>[get_weather(city="Oslo"), get_time()]<|tool_call_end|> So.',
        BOTH,
        "Hm. So.",
    ),
    Example(
        "lfm2",
        "<|tool_call_start|>[f(a=1+1)]<|tool_call_end|>",
        [],
        "<|tool_call_start|>[f(a=1+1)]<|tool_call_end|>",
    ),
    Example(
        "olmo3",
        "Sure.\n<function_calls>\nget_weather(city='Oslo')\nget_time()\nf(a=null, b=[true])\n</function_calls>\nSo.",
        [*BOTH, ("f", {"a": None, "b": [True]})],
        "Sure.\nSo.",
    ),
    Example("olmo3", "<function_calls>\nnone\n</function_calls>", [], "<function_calls>\nnone\n</function_calls>"),
    Example(
        "ernie45",
        '\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>\n',
        BOTH,
    ),
    Example("ernie45", "<response>\nIt is cold.\n</response>\n", [], "It is cold.\n"),
    Example(
        "hunyuan_a13b", '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]</tool_calls>', [OSLO]
    ),
    Example(
        "internlm",
        'I ask.<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": {"city": "Oslo"}}<|action_end|>\n'
        '<|action_start|><|plugin|>{"name": "get_time"}<|action_end|>',
        BOTH,
        "I ask.",
    ),
    Example(
        "internlm",
        "<|action_start|><|interpreter|>print(1)<|action_end|>",
        [],
        "<|action_start|><|interpreter|>print(1)<|action_end|>",
    ),
    Example(
        "xlam",
        'Hm.\n```json\n[{"name": "get_weather", "arguments": {"city": "Oslo"}}, '
        '{"name": "get_time", "arguments": {}}]\n```\nSo.',
        BOTH,
        "Hm.\nSo.",
    ),
    Example("xlam", ' [{"name": "get_weather", "arguments": {"city": "Oslo"}}] So.', [OSLO], "So."),
    Example("xlam", '<tool_call>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]</tool_call>', [OSLO]),
    Example("xlam", '[{"name": "Zamira", "age": 31}]', [], '[{"name": "Zamira", "age": 31}]'),
    Example("xlam", '```json\n{"a": 1}\n```', [], '```json\n{"a": 1}\n```'),
    Example(
        "apertus",
        'I ask. <|tools_prefix|>[{"get_weather": {"city": "Oslo"}}, {"get_time": {}}]<|tools_suffix|>',
        BOTH,
        "I ask.",
    ),
    Example("apertus", '<|tools_prefix|>[{"f": 5}]<|tools_suffix|>', [], '<|tools_prefix|>[{"f": 5}]<|tools_suffix|>'),
    Example(
        "cohere_command3",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Oslo"}},\n'
        '    {"tool_call_id": "1", "tool_name": "get_time", "parameters": {}}\n]<|END_ACTION|>',
        BOTH,
    ),
    Example("cohere_command3", "<|START_RESPONSE|>It is cold.<|END_RESPONSE|>", [], "It is cold."),
    Example(
        "gigachat3",
        'Hm.<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}',
        [OSLO],
        "Hm.",
    ),
    Example(
        "gigachat3",
        '<|function_call|>{"name": "get_weather", "arguments": {"city": "Oslo"}}\n'
        '<|function_call|>{"name": "get_time"}',
        BOTH,
    ),
    Example(
        "gemma4",
        'Hm. <|tool_call>call:get_weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|>'
        '<|tool_call>call:write{text:<|"|>a "b" {<|x<\n<|"|>, tags:[<|"|>x<|"|>,<|"|>y<|"|>],more:{<|"|>k:<|"|>:'
        "{l:true},m:None,n:-1.5e3,o:plain text,p:[],}}<tool_call|>",
        [
            ("get_weather", {"city": "Oslo", "days": 3}),
            (
                "write",
                {
                    "text": 'a "b" {<|x<\n',
                    "tags": ["x", "y"],
                    "more": {"k:": {"l": True}, "m": None, "n": -1500.0, "o": "plain text", "p": []},
                },
            ),
        ],
        "Hm.",
    ),
    Example("gemma4", "<|tool_call>call:get_time{}<tool_call|> So.", [("get_time", {})], "So."),
    Example("gemma4", "<|tool_call>call:f{a:1]}<tool_call|>", [], "<|tool_call>call:f{a:1]}<tool_call|>"),
    Example("gemma4", "<|tool_call>call:f{a}<tool_call|>", [], "<|tool_call>call:f{a}<tool_call|>"),
    Example(
        "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>Oslo<escape>}<end_function_call>"
        "<start_function_call>call:get_time{}<end_function_call>",
        BOTH,
    ),
]


def read(reader: MessageReader, parts: list[str]) -> list[Event]:
    """The events of a text that comes in parts."""
    return [event for part in parts for event in reader.push(part)] + reader.finish()


def cut(text: str, places: list[int]) -> list[str]:
    """The text in parts, cut at these places."""
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in zip(edges, edges[1:], strict=False)]


def said(format: AnswerFormat, text: str) -> AssistantMessage:
    """What a whole text says."""
    return AssistantMessage.of(read(format.reader(), [text]))
