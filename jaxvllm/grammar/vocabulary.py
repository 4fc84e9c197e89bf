"""`GrammarVocabulary`: the tokens of a vocabulary as llguidance reads them, pieces of text and special ones."""

import re
from collections.abc import Collection

from llguidance import LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer as Backend


class GrammarVocabulary(TokenizerWrapper):
    """Tells llguidance what every token spells, and spells the texts that a grammar forces.

    Special tokens and EOS spell nothing: the text of an answer leaves them out, and only a grammar that names one asks
    for it. A text that reads like one is spelled by other tokens. All other tokens are pieces of text, added ones too,
    such as the `<tool_call>` of many models.

    llguidance's own reading of a tokenizer.json takes every added token in angle brackets for special when it computes
    masks, and for text when it spells what is forced. So it forced tokens that its masks forbid, and no token was left.
    """

    # These are what llguidance reads. The class that declares them would make them from another object.
    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, backend: Backend, vocab_size: int, eos_token_ids: Collection[int]):
        # It knows the bytes of tokens for every kind of decoder, and encodes without the space that some begin with.
        self._encoder = LLTokenizer(backend.to_str(), n_vocab=vocab_size, slices=[])
        added = backend.get_added_tokens_decoder()
        special = {token_id: token.content for token_id, token in added.items() if token.special}
        special |= {token_id: backend.id_to_token(token_id) or "" for token_id in eos_token_ids}
        # Ids without a spelling, with which models pad their vocabularies, are special to llguidance, too.
        unknown = [i for i in range(vocab_size) if i not in added and self._encoder.is_special_token(i)]
        self.tokens = [self._encoder.decode_bytes([token_id]) for token_id in range(vocab_size)]
        self.special_token_ids = sorted({*special, *unknown})
        self.special_tokens = {token.content: i for i, token in added.items() if token.special and token.content}
        self.eos_token_id = next(iter(eos_token_ids), self._encoder.eos_token)
        # Numbers of the tokens that llguidance's Lark would find by name if they were special.
        self.named_text_tokens = {
            token.content: token_id
            for token_id, token in added.items()
            if token_id not in special and self._encoder.is_special_token(token_id)
        }
        # The first character of what reads like a special token. The encoder sees no such text whole.
        texts = "|".join(re.escape(text) for text in sorted(filter(None, special.values())))
        self._first_of_special = re.compile(f"(?=(?:{texts})).", re.DOTALL) if texts else None

    def __call__(self, text: str) -> list[int]:
        """Returns tokens that spell `text`, as the tokenizer would if it had no special tokens."""
        cuts = [] if self._first_of_special is None else [at.end() for at in self._first_of_special.finditer(text)]
        parts = (text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True))
        token_ids = [token_id for part in parts for token_id in self._encoder.tokenize_str(part)]
        if b"".join(self.tokens[token_id] for token_id in token_ids) != text.encode():
            # A tokenizer may change a text that it encodes, as one does that has no upper case.
            return self._encoder.greedy_tokenize(text)
        return token_ids
