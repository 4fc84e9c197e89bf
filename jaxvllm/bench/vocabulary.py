"""`Vocabulary`: draws the tokens of prompts, and counts the tokens of texts."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxvllm.client.api import Api
from jaxvllm.client.errors import ServerError

# Every tokenizer that we know of has more tokens than this, so these can be drawn without asking the server.
SAFE_SIZE = 1000


class Tokens(Protocol):
    """Converts text to tokens and back."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class LocalTokenizer:
    """A tokenizer that is read from the tokenizer.json in a checkpoint's directory."""

    def __init__(self, directory: Path):
        from tokenizers import Tokenizer  # this import takes a tenth of a second

        file = directory / "tokenizer.json" if directory.is_dir() else directory
        if not file.is_file():
            raise ValueError(f"--tokenizer {directory} must be a directory with a tokenizer.json")
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exceptions
            raise ValueError(f"{file} is not a tokenizer: {error}") from None

    @cached_property
    def ordinary(self) -> np.ndarray:
        """The tokens that are not special.  # i64[V']"""
        special = [token for token, added in self._tokenizer.get_added_tokens_decoder().items() if added.special]
        return np.setdiff1d(np.arange(self._tokenizer.get_vocab_size()), special)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


class ServerTokenizer:
    """The server's own tokenizer, used through the endpoints /tokenize and /detokenize of vLLM and jaxvllm."""

    def __init__(self, api: Api, model: str):
        self._api = api
        self._model = model

    def encode(self, text: str) -> list[int]:
        return list(self._ask("/tokenize", prompt=text, add_special_tokens=False)["tokens"])

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._ask("/detokenize", tokens=list(tokens))["prompt"])

    def _ask(self, path: str, **fields: Any) -> dict[str, Any]:
        try:
            return self._api.post(path, {"model": self._model, **fields})
        except ServerError as error:
            if error.status in (404, 405):
                raise ValueError(f"the server has no {path}, so lengths are unknown: give --tokenizer DIR") from None
            raise


class Vocabulary:
    """Draws random tokens, and counts the tokens of texts.

    Tokens below `size` are drawn; with None, all tokens of a local tokenizer. With `sends_text`, prompts are sent as
    text, to an endpoint that takes no token ids. Then they may be a few tokens longer or shorter than the tokens drawn,
    because the text of several tokens is not always tokenized into the same tokens.
    """

    def __init__(self, tokens: Tokens, size: int | None, sends_text: bool):
        if size is not None and size < 1:
            raise ValueError(f"--random-vocab-size must be at least 1, not {size}")
        if isinstance(tokens, LocalTokenizer):
            self._drawn = tokens.ordinary[: None if size is None else np.searchsorted(tokens.ordinary, size)]
        else:
            self._drawn = np.arange(size or SAFE_SIZE)
        self._tokens = tokens
        self._sends_text = sends_text

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """Draws tokens at random, all with the same probability."""
        drawn: list[int] = self._drawn[rng.integers(len(self._drawn), size=count)].tolist()
        return drawn

    def prompt(self, tokens: list[int]) -> str | list[int]:
        """Returns the tokens in the form in which they are sent."""
        if not self._sends_text:
            return tokens
        text = self._tokens.decode(tokens)
        # Texts of random tokens belong to no language: the demo model's tokenizer reads 1140 tokens in a text of 896.
        read = self._tokens.encode(text)
        return self._tokens.decode(read[: len(tokens)]) if len(read) > len(tokens) else text

    def count(self, text: str) -> int:
        return len(self._tokens.encode(text))
