"""A checkpoint's tokenizer: it converts text to tokens, tokens to text, and chat messages to a prompt."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from jaxvllm.gguf_file import is_gguf
from jaxvllm.text.chat_template import DEFAULT, ChatTemplate
from jaxvllm.text.detokenizer import (
    ByteLevelDetokenizer,
    ByteLevelPieces,
    Detokenizer,
    WindowDetokenizer,
)
from jaxvllm.text.generation_config import eos_token_ids, read_json_object

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
# Settings in tokenizer_config.json that are paths on the computer that wrote it.
_PATHS = ("name_or_path", "special_tokens_map_file", "tokenizer_file")
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
# The number of the prompt's last tokens that the decoder gets, so that it knows that the output does not begin a text.
CONTEXT_TOKENS = 4


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Encodes and decodes like the checkpoint's own tokenizer. Threads may share it."""

    backend: Backend
    chat_template: ChatTemplate
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # any of them ends a completion; the tokenizer's own is first
    info: Mapping[str, Any]  # tokenizer_config.json, with special tokens as plain strings and the template in use

    @classmethod
    def from_directory(cls, path: str | Path) -> "Tokenizer":
        """Reads a Hugging Face checkpoint directory, tokenizer.json and the small files beside it, or a GGUF file."""
        directory = Path(path)
        if is_gguf(directory):
            return cls._from_gguf(directory)
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

    @classmethod
    def _from_gguf(cls, path: Path) -> "Tokenizer":
        from jaxvllm.text.gguf_vocabulary import GgufVocabulary  # 6 ms: it compiles regular expressions

        found = GgufVocabulary.read(path)
        special, sources = dict(found.special), found.templates
        return cls(
            backend=found.backend(),
            chat_template=ChatTemplate(sources, special),
            bos_token_id=found.bos,
            eos_token_ids=found.ends,
            info=dict.fromkeys(SPECIAL_TOKENS) | special | {"chat_template": sources.get(DEFAULT)},
        )

    def with_chat_template(self, source: str) -> "Tokenizer":
        """Returns the same tokenizer with another chat template."""
        return replace(
            self, chat_template=self.chat_template.replaced(source), info={**self.info, "chat_template": source}
        )

    @staticmethod
    def exists_in(directory: Path) -> bool:
        """Returns whether the directory has a tokenizer in any of the usual formats. A GGUF file has one."""
        return is_gguf(directory) or any((directory / name).is_file() for name in VOCABULARY_FILES)

    @property
    def eos_token_id(self) -> int | None:
        return self.eos_token_ids[0] if self.eos_token_ids else None

    @property
    def vocab_size(self) -> int:
        """The number of tokens with a spelling, added ones included. The model's logits may be padded beyond it."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def longest_token(self) -> int:
        """The number of characters of the longest token in the vocabulary. No token of a text stands for more."""
        return max(map(len, self.backend.get_vocab(with_added_tokens=True)), default=1)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of `text`. Use add_special_tokens=False for a prompt that a chat template wrote.

        The special tokens are those of tokenizer.json's post-processor. Like transformers 5, this does not read
        tokenizer_config's add_bos_token.
        """
        if not isinstance(text, str):
            raise ValueError(f"a prompt must be a string, not {type(text).__name__}: give text or token ids")
        try:
            # Encoding a batch of one lets other threads run meanwhile. `encode` does not: 2 MB blocked them for 2.4 s.
            [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return list(encoding.ids)
        except (TypeError, UnicodeEncodeError) as error:  # lone surrogates are not text
            raise ValueError(f"a prompt must be valid Unicode without lone surrogates: {error}") from error

    def shortened(self, token_ids: Sequence[int], count: int) -> list[int]:
        """Returns the last `count` tokens of an encoded text with its special tokens, which stay around what is left.

        So does Hugging Face's tokenizer when it truncates: a model that learned texts after a BOS still sees one.
        """
        special, ids = self.encode(""), list(token_ids)
        for first in reversed(range(len(special) + 1)):
            last = len(special) - first  # the special tokens after the text
            if ids[:first] == special[:first] and ids[len(ids) - last :] == special[first:]:
                break
        body = ids[first : len(ids) - last]
        room = max(count - len(special), 0)
        return [*special[:first], *body[len(body) - room :], *special[first:]][-count:]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of a whole sequence, without ids that have no spelling."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Returns a token's text as it reads in the middle of a text, or U+FFFD for a part of a character."""
        text = self._texts.get(token_id)
        if text is None:
            once = self.decode([token_id], skip_special_tokens=False)
            twice = self.decode([token_id, token_id], skip_special_tokens=False)
            text = self._texts[token_id] = twice[len(once) :] or once
        return text

    @cached_property
    def _texts(self) -> dict[int, str]:
        """The cache of `token_text`, which takes 15 us; log-probabilities may need twenty texts for each token."""
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
        """Returns the prompt for a conversation, like `ChatTemplate.render`."""
        return self.chat_template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **variables,
        )

    def detokenizer(self, skip_special_tokens: bool, prompt_token_ids: Sequence[int] = ()) -> Detokenizer:
        """Returns a detokenizer for one completion of the prompt."""
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
        # This is the decoder alone: of 152,000 tokens, writing the whole tokenizer takes 0.1 s.
        decoder = json.loads(self.backend.decoder.__getstate__()) if self.backend.decoder is not None else {}
        if decoder.get("type") == "Sequence" and len(decoder["decoders"]) == 1:
            decoder = decoder["decoders"][0]
        return decoder.get("type") == "ByteLevel"

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def special_texts(self) -> frozenset[str]:
        """The special tokens as text."""
        added = self.backend.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

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
    # Some checkpoints store the settings of their training data here, but a prompt must never be cut or padded.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _converted_backend(directory: Path) -> Backend:
    """Converts a tokenizer in an older format (tokenizer.model, vocab.json and merges.txt) with transformers."""
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
    """Returns the named special tokens as strings. In the files each is a string or an object with its content."""
    found = {}
    for name in SPECIAL_TOKENS:
        token = config.get(name) or special_tokens_map.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if token is not None:
            found[name] = str(token)
    return found


def _template_sources(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the chat templates by name. Files win over tokenizer_config.json, which older checkpoints use."""
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
