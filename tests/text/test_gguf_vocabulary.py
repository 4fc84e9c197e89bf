"""The tokenizer made of a GGUF file's metadata is that of the checkpoint the file was made of."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jaxvllm.model_name import DEMO_MODEL
from jaxvllm.text.gguf_vocabulary import RULES
from jaxvllm.text.tokenizer import Tokenizer
from tests.gguf_files import demo_tokenizer
from tests.text.small_tokenizers import TEMPLATE, byte_fallback_backend, save

TEXTS = (
    "Once upon a time, there were 1234 foxes.",
    "  two  spaces\tand\n\n\nlines  ",
    "naïve café 東京都 🙂👩‍👩‍👧 e\u0301nd",
    "<|user|>hi<|end|><tool_call>{}</tool_call> <|bos|>",
    "",
    " ",
    "hello hello!hell ▁▁ \ufffd",
)


def written(path: Path, add: Callable[[gguf.GGUFWriter], None], architecture: str = "llama") -> Tokenizer:
    writer = gguf.GGUFWriter(path, architecture)
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Tokenizer.from_directory(path)


def check_same(found: Tokenizer, expected: Tokenizer) -> None:
    for text in TEXTS:
        for special in (True, False):
            ids = expected.encode(text, special)
            assert found.encode(text, special) == ids, text
            for skips in (True, False):
                assert found.decode(ids, skips) == expected.decode(ids, skips)
                pushed, other = found.detokenizer(skips), expected.detokenizer(skips)
                assert pushed.push(ids) + pushed.flush() == other.push(ids) + other.flush()
    messages = [{"role": "user", "content": "hi"}]
    assert found.apply_chat_template(messages) == expected.apply_chat_template(messages)
    assert (found.vocab_size, found.bos_token_id) == (expected.vocab_size, expected.bos_token_id)
    assert found.eos_token_ids[0] == expected.eos_token_id
    assert found.special_texts == expected.special_texts


def test_byte_level_tokens_are_those_of_tokenizer_json(tmp_path: Path) -> None:
    found = written(tmp_path / "x.gguf", demo_tokenizer(DEMO_MODEL))
    check_same(found, Tokenizer.from_directory(DEMO_MODEL))
    assert Tokenizer.exists_in(tmp_path / "x.gguf")


def pieces(writer: gguf.GGUFWriter, backend: Backend) -> None:
    """Adds SentencePiece's tokens, whose scores fall in the order in which their merges are."""
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    order = ["".join(merge) for merge in model["merges"]]
    types = gguf.TokenType
    kinds = {"<unk>": types.UNKNOWN, "<s>": types.CONTROL, "</s>": types.CONTROL}
    kinds |= {f"<0x{byte:02X}>": types.BYTE for byte in range(256)}
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*tokens, "[PAD7]"])
    writer.add_token_scores([*(-float(order.index(token)) if token in order else -99.0 for token in tokens), 0.0])
    writer.add_token_types([*(kinds.get(token, types.NORMAL) for token in tokens), types.UNUSED])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def test_sentence_pieces_are_those_of_tokenizer_json(tmp_path: Path) -> None:
    backend = byte_fallback_backend()
    directory = save(backend, tmp_path, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE)
    found = written(tmp_path / "x.gguf", lambda writer: pieces(writer, backend))
    check_same(found, Tokenizer.from_directory(directory))


def test_merges_of_pieces_are_those_of_their_scores(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        types = gguf.TokenType
        writer.add_tokenizer_model("gemma4")
        ends = ["<eos>", "<|tool_response>", "<turn|>", "<end_of_turn>"]
        writer.add_token_list(["<unk>", "<bos>", "<0x21>", "a", "b", "▁", "▁a", "ab", "▁ab", *ends])
        kinds = [types.CONTROL, types.USER_DEFINED, types.CONTROL, types.NORMAL]
        writer.add_token_types([types.UNKNOWN, types.CONTROL, types.BYTE, *[types.NORMAL] * 6, *kinds])
        writer.add_token_merges(["a b", "▁ ab", "▁ a"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(9)
        writer.add_unk_token_id(0)
        writer.add_add_space_prefix(False)

    found = written(tmp_path / "x.gguf", add)
    assert found.eos_token_ids == (9, 11, 10)
    tokens = [found.backend.id_to_token(token_id) for token_id in found.encode("ab ab ba!")]
    assert tokens == ["<bos>", "ab", "▁ab", "▁", "b", "a", "<0x21>"]
    assert found.decode(found.encode("ab ab ba!")) == "ab ab ba!"


def add_pieces(writer: gguf.GGUFWriter, *tokens: str) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(list(tokens))
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_scores([0.0] * len(tokens))


@pytest.mark.parametrize(("scores", "tokens"), [([-2.0, -1.0], ["a", "bc"]), ([-1.0, -2.0], ["ab", "c"])])
def test_the_piece_with_the_best_score_is_made_first(scores: list[float], tokens: list[str], tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        types = gguf.TokenType
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", "a", "b", "c", "ab", "bc"])
        writer.add_token_types([types.UNKNOWN, *[types.NORMAL] * 5])
        writer.add_token_scores([0.0, -9.0, -9.0, -9.0, *scores])
        writer.add_add_space_prefix(False)

    found = written(tmp_path / "x.gguf", add)
    assert [found.backend.id_to_token(token_id) for token_id in found.encode("abc")] == tokens


@pytest.mark.parametrize(("architecture", "count"), [("phi3", 1), ("llama", 2)])
def test_added_tokens_of_phi3_take_the_line_break_after_them(architecture: str, count: int, tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", "<|end|>", "\n"])
        writer.add_token_types([gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.NORMAL])
        writer.add_token_scores([0.0] * 3)
        writer.add_add_space_prefix(False)

    found = written(tmp_path / "x.gguf", add, architecture)
    assert found.encode("<|end|>\n") == [1, 2][:count]
    assert found.encode("<unk>\n") == [0, 2]


def add_bpe(pre: str, **special: Any) -> Callable[[gguf.GGUFWriter], None]:
    letters = ["a", "b", "Ġ", "1", "2", "'", "s", "S", "B", "<e>", "<|im_end|>"]
    kinds = [gguf.TokenType.NORMAL] * 9 + [gguf.TokenType.CONTROL] * 2

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list([*letters, "ab", "12", "121", "Ġa", "'s", "aB", "bab"])
        writer.add_token_types([*kinds, *[gguf.TokenType.NORMAL] * 7])
        writer.add_token_merges(["a b", "1 2", "12 1", "a B", "Ġ a", "' s"])
        for key, value in {"bos": 9, "eos": 9, **special}.items():
            getattr(writer, f"add_{key}_token_id")(value)

    return add


@pytest.mark.parametrize("pre", RULES)
def test_rules_cut_words_as_their_models_do(pre: str, tmp_path: Path) -> None:
    found = written(tmp_path / "x.gguf", add_bpe(pre))
    tokens = [found.backend.id_to_token(token_id) for token_id in found.encode("121 ab's aB")]
    # Three digits at a time or one; upper case after lower case begins a word or not.
    by_one = ("smollm", "starcoder", "refact", "command-r", "qwen2", "deepseek-r1-qwen", "seed-coder", "tekken")
    by_case = ("gpt-4o", "llama4", "minimax-m2", "tekken", "kimi-k2")
    deepseek = ("hunyuan-dense", "deepseek-v3")
    digits = ["1", "2", "1"] if pre in (*by_one, "hunyuan", "qwen35") else ["121"]
    last = ["Ġa", "B"] if pre in by_case else ["Ġ", "aB"]
    has_bos = pre in ("llama-bpe", "llama3", "llama-v3", "lfm2", "falcon-h1", "tekken")
    assert tokens == [*(["<e>"] if has_bos else []), *digits, "Ġ", "ab", "'s", *last]
    # A word that is a token needs no merges under some rules.
    whole = [found.backend.id_to_token(token_id) for token_id in found.encode("bab", add_special_tokens=False)]
    assert whole == (["bab"] if has_bos or pre == "kimi-k2" else ["b", "ab"])
    assert found.eos_token_ids == (9, 10)
    # A line break after signs is part of their word under the rules that are like GPT-4's.
    assert found.backend.pre_tokenizer is not None
    signs = [word for word, _ in found.backend.pre_tokenizer.pre_tokenize_str("a!!\n")][1:]
    assert signs == (["!!", "Ċ"] if pre in ("gpt-2", "olmo", *by_one[:4], "seed-coder") else ["!!Ċ"])
    words = found.backend.pre_tokenizer.pre_tokenize_str("東京ab")
    assert len(words) == (2 if pre in (*deepseek, "kimi-k2") else 1)
    # Marks are parts of words under the newer rules.
    marked = found.backend.pre_tokenizer.pre_tokenize_str("हिन्दी")
    assert (len(marked) == 1) == (pre in ("qwen35", *by_case, *deepseek))
    normalizer = found.backend.normalizer
    assert (normalizer is not None) == (pre in ("qwen2", "deepseek-r1-qwen", "qwen35"))
    assert normalizer is None or normalizer.normalize_str("e\u0301") == "é"


def test_kimi_cuts_chinese_from_all_other_letters() -> None:
    [pattern] = RULES["kimi-k2"].patterns
    cut = pre_tokenizers.Split(Regex(pattern), "isolated").pre_tokenize_str
    words = [word for word, _ in cut("我们'S用GPTModel's 12345カナ東京a! /\n\n  b")]
    expected = ["我们", "'S", "用", "GPTModel's", " ", "123", "45", "カナ", "東京", "a", "!", " /\n\n", " ", " b"]
    assert words == expected


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        (["<|endoftext|>", "<|return|>", "<|end|>", "<|call|>"], (1, 0, 3)),
        (["<|endoftext|>", "<|x|>", "<|end|>", "<|call|>"], (1, 2, 0, 3)),
    ],
)
def test_messages_of_harmony_end_no_answer(tokens: list[str], ends: tuple[int, ...], tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-4o")
        writer.add_token_list(["a", "b", "ab", *tokens])
        writer.add_token_types([gguf.TokenType.NORMAL] * 3 + [gguf.TokenType.CONTROL] * 4)
        writer.add_token_merges(["a b"])
        writer.add_eos_token_id(4)

    assert written(tmp_path / "x.gguf", add).eos_token_ids == tuple(3 + number for number in ends)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda writer: add_bpe("llama-next")(writer), "pre is 'llama-next': known are gpt-2"),
        (lambda writer: add_bpe("gpt-2", eos=99)(writer), "eos_token_id is 99, and there are 18 tokens"),
        (lambda writer: writer.add_tokenizer_model("bert"), "model must be gpt2, llama or gemma4, not 'bert'"),
        (lambda writer: writer.add_tokenizer_model("llama"), "it has no list tokenizer.ggml.tokens"),
        (lambda writer: add_pieces(writer, "a" * 1025), "it has a token of 1025 characters: pieces have 1024 at most"),
    ],
)
def test_what_is_not_known_is_refused(change: Callable[[gguf.GGUFWriter], None], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"x.gguf: .*{message}.*Give tokenizer"):
        written(tmp_path / "x.gguf", change)


@pytest.mark.parametrize("merge", ["a b", "a c", "ab", "", " a"])
def test_merges_must_be_of_the_vocabulary(merge: str, tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(["a", "b"])
        writer.add_token_types([1, 1])
        writer.add_token_merges([merge])

    with pytest.raises(ValueError, match=rf"x.gguf: its metadata describe no tokenizer \(the merge '{merge}' is none"):
        written(tmp_path / "x.gguf", add)
