"""The text that llguidance compiles for what a request asks for: a grammar in its dialect of Lark, or a schema."""

import json
import re
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from jaxvllm.core.errors import ParameterError
from jaxvllm.core.structured_outputs import StructuredOutputsParams
from jaxvllm.grammar.json_schema import MAX_PATTERN_BYTES, check_schema, forgotten, guided, read_schema
from jaxvllm.grammar.structural_tag import structural_tag_grammar

# Converting 80 KB of GBNF takes 0.2 s, and compiling 870 KB 6 s.
MAX_LARK_BYTES = 2**16
# The first mask of 1 MB of choices took 1.1 s.
MAX_CHOICE_BYTES = 2**17

_LARK_REGEX = re.compile(r"/(?:\\.|[^/\\\n])+/")


def grammar_source(params: StructuredOutputsParams, special_tokens: dict[str, int]) -> str:
    """Returns the grammar of `params` as llguidance reads it.

    `special_tokens` are those of the vocabulary, by their text. Raises ParameterError for what is too large or no
    grammar at all; most mistakes only show when the result is compiled.
    """
    if params.whitespace_pattern is not None:
        check_pattern(params.whitespace_pattern, "whitespace_pattern")
    match params.kind:
        case "json":
            assert params.json is not None
            return _of_schema(read_schema(params.json, "json"), params)
        case "json_object":
            return _of_schema({"type": "object"}, params)
        case "regex":
            assert params.regex is not None
            return LLMatcher.grammar_from_regex(check_pattern(params.regex, "regex"))
        case "choice":
            assert params.choice is not None
            return _of_choices(params.choice)
        case "grammar":
            assert params.grammar is not None
            return LLMatcher.grammar_from_lark(to_lark(params.grammar, "grammar"))
        case _:
            assert params.structural_tag is not None
            return structural_tag_grammar(params, special_tokens, _Parts(params))


class _Parts:
    """The parts of a structural tag that have a form of their own, as Lark reads them within a rule."""

    def __init__(self, params: StructuredOutputsParams):
        self._params = params

    def schema(self, schema: Any) -> str:
        checked = check_schema(schema, "structural_tag")
        if not self._params.lenient and (found := forgotten(checked)):
            listed = ", ".join(f"the keyword {json.dumps(keyword)} at {place}" for keyword, place in found)
            raise ParameterError(
                f"structural_tag has a schema with {listed}, which cannot be enforced: leave it out, or set lenient to "
                "ignore it",
                "structural_tag",
            )
        return f"%json {json.dumps(guided(checked, self._params), ensure_ascii=False)}"

    def regex(self, pattern: Any) -> str:
        if not isinstance(pattern, str):
            raise ParameterError("structural_tag has a regex that is not a string: give a string", "structural_tag")
        return f"/{_in_lark(check_pattern(pattern, 'structural_tag'))}/"

    def lark(self, text: Any) -> str:
        if not isinstance(text, str):
            raise ParameterError("structural_tag has a grammar that is not a string: give a string", "structural_tag")
        return to_lark(text, "structural_tag")


def to_lark(text: str, name: str) -> str:
    """Returns a grammar in Lark's form, or in that of GBNF (`root ::= ...`), as llguidance's Lark."""
    if (size := len(text.encode())) > MAX_LARK_BYTES:
        raise ParameterError(f"{name} has {size} bytes, the limit is {MAX_LARK_BYTES}: make it smaller", name)
    # A division of two rules is none, so what is between two slashes is a regex or harmless.
    for found in _LARK_REGEX.findall(text):
        check_pattern(found, name)
    if re.search(r"^\s*[\w-]+\s*::=", text, re.MULTILINE) is None:
        return text
    try:
        return gbnf_to_lark(text)
    except (GbnfToLarkError, RecursionError, ValueError, IndexError, KeyError, AssertionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ParameterError(f"{name} is not valid GBNF: {reason}", name) from error


def check_pattern(pattern: str, name: str) -> str:
    """Returns a regular expression that is not too large to compile."""
    if (size := len(pattern.encode())) > MAX_PATTERN_BYTES:
        raise ParameterError(
            f"{name} has an expression of {size} bytes, the limit is {MAX_PATTERN_BYTES}: make it shorter", name
        )
    return pattern


def quoted(text: str) -> str:
    """Returns `text` as a string in Lark."""
    return json.dumps(text, ensure_ascii=False)


def _of_schema(schema: dict[str, Any], params: StructuredOutputsParams) -> str:
    return json.dumps({"grammars": [{"json_schema": guided(schema, params)}]}, ensure_ascii=False)


def _of_choices(choices: tuple[str, ...]) -> str:
    if (size := sum(len(choice.encode()) for choice in choices)) > MAX_CHOICE_BYTES:
        raise ParameterError(
            f"choice has {size} bytes, the limit is {MAX_CHOICE_BYTES}: give fewer or shorter ones", "choice"
        )
    return LLMatcher.grammar_from_lark("start: " + " | ".join(map(quoted, dict.fromkeys(choices))))


def _in_lark(pattern: str) -> str:
    """A regular expression as it stands between two slashes."""
    return re.sub(r"\\.|/|\n", lambda m: {"/": r"\/", "\n": r"\n"}.get(m[0], m[0]), pattern, flags=re.DOTALL)
