"""Text in parts, each with whether it was accepted drafts: characters of several tokens, and text that is held back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.text.completion_text import CompletionText
from jaxvllm.text.draft_spans import DraftSpans
from tests.text.small_tokenizers import small_tokenizer

type Spans = list[tuple[str, bool]]


def told(
    kind: str, tokens: list[tuple[int, bool]], sizes: list[int], params: SamplingParams
) -> tuple[str, list[Spans]]:
    """All text of `tokens`, and the spans of each delta, if so many tokens come at once."""
    text, spans = CompletionText.open(small_tokenizer(kind), params), DraftSpans()
    deltas: list[Spans] = []
    for _, is_draft in tokens:
        spans.expect(is_draft)
    ids = [token_id for token_id, _ in tokens]
    for size in [*sizes, len(ids)]:
        pushed, ids = ids[:size], ids[size:]
        if spans.push(text, pushed) is not None:
            break
        deltas.append(spans.split(text.take()))
    text.finish()
    deltas.append(spans.split(text.take()))
    return text.text, deltas


def ids(kind: str, *pieces: str) -> list[int]:
    found = [small_tokenizer(kind).backend.token_to_id(piece) for piece in pieces]
    assert None not in found
    return [one for one in found if one is not None]


# The bytes of é in the alphabet of a byte-level vocabulary, which has a token for each.
LEAD, TRAIL = "Ã", "©"


@pytest.mark.parametrize(
    "marks, expected",
    [
        ([0, 1, 1, 1], [("h", False), ("éo", True)]),
        ([1, 0, 1, 1], [("h", True), ("é", False), ("o", True)]),
        ([1, 1, 0, 0], [("h", True), ("éo", False)]),
        ([1, 1, 1, 1], [("héo", True)]),
    ],
)
def test_a_character_of_several_tokens_was_drafts_if_all_were(marks: list[int], expected: Spans) -> None:
    tokens = list(zip(ids("byte_level", "h", LEAD, TRAIL, "o"), map(bool, marks), strict=True))
    assert told("byte_level", tokens, [], SamplingParams())[1][0] == expected
    one_by_one = told("byte_level", tokens, [1, 1, 1], SamplingParams())[1]
    assert [span for delta in one_by_one for span in delta if len(span[0]) == 1] == [
        (char, is_draft) for text, is_draft in expected for char in text
    ]


def test_bytes_that_end_the_text_are_as_their_tokens() -> None:
    for is_draft in (False, True):
        text, deltas = told("byte_level", [(ids("byte_level", LEAD)[0], is_draft)], [], SamplingParams())
        assert (text, deltas[-1]) == ("\ufffd", [("\ufffd", is_draft)])


def test_text_that_is_held_back_keeps_its_mark() -> None:
    tokens = list(zip(ids("byte_level", "h", "e", "l", "o"), (True, False, True, True), strict=True))
    text, deltas = told("byte_level", tokens, [1, 1, 1], SamplingParams(stop=["helx"]))
    assert text == "helo"
    assert deltas == [[], [], [], [("h", True), ("e", False), ("lo", True)], []]
    text, deltas = told("byte_level", tokens, [1, 1, 1], SamplingParams(stop=["el"]))
    assert (text, deltas[-1]) == ("h", [])
    assert deltas[0] == [("h", True)]


KINDS = ("byte_level", "byte_fallback")


@pytest.mark.parametrize("kind", KINDS)
@given(st.data(), st.lists(st.integers(0, 4), max_size=12), st.booleans())
@settings(deadline=None)
def test_spans_are_the_text_whatever_its_tokens_and_its_deltas(
    kind: str, data: st.DataObject, sizes: list[int], stops: bool
) -> None:
    tokenizer = small_tokenizer(kind)
    size = tokenizer.backend.get_vocab_size()
    tokens = data.draw(st.lists(st.tuples(st.integers(0, size - 1), st.booleans()), max_size=20))
    text, deltas = told(kind, tokens, sizes, SamplingParams(stop=["he", "o"] if stops else []))
    spans = [span for delta in deltas for span in delta]
    assert "".join(part for part, _ in spans) == text
    assert all(part for part, _ in spans)
    for delta in deltas:
        assert all(one[1] != other[1] for one, other in zip(delta, delta[1:], strict=False))
    if len({is_draft for _, is_draft in tokens}) == 1:
        assert {is_draft for _, is_draft in spans} <= {tokens[0][1]}
