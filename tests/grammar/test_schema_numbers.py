"""Numbers in JSON schemas: an answer satisfies them exactly, or the schema is refused with the number named."""

import json
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxvllm.core.errors import ParameterError
from jaxvllm.grammar.constraint import CompiledGrammar
from tests.grammar.demo import compiled, takes
from tests.grammar.random_walk import random_walk

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
BOUNDARIES = [
    *(0, -0.0, 1, -1, 0.5, -0.5, 3, 3.5, 0.1, 0.07, -2.75, 1e-7, 1e-50, 5e-324, 0.1 + 0.2, 93513.39957844363, 100.0),
    *(2**53 - 1, 2**53, 2**53 + 1, float(2**53), -(2**53), -(2**53) - 1, 1e15, 1e16, 1e22, 1e308, -1e308),
    *(2**60, 10**18, 2**63 - 1, 2**63, -(2**63), -(2**63) - 5, 2**64 - 1, 1234567890123456789, 10**30),
]


def exact(value: float | str) -> Fraction:
    return Fraction(Decimal(value if isinstance(value, str) else repr(value)))


def satisfies(text: str, schema: dict[str, Any]) -> bool:
    """Whether the number `text` satisfies the schema, both as its digits say and as the nearest double does."""
    number = exact(text)
    tests = {
        "minimum": lambda value: number >= exact(value),
        "maximum": lambda value: number <= exact(value),
        "exclusiveMinimum": lambda value: number > exact(value) and float(text) > value,
        "exclusiveMaximum": lambda value: number < exact(value) and float(text) < value,
        "multipleOf": lambda value: number % exact(value) == 0,
        "const": lambda value: number == exact(value),
        "enum": lambda value: any(number == exact(one) for one in value),
        "type": lambda value: value == "number" or number.denominator == 1,
    }
    return all(tests[keyword](value) for keyword, value in schema.items())


def plain(number: float | Fraction) -> str:
    """A number in decimal digits, without an exponent or zeros at its end."""
    value = Decimal(number.numerator) / number.denominator if isinstance(number, Fraction) else Decimal(repr(number))
    text = format(value, "f")
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def near(value: float) -> list[str]:
    """Texts of a number and of what is just beside it."""
    texts = [plain(value), plain(exact(value) + 1), plain(exact(value) - 1)]
    if abs(value) < 2**53 and len(plain(value)) < 30:
        texts += [plain(math.nextafter(value, side)) for side in (-math.inf, math.inf) if value]
    return texts


def check(grammar: CompiledGrammar, schema: dict[str, Any], texts: list[str], walks: int = 2) -> None:
    """Asserts that the grammar takes the right ones of `texts`, and that what it writes itself is right."""
    for text in texts:
        # With another bound beside it 0.5 may have to be written as 0.50.
        padded = [text + zeros for zeros in ("0", "00", "0" * 17)] if "." in text else []
        taken = any(takes(grammar, one) for one in (text, *padded))
        assert taken == satisfies(text, schema), (schema, text)
    for seed in range(walks):
        if written := random_walk(grammar, seed, num_free=8):
            assert satisfies(written, schema), (schema, written)


@pytest.mark.parametrize("type_", ["integer", "number"])
@pytest.mark.parametrize("keyword", [*BOUNDS, "multipleOf", "const", "enum"])
def test_a_boundary_is_exact_or_refused_by_name(keyword: str, type_: str) -> None:
    refused = 0
    for value in BOUNDARIES:
        schema = {"type": type_, keyword: [value, 17] if keyword == "enum" else value}
        try:
            grammar = compiled(json=schema)
        except ParameterError as error:
            if "contains no integer values" in str(error):
                assert keyword == "const" and type_ == "integer" and value != int(value)
                continue
            refused += 1
            assert f'the keyword "{keyword}" at # with the number {value}'[:60] in str(error)
            assert any(rule in str(error) for rule in ("the limit is", "use fewer", "above zero"))
        else:
            texts = near(value)  # beside an excluded bound llguidance cannot always read the very next double
            check(grammar, schema, (texts[:3] if keyword.startswith("exclusive") else texts) + ["17"])
    assert refused < (30 if keyword == "multipleOf" else 20)


digits = st.decimals(min_value=-40, max_value=40, places=2).map(float) | st.integers(-40, 40)
multiples = st.sampled_from([1, 2, 3, 7, 10, 0.5, 0.1, 0.01, 0.25, 0.07, 0.3, 2.5, 1.1])


@given(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["integer", "number"])},
        optional={**dict.fromkeys(BOUNDS, digits), "multipleOf": multiples},
    )
)
@settings(max_examples=120, deadline=None)
def test_keywords_together_are_exact(schema: dict[str, Any]) -> None:
    bounds = [exact(schema[name]) for name in BOUNDS if name in schema] or [Fraction(0)]
    step = exact(schema.get("multipleOf", 1))
    first = math.floor(min(bounds) / step)
    texts = [plain(bound) for bound in bounds] + [plain((first + index) * step) for index in range(4)]
    try:
        grammar = compiled(json=schema)
    except ParameterError as error:
        assert "Unsatisfiable" in str(error)
        assert not any(satisfies(text, schema) for text in texts)
    else:
        check(grammar, schema, texts)
        together = {"allOf": [{"type": schema["type"]}, *({name: value} for name, value in schema.items())]}
        if "multipleOf" not in schema:  # which is read with the bounds beside it only
            check(compiled(json=together), schema, texts, 1)


@pytest.mark.parametrize(
    ("schema", "rule"),
    [
        ('{"const": 1e400}', '"const" at # with the number inf'),
        ('{"properties": {"a": {"minimum": NaN}}}', '"minimum" at #/properties/a with the number nan'),
        ({"const": {"a": [2**53 + 1]}}, '"const" at # with the number 9007199254740993'),
        ({"$id": "http://a/b", "$ref": "http://a/b#/x", "x": {"maximum": 10**30}}, '"maximum" at #/x'),
        ({"type": "string", "minLength": 2**32}, '"minLength" at # with the number 4294967296: the limit'),
        ({"type": "integer", "multipleOf": 999_999}, "the limit is 65536"),
        ({"type": "integer", "allOf": [{"multipleOf": 65521}, {"multipleOf": 65519}]}, "schema's other multiples"),
    ],
)
def test_what_cannot_be_held_is_named(schema: Any, rule: str) -> None:
    with pytest.raises(ParameterError) as raised:
        compiled(json=schema)
    assert rule in str(raised.value) and raised.value.param == "structured_outputs"


def test_a_number_that_cannot_be_held_does_not_reach_the_library_from_any_kind_of_request() -> None:
    schema = {"type": "integer", "minimum": -9223372036854775813, "maximum": -9223372036854775809}
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    for asked in ({"json": schema}, {"structural_tag": tag}, {"grammar": f"start: %json {json.dumps(schema)}"}):
        with pytest.raises(ParameterError, match="-9223372036854775813: the limit is 9007199254740992"):
            compiled(**asked)


def test_a_lenient_request_leaves_out_what_cannot_be_held() -> None:
    grammar = compiled(json={"properties": {"a": {"type": "integer", "maximum": 10**30}}}, lenient=True)
    assert grammar.warnings == ('the keyword "maximum" at #/properties/a is not enforced',)
    assert takes(grammar, '{"a": 1}') and not takes(grammar, '{"a": null}')


def test_sizes_may_be_written_as_any_number() -> None:
    grammar = compiled(json={"type": "array", "items": {"const": 1}, "minItems": 1.0, "maxItems": 10**30})
    assert takes(grammar, "[1, 1]") and not takes(grammar, "[]")
