"""Bad words become sequences of tokens, which the sampler never completes."""

from collections.abc import Sequence

from jaxvllm.core.errors import ParameterError
from jaxvllm.core.request import MAX_BAD_WORD_TOKENS
from jaxvllm.text.tokenizer import Tokenizer


def read_bad_words(words: Sequence[str], tokenizer: Tokenizer | None, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Returns the tokens of each word as it begins a text and, where these differ, as it follows a space.

    Like vLLM, it takes the form with a space only if it has another first token and no more tokens than the other.
    Raises ValueError for words that cannot be tokenized, or that have too many tokens together.
    """
    if not words:
        return ()
    if tokenizer is None:
        raise ParameterError("bad_words needs a tokenizer, and this model has none: leave it out", "bad_words")
    found: list[tuple[int, ...]] = []
    for word in words:
        begins = word.lstrip()
        if not begins:
            raise ParameterError(f"bad_words must each have a character that is no space, not {word!r}", "bad_words")
        first, spaced = (tuple(tokenizer.encode(form, add_special_tokens=False)) for form in (begins, " " + begins))
        found.append(first)
        if spaced[0] != first[0] and len(spaced) == len(first):
            found.append(spaced)
        if max(*first, *spaced) >= vocab_size:
            raise ParameterError(f"bad word {word!r} has a token outside the model's vocabulary", "bad_words")
    count = sum(map(len, found))
    if count > MAX_BAD_WORD_TOKENS:
        raise ParameterError(
            f"bad_words have {count} tokens together, the limit is {MAX_BAD_WORD_TOKENS}: give fewer or shorter ones",
            "bad_words",
        )
    return tuple(found)
