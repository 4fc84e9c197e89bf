"""What compiles, what is an error and which, and that nothing takes long."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from jaxvllm.core.errors import OverloadedError, ParameterError
from jaxvllm.core.structured_outputs import StructuredOutputsParams
from jaxvllm.grammar import compiler as compiler_module
from jaxvllm.grammar.compiler import NUM_THREADS, GrammarCompiler
from jaxvllm.grammar.trial_process import MAX_CHILDREN
from tests.grammar.demo import EOS, VOCAB_SIZE, allowed, compiled, compiler, poisoned_source, takes, tokenizer, tokens
from tests.grammar.schema_cases import CASES
from tests.processes import children, wait_until_gone
from tests.waiting import PATIENCE, wait_until

# The time within which every grammar is compiled or refused here. Alone, none of these takes a third of a second; the
# engine's own limit is COMPILE_SECONDS.
SECONDS = 10.0


def test_all_cases_are_enforced_whole() -> None:
    assert len(CASES) == 200
    assert len({json.dumps(case) for case in CASES}) == 200
    futures = [compiler().compile(StructuredOutputsParams(json=case)) for case in CASES]
    assert all(future.result().warnings == () for future in futures)


@pytest.mark.parametrize(
    ("asked", "texts", "others"),
    [
        (dict(json={"type": "integer"}), ["1", "-17"], ["1.5", '"1"', "01", " 1"]),
        (dict(json='{"type": "integer"}'), ["1"], ["x"]),
        (dict(json="true"), ["1", "null", '{"a": [1]}'], ["x"]),
        (dict(json_object=True), ["{}", '{"a": 1}', '{\n  "a": {\n    "b": []\n  }\n}'], ["[]", "1", '{  "a": 1}']),
        (dict(json_object=True, disable_any_whitespace=True), ['{"a":1}'], ['{"a": 1}']),
        (dict(json_object=True, whitespace_pattern=r" {2}"), ['{"a":  1}', '{"a":1}'], ['{"a": 1}']),
        (dict(json={"format": "date"}), ['"2024-02-29"', '"2000-02-29"', "1"], ['"2023-02-29"', '"1900-02-29"']),
        (dict(json={"format": "date", "pattern": "^2"}), ['"2024-02-29"'], ['"2023-02-29"', '"1904-02-29"']),
        (
            dict(json={"type": "string", "format": "date-time"}),
            ['"2024-02-29T23:59:59Z"', '"1999-12-31t00:00:00.25+01:00"'],
            ['"2023-02-29T23:59:59Z"', '"2024-02-29T23:58:60Z"'],
        ),
        (dict(json={"type": "string", "format": "time"}), ['"23:59:59Z"'], ['"23:58:60Z"', '"24:00:00Z"']),
        (dict(json={"$ref": "#/$defs/List<A>", "$defs": {"List<A>": {"const": 1}}}), ["1"], ["2"]),
        (dict(regex="(a|b)+c"), ["ac", "ababc"], ["c", "ab", "acx"]),
        (dict(regex="^a/b$"), ["a/b"], ["a"]),
        (dict(choice=("yes", "no", "yes, please")), ["yes", "no", "yes, please"], ["maybe", "ye"]),
        (dict(choice=('"\\\n', "é😀")), ['"\\\n', "é😀"], ["é"]),
        (dict(grammar='start: "a" b\nb: /x+/'), ["ax", "axxx"], ["a", "x"]),
        (dict(grammar='root ::= "a" | "b" root'), ["a", "bba"], ["b", "ab"]),
        (dict(grammar='?start: sum\nsum: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]+/'), ["1", "1+22"], ["+"]),
    ],
)
def test_a_grammar_takes_its_texts_and_no_others(asked: dict[str, Any], texts: list[str], others: list[str]) -> None:
    grammar = compiled(**asked)
    assert [text for text in texts if not takes(grammar, text)] == []
    assert [text for text in others if takes(grammar, text)] == []


def test_other_properties_can_be_excluded_everywhere() -> None:
    schema = {"properties": {"a": {"properties": {"b": {"type": "integer"}}}, "c": {"type": "object"}}}
    open_one, closed_one = compiled(json=schema), compiled(json=schema, disable_additional_properties=True)
    assert takes(open_one, '{"a": {"x": 1}}') and not takes(closed_one, '{"a": {"x": 1}}')
    assert takes(closed_one, '{"a": {"b": 1}, "c": {"x": 1}}'), "where none are named, any may come"


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"not": {}}, ['"not" at #']),
        ({"properties": {"a": {"items": {"uniqueItems": True}}}}, ['"uniqueItems" at #/properties/a/items']),
        ({"properties": {"not": {"type": "array", "contains": {}}}}, ['"contains" at #/properties/not']),
        ({"$defs": {"a/b": {"format": "moon"}}, "$ref": "#/$defs/a~1b"}, ['"format: moon" at #/$defs/a~1b']),
        ({"anyOf": [{"type": "null"}, {"oneOf": [{"minimum": 1}, {"type": "number"}]}]}, ['"oneOf" at #/anyOf/1']),
        ({"if": {}, "then": {}}, ['"if" at #', '"then" at #']),
        ({"items": [{"divisibleBy": 3}]}, ['"divisibleBy" at #/items/0']),
        ({"$ref": "#/a b/0/x", "a b": [{"x": {"divisibleBy": 3}}]}, ['"divisibleBy" at #/a b/0/x']),
        ({"properties": {"a": {"type": "null", "required": True}}}, ['"required" at #/properties/a']),
    ],
)
def test_what_is_not_enforced_is_named_with_its_place(schema: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ParameterError) as raised:
        compiled(json=schema)
    assert raised.value.param == "structured_outputs"
    assert all(name in str(raised.value) for name in named) and "lenient" in str(raised.value)


def test_what_is_not_enforced_is_a_warning_where_that_is_asked_for() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"uniqueItems": True, "type": "array"}},
        "additionalProperties": False,
    }
    grammar = compiled(json=schema, lenient=True)
    assert grammar.warnings == ('the keyword "uniqueItems" at #/properties/a is not enforced',)
    assert takes(grammar, '{"a": [1, 1]}') and not takes(grammar, '{"b": 1}')
    [warning] = compiled(json={"oneOf": [{"type": "integer"}, {"type": "number"}]}, lenient=True).warnings
    assert "oneOf" in warning
    # A schema cannot ask for it behind the request's back.
    with pytest.raises(ParameterError, match="not"):
        compiled(json={"not": {}, "x-guidance": {"lenient": True}})
    with pytest.raises(ParameterError, match="not"):
        compiled(grammar='start: %json {"not": {}, "x-guidance": {"lenient": true}}')


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


def chain(length: int) -> dict[str, Any]:
    """A schema whose definitions refer to each other, one after the other."""
    definitions = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": {"type": "null"}}}


@pytest.mark.parametrize(
    ("asked", "rule"),
    [
        (dict(json="{"), "not valid JSON"),
        (dict(json="[1]"), "must be a JSON schema"),
        (dict(json="false"), "no text satisfies"),
        (dict(json={"type": "bogus"}), "Invalid type"),
        (dict(json={"type": "integer", "minimum": 2, "maximum": 1}), "Unsatisfiable"),
        (dict(json={"$ref": "#"}), "no text satisfies"),
        (dict(json={"$ref": "http://127.0.0.1:1/schema"}), "does not fetch"),
        (dict(json={"$ref": "#/$defs/missing"}), "does not exist"),
        (dict(json=nested(65)), "more than 64 levels deep"),
        (dict(json=nested(50_000)), "nested too deeply"),
        (dict(json={"enum": ["x" * 100 + str(i) for i in range(9000)]}), "the limit is 524288"),
        (dict(json={"properties": {f"p{i}": {} for i in range(3000)}}), "3000 properties at #"),
        (dict(json={"anyOf": [{"pattern": "a" * 100}] * 200}), "bytes of patterns"),
        (dict(json={"anyOf": [{}] * 11_000}), "11001 schemas within it"),
        (dict(json={"properties": []}), "not an object"),
        *[
            (dict(json=text), r'json has "\\ud800", which is half a character')
            for text in (r'{"const": "\ud800"}', r'{"pattern": "\ud800"}', r'{"$ref": "#/\ud800"}')
        ],
        (dict(regex="["), "unclosed"),
        (dict(regex="(?=a)b"), "look-around"),
        (dict(regex="(a|b)?" * 20_000), "the limit is 16384"),
        (dict(grammar="start: b"), "unknown name"),
        (dict(grammar="root ::= ("), "not valid GBNF"),
        (dict(grammar="root ::= " + "(" * 5000 + '"a"' + ")" * 5000), "nested too deeply"),
        (dict(grammar="start: " + "(" * 5000 + '"a"' + ")" * 5000), "too deeply nested"),
        (dict(grammar="start: " + " | ".join(f'"w{i}"' for i in range(20_000))), "the limit is 65536"),
        (dict(grammar=f"start: /{'(a|b)?' * 5000}/"), "the limit is 16384"),
        (dict(choice=tuple(f"{i} " * 2000 for i in range(200))), "the limit is 1048576"),
        (dict(json={"type": "object"}, whitespace_pattern="["), "unclosed"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_wrong_or_too_large_is_an_error_in_time(asked: dict[str, Any], rule: str) -> None:
    start = time.monotonic()
    with pytest.raises(ParameterError, match=rule):
        compiled(**asked)
    assert time.monotonic() - start < SECONDS


@pytest.mark.parametrize(
    "asked",
    [
        dict(regex="(a+)+b"),
        dict(regex="(a|a)*b"),
        dict(regex="a{1,100000}"),
        dict(regex=".*" * 50 + "x{500}"),
        dict(regex="(x+x+)+y"),
        dict(json={"type": "string", "maxLength": 10**6}),
        dict(json={"type": "array", "maxItems": 10**6}),
        dict(json={"properties": {f"p{i}": {"type": "string"} for i in range(1000)}}),
        dict(json={"enum": ["x" * 100 + str(i) for i in range(4000)]}),
        dict(json=nested(60)),
        # Deeper than the stack of an ordinary thread.
        dict(json=chain(3000)),
        dict(grammar="\n".join(["start: r0", *(f'r{i}: "w" r{i + 1} | "x"' for i in range(2400)), 'r2400: "z"'])),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_looks_dangerous_compiles_and_is_followed_in_time(asked: dict[str, Any]) -> None:
    start = time.monotonic()
    constraint = compiled(**asked).constraint()
    for _ in range(20):
        choices = allowed(constraint) - {EOS}
        if constraint.is_complete or not choices:
            break
        constraint.advance([min(choices)])
    assert time.monotonic() - start < SECONDS


def test_equal_parameters_are_compiled_once() -> None:
    first = compiler().compile(StructuredOutputsParams(json={"const": "once"}))
    again = compiler().compile(StructuredOutputsParams(json='{"const": "once"}'))
    assert first is again
    assert compiler().compile(StructuredOutputsParams(json={"const": "once"}, lenient=True)) is not first


# More than any machine takes.
PATIENT = {"seconds": PATIENCE}


@pytest.fixture
def mine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[GrammarCompiler]:
    """A compiler of the test's own, with the options that are its parameters. It lets `POISON` through."""
    monkeypatch.setattr(compiler_module, "grammar_source", poisoned_source)
    mine = GrammarCompiler(tokenizer(), VOCAB_SIZE, (EOS,), **getattr(request, "param", {}))
    yield mine
    mine.close()


def error_of(mine: GrammarCompiler, **asked: Any) -> str:
    return str(mine.compile(StructuredOutputsParams(**asked)).exception())


@pytest.mark.parametrize("mine", [{"seconds": 0.3}], indirect=True)
def test_what_never_ends_is_ended(mine: GrammarCompiler) -> None:
    assert "it took longer than 0.3 s to compile" in error_of(mine, regex="endless")
    pid = mine.trials.pid
    assert pid is not None and children(pid) == [], "it goes on"
    assert mine.compile(StructuredOutputsParams(choice=("x",))).result()
    assert mine.trials.pid == pid


@pytest.mark.parametrize("mine", [PATIENT | {"crowded_seconds": 0.1}], indirect=True)
def test_what_never_ends_makes_room_for_others(mine: GrammarCompiler) -> None:
    endless = [mine.compile(StructuredOutputsParams(regex=f"endless {i}")) for i in range(MAX_CHILDREN)]
    wait_until(lambda: mine.trials.pid is not None and len(children(mine.trials.pid)) == MAX_CHILDREN)
    assert mine.compile(StructuredOutputsParams(choice=("x",))).result()
    [number] = [number for number, future in enumerate(endless) if future.done()]
    error = endless[number].exception()
    assert isinstance(error, OverloadedError)
    assert "it took longer than 0.1 s to compile while other grammars waited" in str(error)
    again = mine.compile(StructuredOutputsParams(regex=f"endless {number}"))
    assert again is not endless[number], "it may be repeated"


@pytest.mark.parametrize("mine", [PATIENT], indirect=True)
def test_what_crashes_the_library_is_refused(mine: GrammarCompiler) -> None:
    assert "crashed on it (Segmentation fault)" in error_of(mine, regex="crashing")


@pytest.mark.parametrize("mine", [PATIENT], indirect=True)
def test_what_takes_too_much_memory_is_refused(mine: GrammarCompiler) -> None:
    assert "it needs more than 128 MB of memory to compile" in error_of(mine, regex="a{1000}{1000}{1000}")


@pytest.mark.parametrize("mine", [PATIENT], indirect=True)
def test_a_process_that_is_killed_is_followed_by_another(mine: GrammarCompiler) -> None:
    endless = mine.compile(StructuredOutputsParams(regex="endless"))
    assert mine.compile(StructuredOutputsParams(choice=("x",))).result()
    pid = mine.trials.pid
    assert pid is not None
    [child] = wait_until(lambda: children(pid))
    os.kill(pid, signal.SIGKILL)
    assert isinstance(endless.exception(), OverloadedError)
    wait_until_gone(child)
    assert mine.compile(StructuredOutputsParams(choice=("y",))).result()
    assert mine.trials.pid not in (pid, None)


def test_the_process_ends_with_its_parent() -> None:
    program = """
from jaxvllm.core.structured_outputs import StructuredOutputsParams
from jaxvllm.grammar import compiler as module
from tests.grammar.demo import compiler, compiled, poisoned_source
from tests.processes import children
from tests.waiting import wait_until
module.grammar_source = poisoned_source
compiled(choice=("x",))
compiler().compile(StructuredOutputsParams(regex="endless"))
pid = compiler().trials.pid
print(pid, *wait_until(lambda: children(pid)), flush=True)
input()
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
    for pid in pids:
        wait_until_gone(pid)


def test_close_ends_the_process_and_what_it_tries(mine: GrammarCompiler) -> None:
    assert mine.compile(StructuredOutputsParams(choice=("x",))).result()
    endless = mine.compile(StructuredOutputsParams(regex="endless"))
    pid = mine.trials.pid
    assert pid is not None
    [child] = wait_until(lambda: children(pid))
    mine.close()
    later = mine.compile(StructuredOutputsParams(choice=("y",)))
    for future in (endless, later):
        assert isinstance(future.exception(PATIENCE), OverloadedError), "who waits for it would wait forever"
    wait_until_gone(pid)
    wait_until_gone(child)
    mine.trials.start()
    assert mine.trials.pid in (None, pid), "nothing starts any more"


def test_what_fails_before_the_first_form_is_told_and_forms_compile(
    mine: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any) -> Any:
        raise OSError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(compiler_module, "LARGE_VOCABULARY", VOCAB_SIZE)
        patch.setattr(compiler_module, "new_tokens", fail)
        patch.setattr(mine.trials, "start", fail)
        mine.warm_up()
        wait_until(lambda: len(caplog.records) == NUM_THREADS)
    assert mine.compile(StructuredOutputsParams(choice=("x",))).result(PATIENCE)


@pytest.mark.parametrize("name", ["jaxvllm-grammar", "jaxvllm-trials"])
def test_a_thread_that_cannot_start_is_asked_for_again(
    mine: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        patch.setattr(compiler_module, "LARGE_VOCABULARY", VOCAB_SIZE)
        mine.warm_up()  # raises nothing
        wait_until(lambda: "can't start new thread" in caplog.text)
        error = mine.compile(StructuredOutputsParams(choice=("x",))).exception(PATIENCE)
        assert isinstance(error, OverloadedError)
    assert mine.trials.pid is None  # what was not told the tokenizer is gone
    assert mine.compile(StructuredOutputsParams(choice=("x",))).result(PATIENCE)


def test_a_panic_is_an_error_of_one_grammar(mine: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(params: StructuredOutputsParams, source: str) -> Any:
        raise SystemError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(mine, "_compile", panic)
        with pytest.raises(ParameterError, match="cannot be compiled: a bug"):
            mine.compile(StructuredOutputsParams(regex="x")).result()
    assert mine.compile(StructuredOutputsParams(regex="y")).result()
    assert mine.cache.num_bytes > 0


def test_a_sequence_has_a_state_of_its_own() -> None:
    grammar = compiled(regex="ab|cd")
    first, second = grammar.constraint(), grammar.constraint()
    start = allowed(first)
    first.advance(tokens("a"))
    assert allowed(first) != start == allowed(second)
    assert first.forced() == tokens("b")
    first.advance(tokens("b"))
    assert first.is_complete and allowed(first) == {EOS} and not second.is_complete


def test_a_constraint_takes_tokens_up_to_the_first_that_is_not_allowed() -> None:
    constraint = compiled(regex="a?b").constraint()
    a, b, z = (tokens(text)[-1] for text in (".a", ".b", ".z"))
    assert constraint.advance([z]) == 0
    assert constraint.advance([a, z, b]) == 1
    assert allowed(constraint) >= {b} and not constraint.is_complete
    assert constraint.advance([b, z]) == 1
    assert constraint.advance([z]) == 0 and allowed(constraint) == {EOS}
    assert constraint.advance([EOS]) == 1 and constraint.is_complete
