"""A checkpoint's tokenizer: text to tokens, tokens to text, chat messages to a prompt."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from jaxvllm.engine.chat_template import DEFAULT, ChatTemplate
from jaxvllm.engine.detokenizer import (
    ByteLevelDetokenizer,
    ByteLevelPieces,
    Detokenizer,
    WindowDetokenizer,
)
from jaxvllm.engine.json_file import read_json_object

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
# Of tokenizer_config.json: where files lay on the computer that wrote it.
_PATHS = ("name_or_path", "special_tokens_map_file", "tokenizer_file")
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
# Enough of the prompt for the decoder to know that the output does not begin a text.
CONTEXT_TOKENS = 4


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Encodes and decodes as the checkpoint's own tokenizer does. Safe to share between threads."""

    backend: Backend
    chat_template: ChatTemplate
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # any of them ends a completion; the tokenizer's own first
    info: Mapping[str, Any]  # tokenizer_config.json, with special tokens as plain strings and the template that is used

    @classmethod
    def from_directory(cls, path: str | Path) -> "Tokenizer":
        """Reads a Hugging Face checkpoint directory: tokenizer.json and the small files beside it."""
        directory = Path(path)
        config = read_json_object(directory / "tokenizer_config.json")
        backend = _backend(directory)
        special = _special_tokens(config, read_json_object(directory / "special_tokens_map.json"))
        sources = _template_sources(directory, config)
        settings = {name: value for name, value in config.items() if name not in _PATHS}
        ids = {name: backend.token_to_id(token) for name, token in special.items()}
        return cls(
            backend=backend,
            chat_template=ChatTemplate(sources, special),
            bos_token_id=ids.get("bos_token"),
            eos_token_ids=eos_token_ids(directory, ids.get("eos_token")),
            info=settings | dict.fromkeys(SPECIAL_TOKENS) | special | {"chat_template": sources.get(DEFAULT)},
        )

    @staticmethod
    def exists_in(directory: Path) -> bool:
        """Whether the directory has a tokenizer in any of the usual formats."""
        return any((directory / name).is_file() for name in VOCABULARY_FILES)

    @property
    def eos_token_id(self) -> int | None:
        return self.eos_token_ids[0] if self.eos_token_ids else None

    @property
    def vocab_size(self) -> int:
        """Tokens with a spelling, added ones included; the model's logits may be padded beyond."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token as the vocabulary spells it: no token of a text that is spelt has more."""
        return max(map(len, self.backend.get_vocab(with_added_tokens=True)), default=1)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. A prompt that a chat template wrote takes add_special_tokens=False.

        Special tokens are those of tokenizer.json's post-processor: like transformers 5, this does not read
        tokenizer_config's add_bos_token.
        """
        if not isinstance(text, str):
            raise ValueError(f"a prompt must be a string, not {type(text).__name__}: give text or token ids")
        try:
            # A batch of one lets other threads run meanwhile, which `encode` does not: 2 MB held all up for 2.4 s.
            [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return list(encoding.ids)
        except (TypeError, UnicodeEncodeError) as error:  # lone surrogates are not text
            raise ValueError(f"a prompt must be valid Unicode without lone surrogates: {error}") from error

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence; ids without a spelling are left out."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """One token's text as it reads in the middle of a text; U+FFFD for a part of a character."""
        text = self._texts.get(token_id)
        if text is None:
            once = self.decode([token_id], skip_special_tokens=False)
            twice = self.decode([token_id, token_id], skip_special_tokens=False)
            text = self._texts[token_id] = twice[len(once) :] or once
        return text

    @cached_property
    def _texts(self) -> dict[int, str]:
        """What `token_text` has said: log-probabilities ask for twenty a token, 15 us each."""
        return {}

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation, as `ChatTemplate.render`."""
        return self.chat_template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **variables,
        )

    def detokenizer(self, skip_special_tokens: bool, prompt_token_ids: Sequence[int] = ()) -> Detokenizer:
        """A detokenizer for one completion of that prompt."""
        if self._is_byte_level:
            return ByteLevelDetokenizer(self._visible_pieces if skip_special_tokens else self._pieces)
        skipped = self._special_ids if skip_special_tokens else frozenset()
        return WindowDetokenizer(
            decode=lambda ids: self.backend.decode(list(ids), skip_special_tokens=False),
            shows=lambda i: i not in skipped and self.backend.id_to_token(i) is not None,
            byte_tokens=self._byte_tokens,
            context=prompt_token_ids[-CONTEXT_TOKENS:],
        )

    @cached_property
    def _is_byte_level(self) -> bool:
        decoder = json.loads(self.backend.to_str()).get("decoder") or {}
        if decoder.get("type") == "Sequence" and len(decoder["decoders"]) == 1:
            decoder = decoder["decoders"][0]
        return decoder.get("type") == "ByteLevel"

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def _pieces(self) -> ByteLevelPieces:
        return ByteLevelPieces(self.backend.id_to_token, skipped=())

    @cached_property
    def _visible_pieces(self) -> ByteLevelPieces:
        return ByteLevelPieces(self.backend.id_to_token, skipped=self._special_ids)

    @cached_property
    def _byte_tokens(self) -> frozenset[int]:
        spellings = (f"<0x{byte:02X}>" for byte in range(256))
        ids = (self.backend.token_to_id(spelling) for spelling in spellings)
        return frozenset(token_id for token_id in ids if token_id is not None)


def _backend(directory: Path) -> Backend:
    path = directory / "tokenizer.json"
    if not path.is_file():
        return _converted_backend(directory)
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path} is not a tokenizer: {error}") from error
    # Some checkpoints store the settings of their training data here; a prompt is never cut or padded.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _converted_backend(directory: Path) -> Backend:
    """transformers converts the older formats (tokenizer.model, vocab.json and merges.txt)."""
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory: give a Hugging Face checkpoint directory")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise NotImplementedError(
            f"{directory} has no tokenizer.json: add it, or install transformers, which converts older files"
        ) from error
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise NotImplementedError(f"{directory} has a tokenizer written in Python: convert it to tokenizer.json")
    return backend


def _special_tokens(config: Mapping[str, Any], special_tokens_map: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens, each a string or an object with its content."""
    found = {}
    for name in SPECIAL_TOKENS:
        token = config.get(name) or special_tokens_map.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if token is not None:
            found[name] = str(token)
    return found


def eos_token_ids(directory: Path, own: int | None = None) -> tuple[int, ...]:
    """The tokenizer's EOS and generation_config's; config.json's only when these say nothing."""
    ids = [] if own is None else [own]
    for name in ("generation_config.json", "config.json"):
        value = read_json_object(directory / name).get("eos_token_id")
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token_id) is int and token_id >= 0 for token_id in listed):
            raise ValueError(f"{directory / name}: eos_token_id must be a token id or a list, not {value!r}")
        if name == "generation_config.json" or not ids:
            ids += listed
    return tuple(dict.fromkeys(ids))


def _template_sources(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name. Files win over tokenizer_config.json, which older checkpoints use."""
    sources = {}
    listed = config.get("chat_template")
    if isinstance(listed, str):
        sources[DEFAULT] = listed
    elif isinstance(listed, list):
        sources |= {entry["name"]: entry["template"] for entry in listed}
    if (legacy := read_json_object(directory / "chat_template.json").get("chat_template")) is not None:
        sources[DEFAULT] = legacy
    for file in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        sources[file.stem] = file.read_text(encoding="utf-8")
    if (file := directory / "chat_template.jinja").is_file():
        sources[DEFAULT] = file.read_text(encoding="utf-8")
    return sources
