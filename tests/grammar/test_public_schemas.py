"""Public suites of JSON schemas: what compiles takes no invalid text, and what is refused is refused by name.

Run with `-s` to see how many schemas compile and how many texts are taken.
"""

import json
import random
import re
from collections import Counter
from typing import Any

import jsonschema
import pytest

from jaxvllm.core.errors import ParameterError
from jaxvllm.grammar.constraint import CompiledGrammar
from tests.grammar.demo import compiled, takes
from tests.grammar.public_suites import DRAFTS, Instance, official, schemastore
from tests.grammar.random_walk import random_walk

# A refusal says which keyword cannot be enforced, what is wrong and where, or which limit was met.
REASONS = re.compile(
    r'the keyword "'
    r"|for '\w+'"  # a value that the keyword cannot have
    r"|Resource '.*' is not present"  # what another document defines
    r"|Pointer '.*' does not exist"
    r"|is not valid JSON"
    r"|must be a(n object| string|n array| JSON schema)"
    r"|Invalid type"
    r"|Unsatisfiable schema|no text satisfies"
    r"|regex parse error"
    r"|patternProperty regexes .* are not disjoint"
    r"|min/maxProperties only supported"
    r"|circular references with sibling keys"
    r"|Failed to generate regex for (float|integer) range: min="
    r"|the limit is|level exceeded|longer than"
)
# Invalid texts that are taken all the same, by their files.
TAKEN_WRONGLY = {
    # Rust's regular expressions and Python's do not count U+FEFF among the spaces, ECMAScript's do.
    "optional/ecmascript-regex.json": {"zero-width whitespace does not match"},
    # `contentMediaType` and `contentEncoding` are annotations in later drafts, and in draft 7 for most validators.
    "optional/content.json": {
        "an invalid JSON document",
        "an invalid base64 string (% is not a valid character)",
        "a validly-encoded invalid JSON document",
        "an invalid base64 string that is valid JSON",
    },
}
# The files with valid texts that a grammar does not write.
NOT_WRITTEN = {
    "format.json",  # a format is enforced here, and an annotation there
    "optional/format/time.json",  # leap seconds
    "optional/format/date-time.json",
    "optional/format/email.json",  # quoted names, and addresses of IPv6
    "optional/format/ipv6.json",  # with an IPv4 address at the end
    "type.json",  # 1.0 for an integer
    "const.json",  # 1.0 for 1
    "enum.json",
    "optional/float-overflow.json",
    "optional/ecmascript-regex.json",  # U+FEFF again
    "ref.json",  # what is beside a $ref is ignored in old drafts only
}


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_official_suite(draft: str) -> None:
    counts: Counter[str] = Counter()
    taken_wrongly: dict[str, set[str]] = {}
    not_written: dict[str, set[str]] = {}
    for case in official(draft):
        counts["schemas"] += 1
        grammar = compiled_or_refused(json.dumps(case.schema))
        if isinstance(grammar, str):
            counts["refused"] += 1
            if "satisf" in grammar:
                assert not any(instance.is_valid for instance in case.instances), (case, grammar)
            continue
        for instance in case.instances:
            if not instance.is_valid:
                is_taken = any(takes(grammar, text) for text in spellings(instance, case.schema))
                counts["invalid, taken" if is_taken else "invalid, not taken"] += 1
                if is_taken:
                    taken_wrongly.setdefault(case.file, set()).add(instance.description)
            elif takes(grammar, spellings(instance, case.schema)[0]):
                counts["valid, taken"] += 1
            else:
                counts["valid, not written"] += 1
                not_written.setdefault(case.file, set()).add(f"{case.description}: {instance.description}")
    print(draft, dict(counts))
    assert taken_wrongly == {file: TAKEN_WRONGLY[file] for file in taken_wrongly}
    assert not_written.keys() <= NOT_WRITTEN, not_written
    assert counts["valid, not written"] < counts["valid, taken"] / 10
    assert counts["refused"] < counts["schemas"] * 0.6


def test_a_lenient_grammar_that_takes_an_invalid_text_has_a_warning() -> None:
    warned = 0
    for case in official("draft2020-12"):
        try:
            grammar = compiled(json=json.dumps(case.schema), lenient=True)
        except ParameterError:
            continue
        for instance in case.instances:
            if not instance.is_valid and takes(grammar, spellings(instance, case.schema)[0]):
                warned += bool(grammar.warnings)
                assert grammar.warnings or instance.description in TAKEN_WRONGLY.get(case.file, ()), case
    assert warned >= 200


@pytest.mark.parametrize("part", ["a fifth", pytest.param("the rest", marks=pytest.mark.slow)])
def test_real_schemas(part: str) -> None:
    counts: Counter[str] = Counter()
    for number, (name, text) in enumerate(schemastore()):
        if (number % 5 == 0) != (part == "a fifth"):
            continue
        counts["schemas"] += 1
        grammar = compiled_or_refused(text)
        if isinstance(grammar, str):
            counts["refused"] += 1
            continue
        schema = json.loads(text)
        validator = jsonschema.validators.validator_for(schema)
        valid = validator(schema, format_checker=validator.FORMAT_CHECKER)
        seeds = (number, number + 1000) if part == "a fifth" else (number,)
        for seed in seeds:
            written = random_walk(grammar, seed)
            counts["texts" if written else "texts without an end"] += 1
            if written is None:
                continue
            changed = otherwise(json.loads(written), random.Random(seed))
            try:
                valid.validate(json.loads(written))
                is_invalid = not valid.is_valid(changed)
            except re.error:  # Python cannot read what Rust and ECMAScript can, such as [\w-_]
                counts["texts that cannot be judged"] += 1
                continue
            if is_invalid:
                counts["invalid texts"] += 1
                assert not takes(grammar, json.dumps(changed, ensure_ascii=False)), (name, changed)
    print(part, dict(counts))
    assert counts["texts"] >= 80 + 10 * counts["texts that cannot be judged"]
    assert counts["texts without an end"] <= counts["texts"] / 20  # whose pattern is not met by chance
    assert counts["invalid texts"] >= counts["texts"] / 10
    assert counts["refused"] < counts["schemas"] * 0.7


def compiled_or_refused(schema: str) -> CompiledGrammar | str:
    """The grammar of a schema, or why it is refused. The compiler answers within a time that it keeps itself."""
    try:
        return compiled(json=schema)
    except ParameterError as error:
        assert error.param in ("json", "structured_outputs")
        assert REASONS.search(str(error)), error
        return str(error)


def spellings(instance: Instance, schema: Any) -> list[str]:
    """The instance as JSON: as a grammar writes it, with properties in the order of the schema, and otherwise."""
    names = {name: number for number, name in enumerate(dict.fromkeys(names_in(schema)))}
    texts = [
        json.dumps(value, ensure_ascii=False, separators=separators)
        for value in (in_order(instance.value, names), instance.value)
        for separators in (None, (",", ":"))
    ]
    return list(dict.fromkeys(texts))


def names_in(value: Any) -> list[str]:
    """All names of properties in a JSON value, as they come."""
    if isinstance(value, list):
        return [name for one in value for name in names_in(one)]
    if isinstance(value, dict):
        return [name for key, one in value.items() for name in (key, *names_in(one))]
    return []


def in_order(value: Any, names: dict[str, int]) -> Any:
    if isinstance(value, list):
        return [in_order(one, names) for one in value]
    if isinstance(value, dict):
        ordered = sorted(value, key=lambda name: names.get(name, len(names)))
        return {name: in_order(value[name], names) for name in ordered}
    return value


def otherwise(value: Any, rng: random.Random) -> Any:
    """The value with one change at a random place: a property less or more, or a value of another type."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice(list(value))
        match rng.randrange(4):
            case 0:
                return {key: one for key, one in value.items() if key != name}
            case 1:
                return {**value, "another": None}
            case _:
                return {**value, name: otherwise(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        index = rng.randrange(len(value))
        return [*value[:index], otherwise(value[index], rng), *value[index + 1 :]]
    return rng.choice([other for other in (None, True, -17.5, "", "other", [], [[]], {}) if other != value])
