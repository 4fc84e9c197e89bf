"""`CustomInput`: however the arguments are cut, the input is the same text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxvllm.server.custom_input import CustomInput


def read(*parts: str) -> str:
    reader = CustomInput()
    told = "".join([*(reader.push(part) for part in parts), reader.finish()])
    assert told == reader.text
    return told


@given(st.text(st.characters(exclude_categories=["Cs"])), st.booleans(), st.data())
def test_it_is_what_the_string_says(text: str, ascii: bool, data: st.DataObject) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii)
    at = data.draw(st.integers(0, len(arguments)))
    assert read(arguments) == read(arguments[:at], arguments[at:]) == read(*arguments) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (' { "input" : "a\\u00e9\\n" } ', "aé\n"),
        ('{"input": "a\\ud83d', "a"),  # cut
        ('{"input": "a\\ud83d b"}', "a\ufffd b"),  # half a character
        ('{"input": "\\ud83d\\ud83d\\ude00\\ude00"}', "\ufffd\U0001f600\ufffd"),
        ('{"input": "\\ud83d\\n\\ud83d\\u0041\\ud83d"}', "\ufffd\n\ufffdA\ufffd"),
        ('{"input": "\\ud83d\\ude00"}', "\U0001f600"),
        ('{"note": 1, "input": "a"}', "a"),
        ('{"patch": "a"}', '{"patch": "a"}'),  # no input: the tool gets what the model wrote
        ('{"input": 5}', '{"input": 5}'),
        ('{"inp', '{"inp'),
        ("", ""),
    ],
)
def test_unusual_arguments(arguments: str, text: str) -> None:
    assert read(arguments) == read(*arguments) == text
