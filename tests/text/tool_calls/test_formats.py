"""Every format of tool calls: examples, any split of them, garbage, and the time that hostile text takes."""

import json
import random
import re
import sys
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxvllm.text.assistant_message import AnswerFormat, AssistantMessage
from jaxvllm.text.message_events import Arguments, CallBegin, CallBroken, CallCut, CallEnd, Content, Event, Reasoning
from jaxvllm.text.reasoning import FORMATS
from jaxvllm.text.tool_calls.format import ToolCallFormat
from jaxvllm.text.tool_calls.formats import HARMONY, TOOL_CALL_FORMATS, guessed_format, named_call, required_calls
from jaxvllm.text.tool_calls.parser import ToolCallParser
from jaxvllm.text.tool_calls.readers import MAX_HEADER
from tests.text.tool_calls.examples import EXAMPLES, SCHEMAS, Example, cut, read, said

ALL = TOOL_CALL_FORMATS | {"required": required_calls(), "named": named_call("f")}
# Everything that means something in some format.
PIECES = sorted(
    {mark for format in ALL.values() for mark in format.marks}
    | {
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        '"',
        "'",
        "\\",
        ",",
        ":",
        "=",
        "\n",
        " ",
        "\t",
        "\\u00",
        "1",
        "-",
        "e",
        "true",
        "None",
    }
    | {
        '"name"',
        '"arguments"',
        '{"name": "f", "arguments": ',
        "f",
        "functions.f:0",
        "call:f{a:",
        "to=functions.f",
        "é",
        "\x00",
        "```",
        '"\\ud800"',
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": "f", "arguments": "{\\"a\\": \\"\\udc00\\"}"}',
        "9" * 5000,
    }
)


def format_of(name: str) -> AnswerFormat:
    return AnswerFormat(calls=ALL[name], schemas=SCHEMAS)


def words(format: ToolCallFormat, text: str) -> list[str]:
    """The words of a text, without what is left out: the marks around the content, and sections without a call."""
    found = []
    for mark in format.states["content"].marks:
        if mark.to == "content":
            found.append(re.escape(mark.text))
        elif format.states[mark.to].reads == "space":
            ends = [end.text for end in format.states[mark.to].marks if end.to == "content"]
            found += [rf"{re.escape(mark.text)}[ \t\n\r]*{re.escape(end)}" for end in ends]
    while (rest := re.sub("|".join(found) or "(?!)", "", text)) != text:
        text = rest
    return text.split()


def plain(events: list[Event]) -> list[tuple[Any, ...]]:
    """Events as tuples without ids, in which neighbours that only add text are one."""
    made: list[tuple[Any, ...]] = []
    for (kind, index), group in groupby(events, lambda event: (type(event), getattr(event, "index", None))):
        if kind in (Content, Reasoning, Arguments):
            made.append((kind, index, "".join(event.text for event in group)))  # type: ignore[union-attr]
        else:
            made += [(kind, index, getattr(event, "name", None) or getattr(event, "text", None)) for event in group]
    return made


@pytest.mark.parametrize("one", EXAMPLES, ids=[f"{i}-{one.format}" for i, one in enumerate(EXAMPLES)])
def test_an_answer_is_read(one: Example) -> None:
    message = said(format_of(one.format), one.text)
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == one.calls
    assert (message.content, message.reasoning) == (one.content, one.reasoning)
    ids = [call.id for call in message.calls]
    assert len(set(ids)) == len(ids)
    assert all(len(name) >= 9 for name in ids)


def test_there_are_examples_of_all_formats() -> None:
    shown = [TOOL_CALL_FORMATS[one.format] for one in EXAMPLES if one.calls]
    assert all(any(format is one for one in shown) for format in TOOL_CALL_FORMATS.values())


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_parts_of_any_size_give_the_same_events(size: int) -> None:
    for one in EXAMPLES:
        reader, parts = format_of(one.format).reader, [one.text[at : at + size] for at in range(0, len(one.text), size)]
        assert plain(read(reader(), parts)) == plain(read(reader(), [one.text])), one


@given(st.sampled_from(EXAMPLES), st.lists(st.integers(0, 10_000), max_size=40))
def test_any_split_of_an_answer_gives_the_same_events(one: Example, places: list[int]) -> None:
    format = format_of(one.format)
    whole = plain(read(format.reader(), [one.text]))
    assert plain(read(format.reader(), cut(one.text, places))) == whole
    assert plain(read(format.reader(), list(one.text))) == whole


@given(
    st.sampled_from(sorted(ALL)),
    st.lists(st.sampled_from(PIECES), max_size=30),
    st.lists(st.integers(0, 500), max_size=9),
)
@example("hermes", ["<tool_call>", "<tool_call>", '{"name": "f", "arguments": ', "{", "}", "}"], [3])
def test_garbage_is_read_alike_in_any_split_and_breaks_no_rule(name: str, pieces: list[str], places: list[int]) -> None:
    text = "".join(pieces)
    format = format_of(name)
    events = read(format.reader(), cut(text, places))
    assert plain(events) == plain(read(format.reader(), [text])) == plain(read(format.reader(), list(text)))
    check_order(events)
    if not any(isinstance(event, CallBegin) for event in events) and name != "openai":
        shown = "".join(event.text for event in events if isinstance(event, Content))
        assert words(ALL[name], shown) == words(ALL[name], text)


@pytest.mark.parametrize("reasoning", sorted({format: name for name, format in FORMATS.items()}.values()))
def test_every_pair_of_formats_reads_calls_and_any_garbage(reasoning: str) -> None:
    """A server may have any format of reasoning beside any format of calls, and a model may write anything."""
    rng, thoughts = random.Random(reasoning), FORMATS[reasoning]
    for name, calls in sorted({id(calls): (name, calls) for name, calls in ALL.items()}.values()):
        format = AnswerFormat(thoughts, calls, SCHEMAS)
        own = [*sorted(calls.marks), thoughts.start, thoughts.end]
        for _ in range(15):
            text = "".join(rng.choice(rng.choice((own, PIECES))) for _ in range(rng.randrange(20)))
            prompt = rng.choice(("", thoughts.start, thoughts.end))
            events = read(format.reader(prompt), cut(text, [rng.randrange(200) for _ in range(5)]))
            assert plain(events) == plain(read(format.reader(prompt), [text])), name
            check_order(events)
        if name in ("required", "named") or calls is HARMONY:
            continue
        one = next(one for one in EXAMPLES if TOOL_CALL_FORMATS[one.format] is calls and one.calls)
        thought = "" if thoughts.is_harmony else f"{thoughts.start}so{thoughts.end}"
        opened = thoughts.end if thoughts.is_harmony else ""
        message = said(format, thought + opened + one.text)
        assert [(call.name, json.loads(call.arguments)) for call in message.calls] == one.calls, name


def check_order(events: list[Event]) -> None:
    """Calls come one after the other, with indices from 0; whole ones have one JSON object as arguments.

    All of it can be sent.
    """
    begun, is_open, arguments = -1, False, ""
    for event in events:
        for text in (getattr(event, name, "") for name in ("text", "name", "id")):
            text.encode()
        match event:
            case CallBegin(index, _, name):
                assert not is_open
                assert index == begun + 1
                assert name
                begun, is_open, arguments = index, True, ""
            case Arguments(index, text):
                assert is_open
                assert index == begun
                assert text
                arguments += text
            case CallEnd(index):
                assert is_open
                assert index == begun
                assert isinstance(json.loads(arguments), dict)
                is_open = False
            case CallBroken(index) | CallCut(index):
                assert is_open
                assert index == begun
                is_open = False
            case Content(text) | Reasoning(text):
                assert not is_open
                assert text
    assert not is_open


HOSTILE = [
    "<tool_call>", "<tool_call>{", '<tool_call>{"name": "f", "arguments": {"a": "', "<tool_call>x\n", "<tool_call", " ",
    "<tool_call><function=f><parameter=a>", "<function=f>", "<tool_call>f<arg_key>", "<tool_call>f<arg_key>a</arg_key>",
    "[TOOL_CALLS]", "[TOOL_CALLS]f{", "[TOOL_CALLS][", "[", "[f(a=[", "[f(a='\\", "[f(a=1", '{"name": "', '{"a', "{",
    "<|channel|>", "<|start|>", "<|channel|>analysis<|message|>", "<|channel|>to=functions.f<|message|>{", "<", "\n",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f", "functools[",
    "<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|>{", '[{"name": "f", "arguments": {',
    "<|tool_call>call:f{a:[", '<|tool_call>call:f{a:<|"|>', '<minimax:tool_call><invoke name="f"><parameter name="a">',
    "<function_calls>",
]  # fmt: skip


CUT = [
    ("named", '{"a": "x', [("f", '{"a": "x')]),
    ("named", "{", [("f", "{")]),
    ("named", " ", []),
    ("required", '[{"name": "f", "parameters": {"a": 1', [("f", '{"a": 1')]),
    (
        "required",
        '[{"name": "f", "parameters": {}}, {"name": "g", "parameters": {"b": [',
        [("f", "{}"), ("g", '{"b": [')],
    ),
    ("required", '[{"name": "f", "parameters": {}}, {"na', [("f", "{}")]),
    ("required", '[{"name": "f', []),
    ("required", "[", []),
]


@pytest.mark.parametrize("reasoning", [None, "qwen3", "openai_gptoss"])
@pytest.mark.parametrize(("name", "text", "calls"), CUT)
def test_a_forced_call_that_is_cut_is_a_part_of_a_call(
    name: str, text: str, calls: list[tuple[str, str]], reasoning: str | None
) -> None:
    """It is no content, however the text comes, and also after a reasoning."""
    format = AnswerFormat(None if reasoning is None else FORMATS[reasoning], ALL[name])
    before = {None: "", "qwen3": "<think>why</think>", "openai_gptoss": "<|channel|>final<|message|>"}[reasoning]
    for parts in ([before + text], list(before + text)):
        reader = format.reader()
        message = AssistantMessage.of([*(event for part in parts for event in reader.push(part)), *reader.finish()])
        assert message.content == "" and [(call.name, call.arguments) for call in message.calls] == calls
        assert AssistantMessage.of(message.events()) == message


def work(name: str, parts: list[str]) -> int:
    """The lines of Python that reading takes, with the most text that was kept for a second look."""
    parser = ToolCallParser(ALL[name], SCHEMAS)
    lines, most = 0, 0

    def trace(*_: object) -> Any:
        nonlocal lines
        lines += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for part in parts:
            parser.push(part)
            most = max(most, len(parser._pending))
        parser.finish()
    finally:
        sys.settrace(before)
    longest = max(map(len, ALL[name].marks), default=0)
    assert most <= MAX_HEADER + longest, "what is kept is read again with each part, so it must be short"
    return lines


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm45", "mistral", "pythonic", "llama3_json", "openai",
                                  "deepseek_v3", "kimi_k2", "granite", "phi4_mini_json", "gemma4", "minimax_m2",
                                  "olmo3"])  # fmt: skip
def test_hostile_text_takes_linear_time(name: str) -> None:
    for unit in HOSTILE:
        once, twice = (unit * (count // len(unit) + 1) for count in (1500, 3000))
        for size in (5, len(twice)):
            costs = [work(name, [text[i : i + size] for i in range(0, len(text), size)]) for text in (once, twice)]
            assert costs[1] <= 2.2 * costs[0] + 500, (unit, size)


class Counting:
    """A pattern that counts the characters it looks at."""

    def __init__(self, pattern: re.Pattern[str], seen: Counter[str]):
        self._pattern = pattern
        self._seen = seen

    def search(self, text: str, at: int, end: int = sys.maxsize) -> re.Match[str] | None:
        found = self._pattern.search(text, at, end)
        self._seen["characters"] += (min(end, len(text)) if found is None else found.end()) - at
        return found

    def match(self, text: str, at: int) -> re.Match[str] | None:
        return self._pattern.match(text, at)


UNITS = {
    "hermes": "<tool_call>",
    "mistral": "[TOOL_CALLS]f",
    "glm45": "<tool_call>f",
    "qwen3_coder": "<function=f><parameter=a>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f",
    "openai": "<|start|>",
}


@pytest.mark.parametrize("name", UNITS)
def test_searching_a_whole_text_takes_linear_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work inside regular expressions is no line of Python."""
    seen: Counter[str] = Counter()
    for state in ALL[name].states.values():
        monkeypatch.setitem(vars(state), "pattern", Counting(state.pattern, seen))
    costs = []
    for size in (2**13, 2**14):
        seen.clear()
        said(format_of(name), UNITS[name] * (size // len(UNITS[name])))
        costs.append(seen["characters"])
    assert costs[0] > 0
    assert costs[1] <= 2.2 * costs[0]


GUESSES = {
    'For each call: <tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>': "hermes",
    "<tool_call>\n<function=example>\n<parameter=a>\nvalue\n</parameter>\n</function>\n</tool_call>": "qwen3_coder",
    "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>": "glm45",
    "{{ '<｜tool▁calls▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\\n```json' }}": "deepseek_v3",
    "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' }}": "deepseek_v31",
    "{{ '[TOOL_CALLS] [' }}": "mistral",
    "<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}": "kimi_k2",
    "<|channel|>commentary to={{ 'functions.' + name }}": "openai",
    'Respond in the format {"name": function name, "parameters": dictionary of arguments}.': "llama3_json",
    "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]": "pythonic",
    "{{ '<|tool_call|>' }}": "granite",
    "{%- set toolcall_begin_token = '<minimax:tool_call>' %}<invoke name=": "minimax_m2",
    "<｜DSML｜function_calls>{% for call in message.tool_calls %}<｜DSML｜invoke name=": "deepseek_v32",
    "<｜DSML｜tool_calls>{% for call in message.tool_calls %}<｜DSML｜invoke name=": "deepseek_v4",
    "{{ '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>' }}": "step3",
    "<tool_calls>\n<tool_call>{{ name }}<tool_sep>\n<arg_key>": "hy_v3",
    '<longcat_tool_call>\n{"name": <function-name>, "arguments": <args-dict>}\n</longcat_tool_call>': "longcat",
    "{{ '<|tool_call:start|>' + name }}": "solar_open2",
    "{{ 'List of tools: <|tool_list_start|>' }}": "lfm2",
    "respond with a call in <function_calls></function_calls> XML tags": "olmo3",
    "{{ '<tool_call>' + call + '</tool_call>' }}{{ '<response>' + content }}": "ernie45",
    '<tool_calls>[{"name": "func_name1", "arguments": {"argument1": "value1"}},...]</tool_calls>': "hunyuan_a13b",
    '{{ "<|action_start|><|plugin|>" }}': "internlm",
    'a single JSON array: [{"name": "tool_call_name", "arguments": {"arg1": "value1"}}]': "xlam",
    "{%- set tool_calls_token = '<|tools_prefix|>' %}": "apertus",
    "{{ '<|START_ACTION|>[' }}": "cohere_command3",
    "{{ 'function call<|role_sep|>' }}": "gigachat3",
    "{{ '<|tool_call>call:' + name + '{' }}{{ '}<tool_call|>' }}": "gemma4",
    "{{ '<start_function_call>call:' }}": "functiongemma",
}


@pytest.mark.parametrize("template", GUESSES)
def test_a_template_shows_its_format(template: str) -> None:
    assert guessed_format("{%- if tools %}" + template) is TOOL_CALL_FORMATS[GUESSES[template]]


def test_a_template_without_tools_shows_nothing() -> None:
    assert guessed_format("{% for message in messages %}<|im_start|>{{ message.content }}{% endfor %}") is None


def test_the_page_about_serving_names_all_formats() -> None:
    page = (Path(__file__).parents[3] / "docs/serving.md").read_text()
    assert [name for name in (*TOOL_CALL_FORMATS, *FORMATS) if f"`{name}`" not in page] == []
