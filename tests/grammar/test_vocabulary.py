"""Forms whose texts contain the spelling of added tokens: they come whole, and special tokens never spell them."""

import re
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from jaxvllm.grammar.constraint import CompiledGrammar
from jaxvllm.grammar.vocabulary import GrammarVocabulary
from jaxvllm.text.detokenizer import byte_alphabet
from tests.grammar.demo import EOS, allowed, compiled, takes, tokenizer

ADDED = tokenizer().backend.get_added_tokens_decoder()
SPECIAL = {token_id for token_id, token in ADDED.items() if token.special}


def written(grammar: CompiledGrammar, seed: int) -> str:
    """Returns a text that a model writes which likes all tokens equally, shown as an answer is, and no longer."""
    rng, constraint, ids = np.random.default_rng(seed), grammar.constraint(), list[int]()
    for _ in range(100):
        new = list(constraint.forced()) or [int(rng.choice(sorted(allowed(constraint))))]
        assert constraint.advance(new) == len(new), "a constraint refuses what it forces or allows"
        ids += new
        if constraint.is_complete:
            break
    assert not SPECIAL.intersection(ids[:-1]) and ids[-1] not in SPECIAL - {EOS}
    return tokenizer().decode(ids)


@pytest.mark.parametrize("token", [token.content for token in ADDED.values()])
@pytest.mark.parametrize("around", [("", ""), ("ab", ""), ("", " c"), ("<", ">")])
def test_a_forced_text_with_the_spelling_of_an_added_token_comes_whole(token: str, around: tuple[str, str]) -> None:
    text = token.join(around)
    forms: tuple[dict[str, Any], ...] = (
        dict(choice=[text]),
        dict(choice=[text, f"{text}."]),
        dict(regex="".join(f"\\x{ord(char):02x}" for char in text)),
        dict(json={"const": text}),
        dict(grammar=f'start: "{text}"'),
        dict(structural_tag={"format": {"type": "json_schema", "json_schema": {"enum": [text]}}}),
    )
    for form in forms:
        for seed in range(2):
            got = written(compiled(**form), seed)
            assert got.strip('"') in (text, f"{text}."), (form, got)


@pytest.mark.parametrize("pattern", ["<tool_call>[a-z]{1,5}</tool_call>", "[a-z]{1,3}<tool_call>x", "(<.?end.>){1,2}"])
def test_an_open_form_with_such_a_spelling_comes_whole(pattern: str) -> None:
    for seed in range(5):
        assert re.fullmatch(pattern, written(compiled(regex=pattern), seed))


def test_added_tokens_that_are_not_special_are_text() -> None:
    call, end = (tokenizer().backend.token_to_id(text) for text in ("<tool_call>", "</tool_call>"))
    constraint = compiled(regex="(<tool_call>|x)[a-z]</tool_call>").constraint()
    assert call in allowed(constraint)
    assert constraint.advance([call]) == 1 and not {call, end} & allowed(constraint)


def test_lark_names_tokens_special_or_not() -> None:
    user, call = (tokenizer().backend.token_to_id(text) for text in ("<|user|>", "<tool_call>"))
    assert compiled(grammar='start: <|user|> <tool_call> "<tool_call>x" // <tool_call>').first_forced[:2] == (
        user,
        call,
    )
    assert takes(compiled(grammar='start: /<tool_call>/ "<|end|"'), "<tool_call><|end|")


@pytest.mark.parametrize(
    "form",
    [
        dict(grammar='start: "a" <|end|>'),
        dict(grammar=f'start: /[ab]/ <[{EOS}]> "never"'),
        dict(
            structural_tag={"format": {"type": "tag", "begin": "a", "content": {"type": "any_text"}, "end": "<|end|>"}}
        ),
    ],
)
def test_a_form_that_names_eos_is_over_with_it(form: dict[str, Any]) -> None:
    constraint = compiled(**form).constraint()
    assert EOS not in constraint.forced()
    [a] = tokenizer().encode("a", add_special_tokens=False)
    assert constraint.advance([a]) == 1 and not constraint.is_complete
    assert EOS in allowed(constraint) and EOS not in constraint.forced()
    assert constraint.advance([EOS]) == 1 and constraint.is_complete and not constraint.forced()


def test_a_vocabulary_whose_tokenizer_changes_texts_spells_them_as_they_are() -> None:
    pieces = {char: number for number, char in enumerate(byte_alphabet())}
    backend = Tokenizer(models.BPE(vocab=pieces, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    backend.normalizer = normalizers.Lowercase()  # type: ignore[assignment]
    backend.add_tokens([AddedToken("<Call>", normalized=True), AddedToken("é è", normalized=False)])
    backend.add_special_tokens(["</s>", "!"])
    size = backend.get_vocab_size() + 3
    eos = backend.token_to_id("</s>")
    vocabulary = GrammarVocabulary(backend, size, (eos,))
    for text in ("abc", "ABC", "a<Call>b", "x</s></s>y", "</s", "é è!", "!", "<call>", "\n\0"):
        ids = vocabulary(text)
        assert b"".join(vocabulary.tokens[token_id] for token_id in ids) == text.encode()
        assert not set(ids) & set(vocabulary.special_token_ids) - {backend.token_to_id("!")}
    assert {eos, size - 1, size - 3} <= set(vocabulary.special_token_ids)
    assert len(vocabulary.tokens) == size
