"""Both forms of structural tags: what texts they take, and what is no tag."""

from typing import Any

import pytest

from jaxvllm.core.errors import ParameterError
from tests.grammar.demo import compiled, takes, tokenizer

INTEGER = {"type": "integer"}
CALL = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": INTEGER}, "end": "</f>"}
OTHER = {"type": "tag", "begin": "<g>", "content": {"type": "const_string", "value": "x"}, "end": "</g>"}


def of_format(format: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": format}


def triggered(**more: Any) -> dict[str, Any]:
    return of_format({"type": "triggered_tags", "triggers": ["<f", "<g"], "tags": [CALL, OTHER], **more})


@pytest.mark.parametrize(
    ("tag", "texts", "others"),
    [
        (
            {
                "type": "structural_tag",
                "structures": [
                    {"begin": "<f=a>", "schema": INTEGER, "end": "</f>"},
                    {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"},
                ],
                "triggers": ["<f="],
            },
            ["", "just text", "<f=a>1</f>", "so <f=b>true</f> and <f=a>2</f>, done", "a < b", "<f"],
            ["<f=", "<f=c>1</f>", "<f=a>x</f>", "<f=a>1", "<f=a>true</f>"],
        ),
        (triggered(), ["", "text", "<f>1</f> <g>x</g>"], ["<f>x</f>", "<f>1"]),
        (triggered(at_least_one=True), ["<f>1</f>", "so <g>x</g> and"], ["", "text"]),
        (
            triggered(at_least_one=True, stop_after_first=True),
            ["so <f>1</f>"],
            ["text", "<f>1</f> more", "<f>1</f><g>x</g>"],
        ),
        (of_format({"type": "const_string", "value": 'a "quoted" one'}), ['a "quoted" one'], ["a"]),
        (of_format({"type": "regex", "pattern": "[0-9]+/[0-9]+"}), ["1/2"], ["1"]),
        (of_format({"type": "grammar", "grammar": 'root ::= "a" root | "b"'}), ["aab"], ["a"]),
        (of_format({"type": "any_text"}), ["", "anything <f>"], []),
        (of_format(CALL), ["<f>12</f>"], ["12", "<f>12"]),
        (
            of_format({"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}),
            ["<t></t>", "<t>any < text</t>"],
            ["<t>", "<t>a</t>b</t>"],
        ),
        (of_format({"type": "or", "elements": [CALL, OTHER]}), ["<f>1</f>", "<g>x</g>"], ["<f>x</f>"]),
        (
            of_format({"type": "sequence", "elements": [OTHER, {"type": "const_string", "value": "-"}, CALL]}),
            ["<g>x</g>-<f>1</f>"],
            ["<g>x</g><f>1</f>"],
        ),
        (
            of_format({"type": "tags_with_separator", "tags": [CALL, OTHER], "separator": ","}),
            ["", "<f>1</f>", "<f>1</f>,<g>x</g>,<f>2</f>"],
            [",", "<f>1</f>,", "<f>1</f><g>x</g>"],
        ),
        (
            of_format({"type": "tags_with_separator", "tags": [CALL], "separator": ",", "at_least_one": True}),
            ["<f>1</f>"],
            [""],
        ),
    ],
)
def test_a_tag_takes_its_texts_and_no_others(tag: dict[str, Any], texts: list[str], others: list[str]) -> None:
    grammar = compiled(structural_tag=tag)
    assert [text for text in texts if not takes(grammar, text)] == []
    assert [text for text in others if takes(grammar, text)] == []


def test_special_tokens_are_tokens_and_not_their_text() -> None:
    call = {**CALL, "begin": "<|tool|>call:", "end": "<|end|>"}
    grammar = compiled(structural_tag=of_format({"type": "triggered_tags", "triggers": ["<|tool|>"], "tags": [call]}))
    special = [tokenizer().backend.token_to_id(token) for token in ("<|tool|>", "<|end|>")]
    constraint = grammar.constraint()
    constraint.advance([special[0]])
    assert tokenizer().decode(constraint.forced()) == "call:"


@pytest.mark.parametrize(
    ("tag", "rule"),
    [
        ("{", "not valid JSON"),
        ("[]", "must be an object"),
        ({"type": "structural_tag"}, "must have structures and triggers, or a format"),
        ({"structures": [], "triggers": ["<"]}, "structures is not a list, or is empty"),
        (
            {"structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": ["b"]},
            "begins with none of its triggers",
        ),
        ({"structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": [""]}, "trigger that is not a text"),
        ({"structures": [{"begin": 1, "schema": {}, "end": ""}], "triggers": ["a"]}, "begin is not a text"),
        ({"structures": [{"begin": "a", "schema": "{", "end": ""}], "triggers": ["a"]}, "not valid JSON"),
        ({"structures": [{"begin": "a", "schema": {"not": {}}, "end": ""}], "triggers": ["a"]}, "not"),
        (of_format({"type": "json_schema", "json_schema": {"items": {"divisibleBy": 3}}}), '"divisibleBy" at #/items'),
        (of_format({"type": "bogus"}), "part of type 'bogus'"),
        (of_format({"type": "regex", "pattern": 1}), "regex that is not a string"),
        (of_format({"type": "regex", "pattern": "["}), "unclosed"),
        (of_format({"type": "sequence", "elements": [{"type": "any_text"}, CALL]}), "any_text before another"),
        (of_format({**CALL, "end": ["a", "b"]}), "2 ends"),
        (of_format({"type": "or", "elements": [CALL] * 300}), "300 elements"),
    ],
)
def test_what_is_no_tag_is_an_error(tag: Any, rule: str) -> None:
    with pytest.raises(ParameterError, match=rule) as raised:
        compiled(structural_tag=tag)
    assert raised.value.param == "structured_outputs"


def test_a_lenient_tag_ignores_keywords_that_cannot_be_enforced() -> None:
    tag = of_format({"type": "json_schema", "json_schema": {"type": "integer", "divisibleBy": 3}})
    assert takes(compiled(structural_tag=tag, lenient=True), "4")


def test_deep_tags_are_refused() -> None:
    part: dict[str, Any] = {"type": "const_string", "value": "x"}
    for _ in range(20):
        part = {"type": "sequence", "elements": [part]}
    with pytest.raises(ParameterError, match="more than 16 levels deep"):
        compiled(structural_tag=of_format(part))
