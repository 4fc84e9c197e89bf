"""Small tokenizers of the two kinds that models have, as checkpoint directories."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from jaxvllm.text.tokenizer import Tokenizer

TEXT = [
    "Once upon a time there was a small fox. The fox said: 'Hello, hello!'",
    "naïve café über 東京 東 🙂 end",
] * 4
TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level_backend() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=["<s>", "<|end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    backend.add_tokens([AddedToken("<tool>", special=False), AddedToken("東京都", special=False)])
    return backend


def byte_fallback_backend() -> Backend:
    """As Llama 2's: SentencePiece spaces, and bytes for the characters that the vocabulary lacks."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "h", "e", "l", "o", "▁h", "▁he", "ll", "▁hell", "▁hello", "é", "!", "\ufffd", "▁▁"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "h"), ("▁h", "e"), ("l", "l"), ("▁he", "ll"), ("▁hell", "o"), ("▁", "▁")]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def save(backend: Backend, directory: Path, **config: object) -> Path:
    """Writes a checkpoint directory; `config` goes into tokenizer_config.json."""
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@cache
def small_tokenizer(kind: str) -> Tokenizer:
    backend = {"byte_level": byte_level_backend, "byte_fallback": byte_fallback_backend}[kind]()
    eos = {"byte_level": "<|end|>", "byte_fallback": "</s>"}[kind]
    with TemporaryDirectory() as directory:
        return Tokenizer.from_directory(
            save(backend, Path(directory), bos_token="<s>", eos_token=eos, chat_template=TEMPLATE)
        )
