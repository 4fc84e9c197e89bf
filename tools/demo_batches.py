"""Packs documents into training rows."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from tools.demo_corpus import Document
from tools.demo_tokenizer import token_id

SHORT, LONG = 256, 1024
TOKENS_PER_BATCH = 2048
# The number of documents to choose from when a row is filled. 64 leave few gaps.
POOL = 64
# Every eighth batch has rows of 1024, so the model meets the distances of its use at a small cost.
LONG_EVERY = 8
# The words of users and tools deserve less of a small model's capacity than the words that it must say itself.
OTHERS_WEIGHT = 0.2


@dataclass(frozen=True)
class Batch:
    """Rows of tokens i32[B, T + 1], their segments i32[B, T + 1] (0 pads), and target weights f32[B, T]."""

    tokens: np.ndarray
    segments: np.ndarray
    weights: np.ndarray


class Packer:
    """Turns documents into batches. In short rows each document sees only itself. In long rows documents follow each
    other, as text does after an end token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._assistant = token_id(tokenizer, "<|assistant|>")
        self._roles = {token_id(tokenizer, f"<|{role}|>") for role in ("user", "system", "tool")}

    def token_weights(self, ids: list[int]) -> list[float]:
        """Returns the weight of predicting each token: 1 for plain text and for the assistant's turns."""
        weight, weights = 1.0, []
        for token in ids:
            weights.append(weight)
            if token == self._assistant:
                weight = 1.0
            elif token in self._roles:
                weight = OTHERS_WEIGHT
        return weights

    def batches(self, documents: Iterator[Document]) -> Iterator[Batch]:
        """Yields batches of `TOKENS_PER_BATCH` tokens without end."""
        encoded = self._encoded(documents)
        pool: list[list[int]] = []
        set_aside: list[list[int]] = []
        for count in itertools.count(1):
            if count % LONG_EVERY:
                rows = [self._short_row(encoded, pool, set_aside) for _ in range(TOKENS_PER_BATCH // SHORT)]
                yield self._batch(rows, SHORT, apart=True)
            else:
                rows = [self._long_row(encoded, set_aside) for _ in range(TOKENS_PER_BATCH // LONG)]
                yield self._batch(rows, LONG, apart=False)

    def _encoded(self, documents: Iterator[Document]) -> Iterator[list[int]]:
        for group in itertools.batched(documents, 512):
            texts = [document.text for document in group]
            for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False):
                yield encoding.ids[:LONG]

    def _short_row(
        self, encoded: Iterator[list[int]], pool: list[list[int]], set_aside: list[list[int]]
    ) -> list[list[int]]:
        """Takes the oldest document of the pool, then always the longest that still fits. Too long ones are set aside."""
        row: list[list[int]] = []
        room = SHORT + 1
        while True:
            while len(pool) < POOL:
                ids = next(encoded)
                (pool if len(ids) <= SHORT + 1 else set_aside).append(ids)
            fitting = [at for at, ids in enumerate(pool) if len(ids) <= room]
            if not fitting:
                return row
            row.append(pool.pop(max(fitting, key=lambda at: len(pool[at])) if row else 0))
            room -= len(row[-1])

    def _long_row(self, encoded: Iterator[list[int]], set_aside: list[list[int]]) -> list[list[int]]:
        row: list[list[int]] = []
        while sum(map(len, row)) < LONG + 1:
            row.append(set_aside.pop(0) if set_aside else next(encoded))
        return row

    def _batch(self, rows: list[list[list[int]]], length: int, *, apart: bool) -> Batch:
        tokens = np.zeros((len(rows), length + 1), np.int32)
        segments = np.zeros((len(rows), length + 1), np.int32)
        weights = np.zeros((len(rows), length + 1), np.float32)
        for at, row in enumerate(rows):
            end = 0
            for number, ids in enumerate(row, 1):
                start, end = end, min(end + len(ids), length + 1)
                tokens[at, start:end] = ids[: end - start]
                segments[at, start:end] = number if apart else 1
                weights[at, start:end] = self.token_weights(ids)[: end - start]
        same = segments[:, 1:] == segments[:, :-1]
        return Batch(tokens, segments, weights[:, 1:] * same)
