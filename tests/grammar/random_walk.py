"""A text that a grammar takes, without a model: each token is drawn from those that the mask allows."""

import random
from functools import cache

import numpy as np
from numpy.typing import NDArray

from jaxvllm.grammar.constraint import CompiledGrammar
from tests.grammar.demo import EOS, VOCAB_SIZE, tokenizer

# How a token begins that brings JSON to its end, the best first. Outside of strings everything else comes last.
_ENDINGS = ("}]", ",", '"tfn', "0123456789")


@cache
def _ranks(in_string: bool) -> NDArray[np.int64]:
    """For each token how soon JSON is over after it: a lower rank is sooner."""
    first = [tokenizer().decode([token]).lstrip()[:1] for token in range(VOCAB_SIZE)]
    endings = ('"',) if in_string else _ENDINGS
    return np.array(
        [next((rank for rank, some in enumerate(endings) if char and char in some), len(endings)) for char in first]
    )


def random_walk(grammar: CompiledGrammar, seed: int, num_free: int = 60, most: int = 2000) -> str | None:
    """Returns what a model would write that likes all tokens equally, or None if that has no end after `most` tokens.

    From `num_free` tokens on it prefers those that bring the text to its end.
    """
    rng = random.Random(seed)
    constraint = grammar.constraint()
    words = np.zeros(VOCAB_SIZE // 32, np.int32)
    written: list[int] = []
    in_string = False
    while not constraint.is_complete:
        if len(written) > most:
            return None
        new = list(constraint.forced())
        if not new:
            constraint.fill(words)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            if EOS in allowed and (len(allowed) == 1 or len(written) >= num_free or rng.random() < 0.2):
                break
            allowed = allowed[allowed != EOS]
            if len(written) >= num_free:
                ranks = _ranks(in_string)[allowed]
                allowed = allowed[ranks == ranks.min()]
            new = [int(rng.choice(allowed))]
        constraint.advance(new)
        written += new
        in_string = _ends_in_string(tokenizer().decode(written))
    return tokenizer().decode(written)


def _ends_in_string(text: str) -> bool:
    quotes = text.replace("\\\\", "").replace('\\"', "").count('"')
    return quotes % 2 == 1
