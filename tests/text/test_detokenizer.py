import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.text.completion_text import CompletionText, StopMatch
from jaxvllm.text.detokenizer import WindowDetokenizer, byte_alphabet
from tests.text.small_tokenizers import small_tokenizer

KINDS = ("byte_level", "byte_fallback")
texts = st.text(st.sampled_from("helo !é東🙂\n\ufffdñ") | st.characters(exclude_categories=["Cs"]), max_size=40)
cuts = st.lists(st.integers(1, 7), max_size=40)


def split(token_ids: list[int], sizes: list[int]) -> list[list[int]]:
    groups, start = [], 0
    for size in sizes:
        groups.append(token_ids[start : start + size])
        start += size
    return [*groups, token_ids[start:]]


def streamed(kind: str, token_ids: list[int], sizes: list[int], params: SamplingParams) -> list[str]:
    stream = CompletionText.open(small_tokenizer(kind), params)
    pieces = []
    for group in split(token_ids, sizes):
        assert stream.push(group) is None
        pieces.append(stream.take())
    assert stream.finish() is None
    pieces.append(stream.take())
    assert "".join(pieces) == stream.text
    return pieces


def test_the_byte_alphabet_is_the_library_s() -> None:
    from tokenizers import pre_tokenizers

    alphabet = byte_alphabet()
    assert sorted(alphabet) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(alphabet.values()) == list(range(256))


@pytest.mark.parametrize("kind", KINDS)
@given(texts, cuts)
@settings(deadline=None)
def test_text_survives_any_split_and_no_piece_has_half_a_character(kind: str, text: str, sizes: list[int]) -> None:
    tokenizer = small_tokenizer(kind)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = streamed(kind, token_ids, sizes, SamplingParams())
    assert "".join(pieces) == tokenizer.decode(token_ids) == text.replace("▁", " ")
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


@pytest.mark.parametrize("kind", KINDS)
@given(st.data(), cuts, st.booleans())
@settings(deadline=None, max_examples=300)
def test_any_tokens_in_any_split_read_as_their_full_decode(
    kind: str, data: st.DataObject, sizes: list[int], skip: bool
) -> None:
    tokenizer = small_tokenizer(kind)
    # One id beyond the vocabulary: a model's logits may be padded.
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size), max_size=30))
    pieces = streamed(kind, token_ids, sizes, SamplingParams(skip_special_tokens=skip))
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=skip)


@given(st.lists(st.integers(0, 273), max_size=8), st.lists(st.integers(0, 273), max_size=20), cuts)
@settings(deadline=None)
def test_a_completion_reads_as_the_continuation_of_its_prompt(
    prompt: list[int], output: list[int], sizes: list[int]
) -> None:
    tokenizer = small_tokenizer("byte_fallback")
    prompt.append(tokenizer.backend.token_to_id("▁hello"))  # runs of bytes that begin in the prompt differ
    stream = CompletionText.open(tokenizer, SamplingParams(), prompt)
    for group in split(output, sizes):
        stream.push(group)
    stream.finish()
    assert tokenizer.decode(prompt) + stream.text == tokenizer.decode(prompt + output)


def test_each_character_comes_with_its_last_byte() -> None:
    tokenizer = small_tokenizer("byte_level")
    token_ids = [tokenizer.backend.token_to_id(char) for char in ("ä", "½", "ł", "a")]  # e4 bd a0, then a
    assert None not in token_ids
    stream = CompletionText.open(tokenizer, SamplingParams())
    seen = []
    for token_id in token_ids:
        stream.push([token_id])
        seen.append(stream.take())
    assert seen == ["", "", "你", "a"]


def test_a_completion_keeps_the_space_that_parts_it_from_the_prompt() -> None:
    tokenizer = small_tokenizer("byte_fallback")
    prompt, output = tokenizer.encode("hello"), [tokenizer.backend.token_to_id("▁hello")]
    stream = CompletionText.open(tokenizer, SamplingParams(), prompt)
    stream.push(output)
    assert stream.text == " hello"


def test_no_text_when_none_is_wanted() -> None:
    tokenizer = small_tokenizer("byte_level")
    stream = CompletionText.open(tokenizer, SamplingParams(detokenize=False))
    stream.push(tokenizer.encode("fox"))
    stream.finish()
    assert stream.text == stream.take() == ""


# Stop strings


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The oracle: where the first stop string is complete, and the longest that ends there."""
    for end in range(len(text) + 1):
        if ending := [stop for stop in stops if text[:end].endswith(stop)]:
            return end, max(ending, key=len)
    return None


@pytest.mark.parametrize("kind", KINDS)
@given(
    st.text("heo !é🙂", max_size=25),
    st.lists(st.text("heo !é🙂", min_size=1, max_size=5), min_size=1, max_size=4),
    cuts,
    st.booleans(),
)
@settings(deadline=None, max_examples=400)
def test_stop_strings_against_a_brute_force_search(
    kind: str, text: str, stops: list[str], sizes: list[int], keep: bool
) -> None:
    tokenizer = small_tokenizer(kind)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    expected = first_stop(text, stops)
    whole = text
    if expected:
        end, stop = expected
        whole = text[: end if keep else end - len(stop)]
    stream = CompletionText.open(tokenizer, SamplingParams(stop=stops, include_stop_str_in_output=keep))
    seen, match = "", None
    for group in split(token_ids, sizes):
        if (match := stream.push(group)) is not None:
            break
        seen += stream.take()
        assert whole.startswith(seen)  # nothing is released that a match would take back
    match = match or stream.finish()
    assert (match.stop_reason if match else None) == (expected[1] if expected else None)
    assert seen + stream.take() == stream.text == whole
    if match:
        assert len(tokenizer.decode(token_ids[: match.num_tokens])) >= expected[0]  # type: ignore[index]


def test_only_what_could_become_a_stop_string_is_held() -> None:
    tokenizer = small_tokenizer("byte_level")
    stream = CompletionText.open(tokenizer, SamplingParams(stop=["END", "!x"]))
    seen = []
    for char in "aEbEN!END":
        match = stream.push([tokenizer.backend.token_to_id(char)])
        seen.append(stream.take())
    assert seen == ["a", "", "Eb", "", "", "EN", "!", "", ""]
    assert match == StopMatch("END", 9)
    assert stream.text == "aEbEN!"


def test_all_tokens_at_once_stop_at_the_same_token() -> None:
    tokenizer = small_tokenizer("byte_level")
    token_ids = tokenizer.encode("Once upon a time there was")
    stream = CompletionText.open(tokenizer, SamplingParams(stop="time"))
    match = stream.push(token_ids)
    assert match is not None and match.num_tokens < len(token_ids)
    assert "time" in tokenizer.decode(token_ids[: match.num_tokens])
    assert "time" not in tokenizer.decode(token_ids[: match.num_tokens - 1])
    assert stream.text == "Once upon a "


def test_min_tokens_passes_over_early_stop_strings() -> None:
    tokenizer = small_tokenizer("byte_level")
    token_ids = [tokenizer.backend.token_to_id(char) for char in "xaxbxc"]
    stream = CompletionText.open(tokenizer, SamplingParams(stop="x", min_tokens=3))
    assert stream.push(token_ids) == StopMatch("x", 5)
    assert stream.text == "xaxb"


def test_what_is_held_at_the_end_is_released() -> None:
    tokenizer = small_tokenizer("byte_level")
    stream = CompletionText.open(tokenizer, SamplingParams(stop="there!"))
    stream.push(tokenizer.encode("fox there"))
    assert stream.text == "fox "
    assert stream.finish() is None
    assert stream.text == "fox there"


def test_a_stop_string_in_the_last_held_bytes_still_counts() -> None:
    tokenizer = small_tokenizer("byte_fallback")
    stream = CompletionText.open(tokenizer, SamplingParams(stop="🙂"))
    token_ids = tokenizer.encode("hello 🙂")
    assert stream.push(token_ids) is None
    assert stream.finish() == StopMatch("🙂", len(token_ids))
    assert stream.text == "hello "


def test_a_group_that_ends_in_half_a_character() -> None:
    """However many tokens wait: with several of them the last may be the first of a character."""
    data = "abcdefghijé and more".encode()
    detokenizer = WindowDetokenizer(lambda ids: bytes(ids).decode(errors="replace"), lambda _: True, frozenset(), ())
    pieces = [detokenizer.push(data[:11]), detokenizer.push(data[11:12]), detokenizer.push(data[12:])]
    assert "".join(pieces) + detokenizer.flush() == data.decode()
