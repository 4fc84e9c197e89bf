"""The text that llguidance compiles for what a request asks for: a grammar in its dialect of Lark, or a schema."""

import json
import re
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from jaxvllm.core.errors import ParameterError
from jaxvllm.core.structured_outputs import StructuredOutputsParams
from jaxvllm.grammar.json_schema import (
    MAX_PATTERN_BYTES,
    RESERVED_OPTIONS,
    check_schema,
    first_named,
    forgotten,
    guided,
    keyword_at,
    read_schema,
)
from jaxvllm.grammar.structural_tag import quoted, structural_tag_grammar
from jaxvllm.grammar.vocabulary import GrammarVocabulary

# Converting 80 KB of GBNF takes 0.2 s, and compiling 870 KB 6 s.
MAX_LARK_BYTES = 2**16
# Compiling 1 MB of choices takes 0.4 s.
MAX_CHOICE_BYTES = 2**20

_LARK_REGEX = re.compile(r"/(?:\\.|[^/\\\n])+/")
# What may hold the word without being it, and the word before a JSON schema.
_LARK_JSON = re.compile(r'"(?:\\.|[^"\\\n])*"|' + _LARK_REGEX.pattern + r"|//[^\n]*|#[^\n]*|%json\s*(?P<schema>)")
# A string, a regex or a comment of Lark, whose text names no token, or the name of a token, which is a group.
_LARK_TOKEN_NAME = re.compile(r'"(?:\\.|[^"\\\n])*"|' + _LARK_REGEX.pattern + r"|//[^\n]*|#[^\n]*|(<[^<>\s\"]+>)")


def grammar_source(params: StructuredOutputsParams, vocabulary: GrammarVocabulary) -> str:
    """Returns the grammar of `params` as llguidance reads it.

    Raises ParameterError for what is too large or no grammar at all; most mistakes only show when the result is
    compiled.
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
            return LLMatcher.grammar_from_lark(to_lark(params.grammar, params, vocabulary))
        case _:
            assert params.structural_tag is not None
            return structural_tag_grammar(params, vocabulary.special_tokens, _LarkTerms(params, vocabulary))


class _LarkTerms:
    """The parts of a structural tag that have a form of their own, as Lark reads them within a rule."""

    def __init__(self, params: StructuredOutputsParams, vocabulary: GrammarVocabulary):
        self._params = params
        self._vocabulary = vocabulary

    def schema(self, schema: Any) -> str:
        checked = check_schema(schema, "structural_tag")
        for_llguidance = guided(checked, self._params)
        if not self._params.lenient and (found := forgotten(checked)):
            listed = ", ".join(first_named([keyword_at(*one) for one in found]))
            raise ParameterError(
                f"structural_tag has a schema with {listed}, which cannot be enforced: leave it out, or set lenient to "
                "ignore it",
                "structural_tag",
            )
        return f"%json {json.dumps(for_llguidance, ensure_ascii=False)}"

    def regex(self, pattern: Any) -> str:
        if not isinstance(pattern, str):
            raise ParameterError("structural_tag has a regex that is not a string: give a string", "structural_tag")
        return f"/{_in_lark(check_pattern(pattern, 'structural_tag'))}/"

    def lark(self, text: Any) -> str:
        if not isinstance(text, str):
            raise ParameterError("structural_tag has a grammar that is not a string: give a string", "structural_tag")
        return to_lark(text, self._params, self._vocabulary)


def to_lark(text: str, params: StructuredOutputsParams, vocabulary: GrammarVocabulary) -> str:
    """Returns a grammar in Lark's form, or in that of GBNF (`root ::= ...`), as llguidance's Lark.

    It may name a token of the vocabulary, as in `<|user|>`, or `<tool_call>` where that is one token.
    """
    name = params.kind
    if (size := len(text.encode())) > MAX_LARK_BYTES:
        raise ParameterError(f"{name} has {size} bytes, the limit is {MAX_LARK_BYTES}: make it smaller", name)
    # A division of two rules is none, so what is between two slashes is a regex or harmless.
    for found in _LARK_REGEX.findall(text):
        check_pattern(found, name)
    if re.search(r"^\s*[\w-]+\s*::=", text, re.MULTILINE) is None:
        return _with_guided_schemas(_with_numbered_tokens(text, vocabulary), params)
    try:
        return gbnf_to_lark(text)
    except (GbnfToLarkError, RecursionError, ValueError, IndexError, KeyError, AssertionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ParameterError(f"{name} is not valid GBNF: {reason}", name) from error


def _with_numbered_tokens(lark: str, vocabulary: GrammarVocabulary) -> str:
    """Returns a grammar in Lark in which tokens that llguidance takes for text are named by their numbers."""
    numbers = vocabulary.named_text_tokens
    return _LARK_TOKEN_NAME.sub(lambda at: f"<[{numbers[at[1]]}]>" if at[1] in numbers else at[0], lark)


def _with_guided_schemas(lark: str, params: StructuredOutputsParams) -> str:
    """Returns a grammar in Lark in which llguidance reads each schema after `%json` as it reads one of a request."""
    parts = []
    end = 0
    while found := _LARK_JSON.search(lark, end):
        parts.append(lark[end : found.end()])
        end = found.end()
        if found["schema"] is not None:
            try:
                schema, end = json.JSONDecoder().raw_decode(lark, end)
            except (ValueError, RecursionError) as error:
                raise ParameterError(
                    f"{params.kind} has a %json that is not valid JSON: {error}", params.kind
                ) from error
            held = guided(check_schema(schema, params.kind), params)
            if isinstance(schema, dict) and isinstance(given := schema.get("x-guidance"), dict):
                held["x-guidance"] |= {name: value for name, value in given.items() if name not in RESERVED_OPTIONS}
            parts.append(json.dumps(held, ensure_ascii=False))
    return "".join([*parts, lark[end:]])


def check_pattern(pattern: str, name: str) -> str:
    """Returns a regular expression that is not too large to compile."""
    if (size := len(pattern.encode())) > MAX_PATTERN_BYTES:
        raise ParameterError(
            f"{name} has an expression of {size} bytes, the limit is {MAX_PATTERN_BYTES}: make it shorter", name
        )
    return pattern


def _of_schema(schema: dict[str, Any], params: StructuredOutputsParams) -> str:
    return json.dumps({"grammars": [{"json_schema": guided(schema, params)}]}, ensure_ascii=False)


def _of_choices(choices: tuple[str, ...]) -> str:
    if (size := sum(len(choice.encode()) for choice in choices)) > MAX_CHOICE_BYTES:
        raise ParameterError(
            f"choice has {size} bytes, the limit is {MAX_CHOICE_BYTES}: give fewer or shorter ones", "choice"
        )
    # One terminal, because llguidance follows at most 2000 alternatives of a rule.
    return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(quoted, dict.fromkeys(choices))))


def _in_lark(pattern: str) -> str:
    """Returns a regular expression as it stands between two slashes."""
    return re.sub(r"\\.|/|\n", lambda m: {"/": r"\/", "\n": r"\n"}.get(m[0], m[0]), pattern, flags=re.DOTALL)
