"""The calls of llguidance that compile a grammar. The process that tries a grammar makes the same ones as the engine.

It imports nothing slow: NumPy would triple the time to start that process, which is 0.07 s.
"""

import ctypes
from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from jaxvllm.grammar.vocabulary import GrammarVocabulary

# Compiling recurses as deeply as rules refer to each other: a chain of 3000 definitions ended the process at the usual
# 8 MiB. This is address space, of which a thread takes what it uses.
STACK_BYTES = 2**29

_LIMITS = LLParserLimits(
    max_lexer_states=100_000,  # of 1 to 2 kB
    verbose_errors=False,  # which hold parts of the text
)


def new_tokens(vocabulary: GrammarVocabulary, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Returns the tokens of a vocabulary in the form in which llguidance computes with them."""
    return LLTokenizer(vocabulary, eos_token=list(eos_token_ids) or None)


def new_matcher(tokens: LLTokenizer, source: str) -> LLMatcher:
    """Returns a matcher at its start. It has an error if `source` is no grammar."""
    return LLMatcher(tokens, source, log_level=0, limits=_LIMITS)


def first_mask(matcher: LLMatcher, tokens: LLTokenizer) -> bytearray:
    """Returns the mask of the tokens with which a text may begin: a bit for each, in words of 32."""
    mask = bytearray(-(-tokens.vocab_size // 32) * 4)
    matcher.unsafe_compute_mask_ptr(ctypes.addressof(ctypes.c_char.from_buffer(mask)), len(mask))
    return mask


def first_forced(matcher: LLMatcher) -> tuple[int, ...]:
    """Returns the tokens with which every text begins."""
    return tuple(matcher.compute_ff_tokens())
