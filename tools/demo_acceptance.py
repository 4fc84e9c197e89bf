"""Counts how many drafted tokens the demo model accepts on documents that it never saw, and writes them as Markdown.

Everything is plain JAX and greedy. The drafts are judged at every position of the target's own continuation of a prompt.
A draft counts up to its first wrong token, so every later guess may be computed from the right tokens before it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from tools.demo_corpus import EVALUATION_SEED, KINDS, Corpus, Document
from tools.demo_heads import (
    EAGLE3,
    EMBEDDING,
    MEDUSA,
    eagle3_unrolled,
    load_eagle3,
    load_medusa,
    medusa_logits,
)
from tools.demo_model import DEMO, DRAFT, Params, decode, load, logits, residual_states
from tools.demo_tokenizer import END, token_id

DOCUMENTS_PER_KIND = 32
MAX_TOKENS = 128
PLAIN_PROMPT_TOKENS = 12
DRAFTED = 6
# Documents that are judged together.
ROWS = 16


@dataclass(frozen=True)
class Continuation:
    """The target's continuation of a prompt: all tokens i32[T], the first `prompt` of them given."""

    kind: str
    tokens: np.ndarray
    prompt: int


@dataclass(frozen=True)
class Score:
    """The number of right tokens among `DRAFTED` drafted ones, at every position of one continuation.

    Entry n of `right` i32[N] is the number of leading right tokens of the draft after the continuation's token n, and
    entry n of `possible` i32[N] the number of tokens that follow in the continuation, `DRAFTED` at most.
    """

    right: np.ndarray
    possible: np.ndarray

    def tokens_per_step(self, count: int) -> tuple[int, int]:
        """Returns how many tokens follow the first one, and the steps that generate them with `count` drafts a step."""
        last = len(self.right) - 1
        at = steps = 0
        while at < last:
            at += min(int(self.right[at]), count) + 1
            steps += 1
        return last, steps


# Tokens i32[B, T] to guesses i32[B, T], of which entry (s, p) is token p + 1 as drafted token s + 1.
type Guesser = Callable[[jax.Array], list[jax.Array]]


def held_out_documents() -> Iterator[Document]:
    """Yields `DOCUMENTS_PER_KIND` held-out documents of each kind."""
    found = dict.fromkeys(KINDS, 0)
    for document in Corpus(EVALUATION_SEED).part(held_out=True):
        if found[document.kind] < DOCUMENTS_PER_KIND:
            found[document.kind] += 1
            yield document
        elif all(count == DOCUMENTS_PER_KIND for count in found.values()):
            return


def prompt_of(tokenizer: Tokenizer, document: Document) -> list[int]:
    """Returns a chat up to the assistant's first turn, and the first tokens of plain text."""
    ids: list[int] = tokenizer.encode(document.text, add_special_tokens=False).ids
    assistant = token_id(tokenizer, "<|assistant|>")
    return ids[: ids.index(assistant) + 1] if assistant in ids else ids[:PLAIN_PROMPT_TOKENS]


def continuations(tokenizer: Tokenizer, target: Params, documents: Iterable[Document]) -> list[Continuation]:
    """Returns the target's greedy continuations, the end token included where it came."""
    end = token_id(tokenizer, END)
    found = []
    documents = list(documents)
    for kind in KINDS:
        prompts = [prompt_of(tokenizer, document) for document in documents if document.kind == kind]
        for prompt, said in zip(prompts, decode(DEMO, target, prompts, MAX_TOKENS, end), strict=True):
            last = [end] if len(said) < MAX_TOKENS else []
            found.append(Continuation(kind, np.asarray(prompt + said + last, np.int32), len(prompt)))
    return found


def eagle3_guesses(target: Params, params: Params, draft_ids: np.ndarray, tokens: jax.Array) -> list[jax.Array]:
    """Returns for s = 0, 1, ... the guess i32[B, T] of token p + 1 as drafted token s + 1."""
    segments = jnp.ones_like(tokens)
    states, _ = residual_states(DEMO, target, tokens, segments)
    scored = eagle3_unrolled(EAGLE3, params, target[EMBEDDING], tokens, segments, states, DRAFTED)
    return [jnp.asarray(draft_ids)[jnp.argmax(one, -1)] for one in scored]


def medusa_guesses(target: Params, params: Params, tokens: jax.Array) -> list[jax.Array]:
    """Returns for s = 0, 1, ... the guess i32[B, T] of token p + 1 as drafted token s + 1."""
    _, last = residual_states(DEMO, target, tokens, jnp.ones_like(tokens))
    scored = medusa_logits(MEDUSA, params, target[EMBEDDING], last)
    # Head s guesses from the state of position p - s - 1. The roll brings wrong guesses to the prompt's first tokens only.
    return [jnp.roll(jnp.argmax(one, -1), head + 1, 1) for head, one in enumerate(scored)]


def draft_guesses(draft: Params, tokens: jax.Array) -> list[jax.Array]:
    """Returns for s = 0, 1, ... the guess i32[B, T] of token p + 1 as drafted token s + 1, which does not depend on s."""
    return [jnp.argmax(logits(DRAFT, draft, tokens, jnp.ones_like(tokens)), -1)] * DRAFTED


def scores(guesser: Guesser, texts: Sequence[Continuation]) -> list[Score]:
    """Judges drafts after every token of the continuations."""
    guess = jax.jit(guesser)
    found: list[Score] = [Score(np.zeros(0, np.int32), np.zeros(0, np.int32))] * len(texts)
    # Texts of similar length together, and few different shapes.
    order = sorted(range(len(texts)), key=lambda at: len(texts[at].tokens))
    for begin in range(0, len(order), ROWS):
        group = order[begin : begin + ROWS]
        length = -(-max(len(texts[at].tokens) for at in group) // 128) * 128
        tokens = np.zeros((ROWS, length), np.int32)
        for row, at in enumerate(group):
            tokens[row, : len(texts[at].tokens)] = texts[at].tokens
        guessed = np.asarray(jnp.stack(guess(jnp.asarray(tokens))))
        for row, at in enumerate(group):
            found[at] = _score(guessed[:, row], texts[at])
    return found


def _score(guessed: np.ndarray, text: Continuation) -> Score:
    """Judges guesses i32[drafted, T]: entry (s, p) is for token p + 1 as drafted token s + 1."""
    last = len(text.tokens) - 1
    right, possible = [], []
    # The last known token is number `at`; the continuation's first token is the first such.
    for at in range(text.prompt, last + 1):
        count = 0
        while count < len(guessed) and at + count < last:
            if guessed[count, at + count] != text.tokens[at + count + 1]:
                break
            count += 1
        right.append(count)
        possible.append(min(DRAFTED, last - at))
    return Score(np.asarray(right, np.int32), np.asarray(possible, np.int32))


def _row(name: str, found: Sequence[Score], counts: Sequence[int]) -> str:
    right = np.concatenate([score.right for score in found])
    possible = np.concatenate([score.possible for score in found])
    cells = [name, str(len(right))]
    for number in range(1, DRAFTED + 1):
        known = possible >= number
        rate = float(np.mean(right[known] >= number)) if known.any() else 0.0
        cells.append(f"{100 * rate:.0f}%" if number <= max(counts) else "")
    for count in counts:
        walked = [score.tokens_per_step(count) for score in found]
        cells.append(f"{sum(tokens for tokens, _ in walked) / sum(steps for _, steps in walked):.2f}")
    return "| " + " | ".join(cells) + " |"


def table(texts: Sequence[Continuation], found: Sequence[Score], counts: Sequence[int]) -> str:
    """Returns the rates by kind of document. Column k has the drafts whose first k tokens are right."""
    heads = ["prompt", "tokens", *map(str, range(1, DRAFTED + 1)), *(f"tokens a step, k = {count}" for count in counts)]
    lines = ["| " + " | ".join(heads) + " |", "| --- |" + " ---: |" * (len(heads) - 1)]
    for kind in KINDS:
        own = [score for score, text in zip(found, texts, strict=True) if text.kind == kind]
        lines.append(_row(kind, own, counts))
    return "\n".join([*lines, _row("**all**", found, counts)])


def report(models: Path, heads: Path) -> str:
    """Returns the acceptance of the heads in `heads` and of the draft model in `models` as Markdown."""
    target = load(models / "demo", DEMO)
    tokenizer = Tokenizer.from_file(str(models / "demo" / "tokenizer.json"))
    texts = continuations(tokenizer, target, held_out_documents())
    parts = []
    eagle3, draft_ids = load_eagle3(heads / "demo-eagle3", EAGLE3)
    medusa = load_medusa(heads / "demo-medusa", MEDUSA)
    drafters: list[tuple[str, Guesser, tuple[int, ...]]] = [
        ("demo-eagle3", partial(eagle3_guesses, target, eagle3, draft_ids), (2, 4, 6)),
        ("demo-medusa", partial(medusa_guesses, target, medusa), (2, 4)),
        ("demo-draft", partial(draft_guesses, load(models / "demo-draft", DRAFT)), (2, 4, 6)),
    ]
    for name, guesser, counts in drafters:
        parts += [f"### {name}", "", table(texts, scores(guesser, texts), counts), ""]
    return "\n".join(parts)
