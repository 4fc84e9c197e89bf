"""`PromptReader`: checks prompts in all their forms and turns them into token ids before anything is queued."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from jaxvllm.core.errors import ContextLengthError, ParameterError
from jaxvllm.core.request import Prompt, TokenIds
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.core.side_input import PLACEHOLDER, SideInput
from jaxvllm.text.tokenizer import Tokenizer

# The keys of a prompt that is a mapping, as in vLLM. It has one of the first three, and may have a salt.
FIELDS = ("prompt", "prompt_token_ids", "prompt_embeds", "cache_salt")

type PromptLike = str | Sequence[int] | Mapping[str, Any]


@dataclass(frozen=True)
class PromptRoom:
    """The parameters of a request that concern the length of its prompt."""

    scores_only: bool = False  # no token is generated, so that the prompt may be as long as the model
    max_tokens: int | None = None  # to generate, at most
    keep: int | None = None  # only so many of the prompt's last tokens; -1: as many as leave room for max_tokens

    @classmethod
    def of(cls, params: SamplingParams, is_pooled: bool = False) -> "PromptRoom":
        """Returns the room that a request with these parameters leaves for its prompt.

        Nothing is generated after a prompt that `is_pooled`.
        """
        if is_pooled:
            return cls(scores_only=True, max_tokens=0, keep=params.truncate_prompt_tokens)
        return cls(params.scores_only, params.max_tokens, params.truncate_prompt_tokens)


ANY_LENGTH = PromptRoom()


@dataclass(frozen=True)
class PromptReader:
    """Turns `PromptLike` values into `Prompt`s. For a wrong one it raises a ValueError with the rule and the value.

    For a prompt that is too long it raises a `ContextLengthError`. The limit leaves room for an answer of at least one
    token, unless the request only scores its prompt.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int

    @property
    def max_chars(self) -> int:
        """The number of characters above which every text is too long for a prompt."""
        return self.max_model_len * (1 if self.tokenizer is None else self.tokenizer.longest_token)

    def read(self, prompt: PromptLike, *, add_special_tokens: bool = True, room: PromptRoom = ANY_LENGTH) -> Prompt:
        """Reads a prompt from a text, from token ids, or from a mapping with either and perhaps a `cache_salt`.

        A mapping may have `prompt_embeds` instead, an array f[N, E] of what the embedding table would give.
        """
        keep = self._kept(room)
        if isinstance(prompt, Mapping) and prompt.get("prompt_embeds") is not None:
            return self._read_embeds(prompt, room, keep)
        inner, salt = self._unpack(prompt) if isinstance(prompt, Mapping) else (prompt, None)
        if isinstance(inner, str):
            ids = self._tokenize(inner, add_special_tokens, room, keep)
            return Prompt(inner, self._check(ids, room, keep), salt)
        if isinstance(inner, bytes) or not isinstance(inner, Sequence | np.ndarray):
            raise ParameterError(f"a prompt is a string, token ids or a mapping of one, not {type(inner).__name__}")
        return Prompt(None, self._check(cast(Sequence[int], inner), room, keep), salt)

    def _read_embeds(self, mapping: Mapping[str, Any], room: PromptRoom, keep: int | None) -> Prompt:
        field = "prompt_embeds"
        salt = self._salt(mapping)
        if others := [name for name in FIELDS[:2] if mapping.get(name) is not None]:
            raise ParameterError(
                f"prompt_embeds is a whole prompt, and {others[0]} is another: give one of them", field
            )
        try:
            values = np.asarray(mapping[field])
        except Exception as error:  # an array of another library converts itself
            raise ParameterError(f"prompt_embeds must be an array that NumPy can read: {error}", field) from error
        # The kind of bfloat16 is that of unknown bytes.
        if values.ndim != 2 or not (values.dtype.kind == "f" or values.dtype.name == "bfloat16") or not values.shape[1]:
            raise ParameterError(
                "prompt_embeds must be an array of floats with a row for each position and a column for each element "
                f"of the hidden state, not {values.dtype} of shape {values.shape}",
                field,
            )
        if not len(values):
            raise ParameterError("prompt_embeds is empty: give at least one row", field)
        if keep is not None:
            values = values[-keep:]
        self._check_length(len(values), room)
        try:
            side = SideInput.of(0, values)
        except ValueError as error:
            raise ParameterError(f"prompt_embeds: {error}", field) from error
        return Prompt(None, np.full(len(values), PLACEHOLDER, np.int32), salt, (side,))

    def _kept(self, room: PromptRoom) -> int | None:
        """Returns how many of a prompt's last tokens are kept, or None if all are."""
        if room.keep == -1:
            # Without a max_tokens, and with 0, the prompt may have all that a prompt may have at all.
            kept = min(self.max_model_len - (room.max_tokens or 0), self._max_tokens(room.scores_only))
            if kept < 1:
                raise ParameterError(
                    f"max_tokens {room.max_tokens} leaves no room for a prompt within max_model_len "
                    f"{self.max_model_len}, to which truncate_prompt_tokens -1 would shorten it: lower max_tokens",
                    "max_tokens",
                )
            return kept
        if room.keep is not None and room.keep > self.max_model_len:
            raise ParameterError(
                f"truncate_prompt_tokens {room.keep} exceeds max_model_len {self.max_model_len}: lower it, or give -1 "
                "for as many as fit",
                "truncate_prompt_tokens",
            )
        return room.keep

    def _tokenize(self, text: str, add_special_tokens: bool, room: PromptRoom, keep: int | None) -> list[int]:
        if not text:
            raise ParameterError("the prompt is empty: give at least one character")
        if self.tokenizer is None:
            raise ParameterError("the model directory has no tokenizer.json: give token ids, or set tokenizer")
        # The length is checked first: tokenizing a hopelessly long text takes seconds and hundreds of megabytes. Of a
        # text whose last tokens are kept, no more than max_chars can be in them. As much again is tokenized before
        # that, since the tokens at a cut differ from those of the whole text.
        if keep is not None:
            text = text[-2 * self.max_chars :]
        elif len(text) > self.max_model_len and len(text) > self.max_chars:  # which looks at all tokens once, 0.1 s
            raise ContextLengthError(
                f"prompt of {len(text)} characters is more than {self.max_chars}, which is more than "
                f"max_model_len {self.max_model_len} tokens can be: shorten it, or raise max_model_len",
                num_tokens=-(-len(text) // self.tokenizer.longest_token),
                num_chars=len(text),
                max_prompt_tokens=self._max_tokens(room.scores_only),
                max_model_len=self.max_model_len,
            )
        ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if keep is None or len(ids) <= keep or not add_special_tokens:
            return ids
        return self.tokenizer.shortened(ids, keep)

    def _max_tokens(self, scores_only: bool) -> int:
        return self.max_model_len if scores_only else self.max_model_len - 1

    def _unpack(self, mapping: Mapping[str, Any]) -> tuple[str | Sequence[int], str | None]:
        salt = self._salt(mapping)
        given = [mapping[key] for key in ("prompt_token_ids", "prompt") if mapping.get(key) is not None]
        if not given or isinstance(mapping.get("prompt_token_ids"), str):
            raise ParameterError("a prompt mapping needs a `prompt` text, `prompt_token_ids` or `prompt_embeds`")
        return given[0], salt

    @staticmethod
    def _salt(mapping: Mapping[str, Any]) -> str | None:
        """Returns the salt of a prompt that is a mapping, whose fields are all known."""
        unknown = [key for key in mapping if key not in FIELDS]
        if unknown:
            raise ParameterError(f"unknown prompt fields {unknown}: known are {', '.join(FIELDS)}")
        salt = mapping.get("cache_salt")
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise ParameterError(f"cache_salt must be a string that is not empty, not {salt!r}", "cache_salt")
        return salt

    def _check(self, ids: Sequence[int], room: PromptRoom, keep: int | None) -> TokenIds:
        if len(ids) == 0:
            raise ParameterError("the prompt is empty: give at least one token")
        if keep is not None:
            ids = ids[-keep:]
        self._check_length(len(ids), room)
        try:
            token_ids = np.asarray(ids)
        except ValueError:
            token_ids = np.empty(0, np.object_)
        if token_ids.dtype.kind not in "iu" or token_ids.ndim != 1:
            raise ParameterError("prompt token ids must be a flat list of integers")
        low, high = int(token_ids.min()), int(token_ids.max())
        if low < 0 or high >= self.vocab_size:
            raise ParameterError(
                f"prompt token id {low if low < 0 else high} is outside the vocabulary of {self.vocab_size} tokens"
            )
        return token_ids.astype(np.int32)

    def _check_length(self, num_tokens: int, room: PromptRoom) -> None:
        if num_tokens > self._max_tokens(room.scores_only):
            why = "exceeds" if room.scores_only else "leaves no room for an output within"
            raise ContextLengthError(
                f"prompt of {num_tokens} tokens {why} max_model_len {self.max_model_len}: shorten it, or raise "
                "max_model_len",
                num_tokens=num_tokens,
                max_prompt_tokens=self._max_tokens(room.scores_only),
                max_model_len=self.max_model_len,
            )
