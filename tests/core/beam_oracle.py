"""Beam search by its definition: whole sequences in plain lists, nothing shared and nothing ended early."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

# The log-probabilities of the next token after a whole sequence, prompt included.
type Model = Callable[[Sequence[int]], np.ndarray]


@dataclass(frozen=True)
class Found:
    output: tuple[int, ...]  # with EOS
    cum_logprob: float
    score: float


def score(tokens: Sequence[int], cum_logprob: float, eos: int, penalty: float) -> float:
    length = len(tokens) - (tokens[-1] == eos)
    return cum_logprob / length**penalty


def beam_search(
    model: Model,
    prompt: Sequence[int],
    width: int,
    max_tokens: int,
    eos: int,
    penalty: float = 1.0,
    ignore_eos: bool = False,
    stops_early: bool = False,
) -> list[Found]:
    """The best sequences, best first."""
    live: list[tuple[list[int], float]] = [(list(prompt), 0.0)]
    complete: list[tuple[list[int], float]] = []
    for _ in range(max_tokens):
        longer: list[tuple[list[int], float]] = []
        for tokens, total in live:
            values = model(tokens)
            for token in np.argsort(-values, kind="stable")[: 2 * width].tolist():
                one = ([*tokens, token], total + float(values[token]))
                (complete if token == eos and not ignore_eos else longer).append(one)
        live = sorted(longer, key=lambda one: -one[1])[:width]
        if stops_early and len(complete) >= width:
            live = []
        if not live:
            break
    ranked = [Found(tuple(t[len(prompt) :]), total, score(t, total, eos, penalty)) for t, total in complete + live]
    return sorted(ranked, key=lambda found: -found.score)[:width]


def exhaustive_search(
    model: Model, prompt: Sequence[int], count: int, max_tokens: int, eos: int, vocab_size: int, penalty: float = 1.0
) -> list[Found]:
    """The best of all sequences that there are."""
    outputs = {
        tuple(output[: output.index(eos) + 1]) if eos in output else output
        for output in product(range(vocab_size), repeat=max_tokens)
    }
    found = []
    for output in outputs:
        total = sum(float(model([*prompt, *output[:i]])[token]) for i, token in enumerate(output))
        found.append(Found(output, total, score([*prompt, *output], total, eos, penalty)))
    return sorted(found, key=lambda one: -one.score)[:count]
