"""Reasoning, before content and tool calls, in any split of the text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxvllm.text.assistant_message import AnswerFormat, AssistantMessage
from jaxvllm.text.reasoning import FORMATS
from jaxvllm.text.tool_calls.formats import HARMONY, HERMES, LLAMA3_JSON, named_call, required_calls
from tests.text.tool_calls.examples import cut, read

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
ANSWERS = [
    ("qwen3", "", "<think>\nwhy\n</think>\n\nbecause", "\nwhy\n", "\n\nbecause"),
    ("qwen3", "", " \n<think>why</think>because", "why", "because"),
    ("qwen3", "", "because <think>", "", "because <think>"),
    ("qwen3", "", "  because", "", "  because"),
    ("qwen3", "", "<thi", "", "<thi"),
    ("qwen3", "<|im_start|>assistant\n<think>\n", "why</think>because", "why", "because"),
    ("qwen3", "<think>\n\n</think>\n\n", "because", "", "because"),
    ("deepseek_r1", "", "why</think>because", "why", "because"),
    ("deepseek_r1", "", "<think>why</think>because", "why", "because"),
    ("deepseek_r1", "", "why it", "why it", ""),
    ("deepseek_r1", "</think>", "because", "", "because"),
    ("granite", "", "Here is my thought process: a. Here is my response: b.", " a. ", " b."),
    ("mistral", "", "[THINK]why[/THINK]because", "why", "because"),
    ("gemma4", "", "<|channel>thought\nwhy<channel|>because", "why", "because"),
    ("gemma4", "", "<|channel>why<channel|>because", "why", "because"),
    ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", "because", "", "because"),
    ("ernie45", "<think>\n", "why\n</think>\n\n<response>\nbecause\n</response>\n", "why\n", "\n\nbecause\n"),
    ("hunyuan_a13b", "", "<think>\nwhy\n</think>\n<answer>\nbecause\n</answer>", "\nwhy\n", "\nbecause"),
    ("cohere_command3", "", "<|START_THINKING|>why<|END_THINKING|><|START_RESPONSE|>because<|END_RESPONSE|>",
     "why", "because"),
    ("nemotron_v3", "<think></think>", "because", "", "because"),
    ("minimax_m2_append_think", "<think>\n", "why</think>because", "", "<think>why</think>because"),
    ("minimax_m2_append_think", "<think>\n", "", "", "<think>"),
    ("openai_gptoss", "", "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>so",
     "why", "so"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "prompt", "text", "reasoning", "content"), ANSWERS)
@given(places=st.lists(st.integers(0, 200), max_size=20))
def test_reasoning_is_split_off(
    name: str, prompt: str, text: str, reasoning: str, content: str, places: list[int]
) -> None:
    format = AnswerFormat(FORMATS[name])
    message = AssistantMessage.of(read(format.reader(prompt), cut(text, places)))
    assert (message.reasoning, message.content) == (reasoning, content)


@pytest.mark.parametrize(
    ("continued", "reasoning"), [("", ""), ("Well,", ""), ("<think>I", " think"), ("<think>I</think>", "")]
)
def test_a_message_is_continued_where_it_was(continued: str, reasoning: str) -> None:
    for name in ("qwen3", "deepseek_r1"):
        reader = AnswerFormat(FORMATS[name]).reader("the prompt " + continued, continued)
        assert AssistantMessage.of(read(reader, [" think"])).reasoning == reasoning


@given(places=st.lists(st.integers(0, 200), max_size=20))
def test_a_call_after_reasoning(places: list[int]) -> None:
    text = f"<think>I could <tool_call>{{}}</think>\n{CALL}"
    message = AssistantMessage.of(read(AnswerFormat(FORMATS["qwen3"], HERMES).reader(), cut(text, places)))
    assert message.reasoning == "I could <tool_call>{}"
    assert [(call.name, call.arguments) for call in message.calls] == [("f", '{"a": 1}')]
    assert message.content == ""


@given(places=st.lists(st.integers(0, 200), max_size=20))
def test_reasoning_may_stay_in_the_content(places: list[int]) -> None:
    """A call in it is none, and what continues a message gets no second mark."""
    format = AnswerFormat(FORMATS["minimax_m2_append_think"], HERMES)
    thought = f"I could {CALL}</think>"
    message = AssistantMessage.of(read(format.reader("<think>\n"), cut(f"{thought}\n{CALL}", places)))
    assert message.content == "<think>" + thought
    assert [(call.name, call.arguments) for call in message.calls] == [("f", '{"a": 1}')]
    message = AssistantMessage.of(read(format.reader("<think>Well,", "<think>Well,"), cut(thought, places)))
    assert (message.content, message.calls) == (thought, ())
    format = AnswerFormat(FORMATS["minimax_m2_append_think"], LLAMA3_JSON)
    message = AssistantMessage.of(read(format.reader("<think>\n"), cut("why</think> because", places)))
    assert (message.content, message.calls) == ("<think>why</think> because", ())


@pytest.mark.parametrize("size", [1, 7, 500])
def test_forced_calls_after_reasoning(size: int) -> None:
    called = [("f", {"a": 1})]
    forced = ((required_calls(), '[{"name": "f", "parameters": {"a": 1}}]'), (named_call("f"), '{"a": 1}'))
    for calls, text in forced:
        for name, before in (
            ("deepseek_r1", "why</think>\n"),
            ("openai_gptoss", "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>"),
        ):
            whole = before + text
            parts = [whole[i : i + size] for i in range(0, len(whole), size)]
            message = AssistantMessage.of(read(AnswerFormat(FORMATS[name], calls).reader(), parts))
            assert message.reasoning == "why"
            assert [(call.name, json.loads(call.arguments)) for call in message.calls] == called
            assert message.content.strip() == ""


def test_harmony_reads_reasoning_without_being_told() -> None:
    text = "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>because"
    for format in (AnswerFormat(calls=HARMONY), AnswerFormat(FORMATS["openai_gptoss"], HARMONY)):
        message = AssistantMessage.of(read(format.reader(), [text]))
        assert (message.reasoning, message.content) == ("why", "because")
