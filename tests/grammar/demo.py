"""The tokenizer of the demo model, grammars compiled for it, and what texts they take."""

import json
from functools import cache

import numpy as np

from jaxvllm.core.structured_outputs import StructuredOutputsParams
from jaxvllm.grammar.compiler import GrammarCompiler
from jaxvllm.grammar.constraint import CompiledGrammar
from jaxvllm.grammar.source import grammar_source
from jaxvllm.grammar.vocabulary import GrammarVocabulary
from jaxvllm.model_name import DEMO_MODEL
from jaxvllm.text.tokenizer import Tokenizer

VOCAB_SIZE = 2048
EOS = 1
# What the library does not survive. Such schemas are refused before it sees them, but others may come through.
POISON = {
    # Compiling it never ends: the library builds the states of 9973 times 9967 remainders.
    "endless": {"allOf": [{"type": "integer", "multipleOf": 9973}, {"type": "integer", "multipleOf": 9967}]},
    # The library overflows its stack.
    "crashing": {"type": "integer", "minimum": -(2**63) - 5, "maximum": -(2**63) - 1},
}


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(DEMO_MODEL)


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer(), VOCAB_SIZE, (EOS,))


def poisoned_source(params: StructuredOutputsParams, vocabulary: GrammarVocabulary) -> str:
    """Like `grammar_source`, but the expressions "endless" and "crashing", with anything after them, are `POISON`."""
    schema = POISON.get((params.regex or "").split(" ")[0])
    if schema is None:
        return grammar_source(params, vocabulary)
    return json.dumps({"grammars": [{"json_schema": schema}]})


def compiled(**asked: object) -> CompiledGrammar:
    return compiler().compile(StructuredOutputsParams(**asked)).result()  # type: ignore[arg-type]


def allowed(constraint: object) -> set[int]:
    """The tokens that a constraint's mask allows."""
    words = np.zeros(VOCAB_SIZE // 32, np.int32)
    constraint.fill(words)  # type: ignore[attr-defined]
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def tokens(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def takes(grammar: CompiledGrammar, text: str) -> bool:
    """Whether `text` is one that the grammar takes, each of whose tokens was allowed when it came."""
    constraint = grammar.constraint()
    for token in tokens(text):
        if constraint.is_complete or token not in allowed(constraint):
            return False
        constraint.advance([token])
    return EOS in allowed(constraint)
