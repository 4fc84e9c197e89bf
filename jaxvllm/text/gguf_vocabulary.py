"""`GgufVocabulary`: the tokenizer that a GGUF file's metadata describe, made again as one of Hugging Face's library.

The metadata have a vocabulary, and either the merges and the name of a rule that cuts texts into words (byte-level BPE,
`gpt2`), or the scores of SentencePiece (`llama`), or the merges that it would make (`gemma4`). Rules are those of the
published tokenizer.json of the models that llama.cpp gives such a name (`llama-vocab.cpp`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from jaxvllm.gguf_file import GgufFile
from jaxvllm.text.chat_template import DEFAULT

START = "tokenizer.ggml."
# The kinds of tokens, as `token_type` numbers them. The rest of the vocabulary is filled up with tokens of no use.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
# Tokens that end an answer, whatever the metadata name beside the EOS, if they are added tokens and no usual pieces.
ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<EOT>",
    "_<EOT>",
    "<|return|>",
    "<|call|>",
    "<turn|>",  # the last three are Gemma 4's, whose files name `<eos>` alone
    "<eos>",
    "<|tool_response>",
)
# An answer in Harmony (gpt-oss) has several messages. `<|end|>` closes each of them, and these two close an answer.
_HARMONY_ENDS, _MESSAGE_END = ("<|return|>", "<|call|>"), "<|end|>"
_SPACE = "▁"  # SentencePiece's
_LONGEST = 1024  # characters of a piece, all of whose divisions in two are looked at; usual are 16 at most
# Added tokens of Phi-3 take the spaces and line breaks that follow them, but for these. Files do not say so.
_TAKING_SPACES, _NOT_TAKING = ("phi3", "llama"), ("<unk>", "<s>", "<|endoftext|>")


@dataclass(frozen=True)
class WordRule:
    """A rule that cuts a text into words, within which byte-level BPE merges.

    patterns: regular expressions whose matches are words, each of which cuts what the ones before have left. Without
        any it is GPT-2's, which the library has
    cuts_digits: each digit is cut off before
    takes_whole: a word that is a token is that token, whatever the merges say
    composes: characters are composed before (NFC)
    adds_bos: texts begin with a BOS unless the metadata say otherwise
    """

    patterns: tuple[str, ...] = ()
    cuts_digits: bool = False
    takes_whole: bool = False
    composes: bool = False
    adds_bos: bool = False


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LOWER, _UPPER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}", r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _gpt4(digits: str) -> tuple[str]:
    return (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",)


def _words_by_case(contractions: str, without: str = "") -> str:
    """Returns what matches words, which end before an upper-case letter that follows a lower-case one."""
    start, lower, upper = r"[^\r\n\p{L}\p{N}]?", f"[{_LOWER}{without}]", f"[{_UPPER}{without}]"
    return f"{start}{upper}*{lower}+{contractions}|{start}{upper}+{lower}*{contractions}"


def _by_case(digits: str, contractions: str) -> tuple[str]:
    """Returns the rule that also cuts before an upper-case letter which follows a lower-case one."""
    words = _words_by_case(contractions)
    return (rf"{words}|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",)


_GPT2, _DIGITS = WordRule(), WordRule(cuts_digits=True)
_LLAMA3 = WordRule(_gpt4("{1,3}"), takes_whole=True, adds_bos=True)
_QWEN2 = WordRule(_gpt4(""), composes=True)
_GPT4, _GPT4O = WordRule(_gpt4("{1,3}")), WordRule(_by_case("{1,3}", f"{_CONTRACTIONS}?"))
# As GPT-4's, but line breaks are no part of the signs before them.
_SEED = WordRule((rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",))
# As Qwen 2's, but marks are parts of words.
_WORD, _SIGNS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
_QWEN35 = WordRule((rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_SIGNS}|{_SPACES}",), composes=True)
# Three digits, and then Chinese and kana, are cut off before. A sign belongs to the Latin letters after it.
_DEEPSEEK3 = WordRule(
    (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u30ff]+",
        r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
    )
)
# Chinese is cut off from other letters. This is the pattern of Kimi's own tokenizer, which is one of tiktoken: a word
# that is a token is that token.
_KIMI_WORDS = _words_by_case(f"{_CONTRACTIONS}?", r"&&[^\p{Han}]")
_KIMI = WordRule(
    (rf"\p{{Han}}+|{_KIMI_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",), takes_whole=True
)
RULES: Mapping[str, WordRule] = {
    "gpt-2": _GPT2,
    "olmo": _GPT2,
    "refact": _DIGITS,  # Granite 3
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "command-r": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "lfm2": _LLAMA3,
    "falcon-h1": _LLAMA3,  # llama.cpp's rule, which its published tokenizer.json was not compared with
    "dbrx": _GPT4,  # which Phi-4 and OLMo 2 have
    "smaug-bpe": _GPT4,  # SmolLM3
    "glm4": _GPT4,
    "chatglm-bpe": _GPT4,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "kimi-k2": _KIMI,  # Kimi Linear, too
    "hunyuan": WordRule(_gpt4("")),
    "hunyuan-dense": _DEEPSEEK3,
    "deepseek-v3": _DEEPSEEK3,
    "qwen35": _QWEN35,
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
    "minimax-m2": _GPT4O,
    "seed-coder": _SEED,
    "tekken": WordRule(_by_case("", ""), takes_whole=True, adds_bos=True),
}


@dataclass(frozen=True)
class GgufVocabulary:
    """A vocabulary and what belongs to it. The metadata were checked for what it needs."""

    path: Path
    values: Mapping[str, Any]  # of the keys that begin with `START`, without it
    templates: Mapping[str, str]  # the chat templates, by name
    architecture: object  # as the file names it

    @classmethod
    def read(cls, path: Path) -> "GgufVocabulary":
        """Reads the metadata of a file. Raises ValueError that names the file and what is missing or not known."""
        metadata = GgufFile.open(path).metadata
        start = "tokenizer.chat_template"
        templates = {
            key.removeprefix(f"{start}.") if key != start else DEFAULT: str(value)
            for key, value in metadata.items()
            if key == start or key.startswith(f"{start}.")
        }
        values = {key.removeprefix(START): value for key, value in metadata.items() if key.startswith(START)}
        found = cls(path, values, templates, metadata.get("general.architecture"))
        model = values.get("model")
        if model not in ("gpt2", "llama", "gemma4"):
            found._reject(f"{START}model must be gpt2, llama or gemma4, not {model!r}")
        lists = ("tokens", "token_type", "scores" if model == "llama" else "merges")
        if missing := [name for name in lists if not isinstance(values.get(name), list)]:
            found._reject(f"it has no list {START}{missing[0]}")
        tokens, kinds = values["tokens"], values["token_type"]
        fits = all(len(values[name]) == len(tokens) for name in lists[1:] if name != "merges")
        if not fits or not all(isinstance(token, str) for token in tokens) or len(set(tokens)) != len(tokens):
            found._reject(f"{START}tokens must be {len(kinds)} strings that differ, with a type and a score for each")
        if model == "llama" and (longest := max(map(len, tokens), default=0)) > _LONGEST:
            found._reject(f"it has a token of {longest} characters: pieces have {_LONGEST} at most")
        rule = values.get("pre")
        if model == "gpt2" and not (isinstance(rule, str) and rule in RULES):
            found._reject(f"{START}pre is {rule!r}: known are {', '.join(RULES)}")
        return found

    @cached_property
    def special(self) -> Mapping[str, str]:
        """The named special tokens, as a tokenizer_config.json has them."""
        ids = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        found = {name: self._token(f"{kind}_token_id") for name, kind in ids.items()}
        return {name: token for name, token in found.items() if token is not None}

    @property
    def bos(self) -> int | None:
        return self._id("bos_token_id")

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end an answer, the EOS first."""
        named = (self._id(f"{kind}_token_id") for kind in ("eos", "eot", "eom"))
        kinds: Sequence[Any] = self.values["token_type"]
        known = (self._ids.get(text) for text in ENDS)
        others = (number for number in known if number is not None and kinds[number] in (CONTROL, USER_DEFINED))
        is_harmony = all(text in self._ids for text in _HARMONY_ENDS)
        no_end = self._ids.get(_MESSAGE_END) if is_harmony else None
        return tuple(dict.fromkeys(number for number in (*named, *others) if number not in (None, no_end)))

    def backend(self) -> Backend:
        """Makes the tokenizer. Raises ValueError for merges that are no merges of the vocabulary."""
        added: list[AddedToken] = []
        try:
            backend = self._byte_level() if self.values["model"] == "gpt2" else self._sentence_pieces()
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{self.path}: its metadata describe no tokenizer ({error}): give tokenizer") from error
        for token, kind in zip(self.values["tokens"], self.values["token_type"], strict=True):
            if kind in (CONTROL, UNKNOWN, USER_DEFINED):
                takes = (self.architecture, self.values["model"]) == _TAKING_SPACES and token not in _NOT_TAKING
                added.append(AddedToken(token, special=kind != USER_DEFINED, normalized=False, rstrip=takes))
        backend.add_tokens(added)
        self._frame(backend)
        return backend

    def _byte_level(self) -> Backend:
        rule = RULES[self.values["pre"]]
        merges = self._written_merges()
        backend = Backend(models.BPE(self._ids, merges, ignore_merges=rule.takes_whole))
        cuts: list[pre_tokenizers.PreTokenizer] = []
        if rule.cuts_digits:
            cuts.append(pre_tokenizers.Digits(individual_digits=True))
        cuts += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns]
        cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not rule.patterns))
        backend.pre_tokenizer = pre_tokenizers.Sequence(cuts)
        backend.decoder = decoders.ByteLevel()
        if rule.composes:
            backend.normalizer = normalizers.NFC()
        return backend

    def _written_merges(self) -> list[tuple[str, str]]:
        """Returns the merges. The library panics over one that makes no token, and its panic is no Exception."""
        ids, found = self._ids, []
        for merge in self.values["merges"]:
            space = merge.find(" ", 1)  # which may be a token itself
            left, right = merge[:space], merge[space + 1 :]
            if space < 0 or not (left in ids and right in ids and left + right in ids):
                raise ValueError(f"the merge {merge!r} is none of its tokens")
            found.append((left, right))
        return found

    def _sentence_pieces(self) -> Backend:
        unknown = self._token("unknown_token_id") or "<unk>"
        merges = _merges(self._scores) if self.values["model"] == "llama" else self._written_merges()
        backend = Backend(models.BPE(self._ids, merges, unk_token=unknown, byte_fallback=True, fuse_unk=True))
        spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
        ends: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if self.values.get("add_space_prefix", True):
            spaces.insert(0, normalizers.Prepend(_SPACE))
            ends.append(decoders.Strip(" ", 1, 0))
        backend.normalizer = normalizers.Sequence(spaces)
        backend.decoder = decoders.Sequence(ends)
        return backend

    def _frame(self, backend: Backend) -> None:
        """Has texts begin with the BOS and end with the EOS, as far as the metadata say so."""
        by_default = self.values["model"] != "gpt2" or RULES[self.values["pre"]].adds_bos
        wanted = (("bos_token_id", "add_bos_token", by_default), ("eos_token_id", "add_eos_token", False))
        first, last = ([self._token(key)] if self.values.get(asked, usual) else [] for key, asked, usual in wanted)
        tokens = [token for token in (*first, "$A", *last) if token is not None]
        if len(tokens) > 1:
            ids = {self._token(key): self._id(key) for key, _, _ in wanted}
            special = [(token, ids[token]) for token in dict.fromkeys(tokens) if token in ids]
            backend.post_processor = processors.TemplateProcessing(single=tokens, special_tokens=special)

    @cached_property
    def _ids(self) -> dict[str, int]:
        """The tokens by their spelling, without those that only fill the vocabulary up."""
        kinds = self.values["token_type"]
        return {token: number for number, token in enumerate(self.values["tokens"]) if kinds[number] != UNUSED}

    @cached_property
    def _scores(self) -> dict[str, float]:
        """The scores of the pieces that merges make."""
        kinds, scores = self.values["token_type"], self.values["scores"]
        return {token: scores[number] for token, number in self._ids.items() if kinds[number] == NORMAL}

    def _id(self, key: str) -> int | None:
        number = self.values.get(key)
        if number is not None and (type(number) is not int or not 0 <= number < len(self.values["tokens"])):
            self._reject(f"{START}{key} is {number!r}, and there are {len(self.values['tokens'])} tokens")
        return number

    def _token(self, key: str) -> str | None:
        number = self._id(key)
        return None if number is None else str(self.values["tokens"][number])

    def _reject(self, reason: str) -> NoReturn:
        raise ValueError(f"{self.path}: {reason}. Give tokenizer, the directory or hub name of the model's own")


def _merges(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Returns the merges of SentencePiece, the first one first: any two pieces that are a piece together.

    The piece with the best score is made first. Its pairs come in the order in which Hugging Face's converter has them.
    """
    found = [
        (-score, i, len(piece) - i, piece[:i], piece[i:])
        for piece, score in scores.items()
        for i in range(1, len(piece))
        if piece[:i] in scores and piece[i:] in scores
    ]
    return [(left, right) for *_, left, right in sorted(found, key=lambda merge: merge[:3])]
