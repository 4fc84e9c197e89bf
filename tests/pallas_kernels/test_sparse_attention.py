"""Attention to the positions that an index chooses, against NumPy, over pages that other rows own or nobody."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.ragged_paged_attention import (
    NO_WINDOW,
    IndexQueries,
    RaggedRows,
    choose_positions,
    ragged_paged_attention,
)
from tests.pallas_kernels.attention_call import BACKENDS

HEADS, INDEX_HEADS, INDEX_SIZE, ROPE, LATENT, PAGE, LAYERS = 5, 3, 6, 4, 12, 16, 2
SIZE = INDEX_SIZE + ROPE + LATENT
# (queries, context) of a row that decodes, a prompt, a chunk of one, drafts, and no row.
ROWS = ((1, 100), (20, 20), (9, 70), (3, 33), (0, 0))
NUM_TOKENS = 40


def by_hand(q: np.ndarray, index: IndexQueries, keys: np.ndarray, position: int) -> np.ndarray:
    """f64[H, latent]: one query over the keys [N, D] of its context."""
    seen = keys[: position + 1].astype(np.float64)
    scores = np.maximum(index.q.astype(np.float64) @ seen[:, :INDEX_SIZE].T, 0)
    best = np.argsort(-(index.weights @ scores), kind="stable")[: index.top_k]
    logits = q[:, INDEX_SIZE:].astype(np.float64) @ seen[best, INDEX_SIZE:].T * 0.3
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True) @ seen[best, -LATENT:]


@pytest.mark.parametrize("backend", [REFERENCE, BACKENDS["cpu"]], ids=["reference", "cpu"])
@pytest.mark.parametrize("top_k", [7, 4096])
def test_the_chosen_positions_are_seen_and_no_others(top_k: int, backend: Backend) -> None:
    rng = np.random.default_rng(0)
    max_pages, width = 8, SIZE if backend == REFERENCE else 32
    pages = np.full((LAYERS, 64, 1, PAGE, width), np.nan, np.float32)
    free, table = rng.permutation(np.arange(1, 63)).tolist(), np.full((len(ROWS), max_pages), 63, np.int32)
    q = rng.standard_normal((NUM_TOKENS, HEADS, SIZE)).astype(np.float32)
    q[..., :INDEX_SIZE] = 0
    index_q = rng.standard_normal((NUM_TOKENS, INDEX_HEADS, INDEX_SIZE)).astype(np.float32)
    weights = rng.standard_normal((NUM_TOKENS, INDEX_HEADS)).astype(np.float32)
    k, expected, token = np.zeros((NUM_TOKENS, 1, SIZE), np.float32), np.zeros((NUM_TOKENS, HEADS, LATENT)), 0
    for row, (count, length) in enumerate(ROWS):
        own = [free.pop() for _ in range(-(-length // PAGE))]
        table[row, : len(own)] = own
        keys = rng.standard_normal((length, SIZE)).astype(np.float32)
        for position in range(length - count):
            pages[1, own[position // PAGE], 0, position % PAGE] = 0
            pages[1, own[position // PAGE], 0, position % PAGE, width - SIZE :] = keys[position]
        for position in range(length - count, length):
            k[token, 0] = keys[position]
            one = IndexQueries(index_q[token], weights[token], top_k)
            expected[token] = by_hand(q[token], one, keys, position)
            token += 1
    starts = np.asarray([length - count for count, length in ROWS], np.int32)
    lengths = np.asarray([count for count, _ in ROWS], np.int32)
    rows = RaggedRows.build(*map(jnp.asarray, (table, starts, lengths)), NUM_TOKENS)
    options = dict(scale=0.3, window=NO_WINDOW, latent_size=LATENT, backend=backend)

    @jax.jit
    def call(q: jax.Array, index_q: jax.Array, weights: jax.Array, k: jax.Array, pages: jax.Array) -> jax.Array:
        index = IndexQueries(index_q, weights, top_k)
        return partial(ragged_paged_attention, **options)(q, k, None, pages, 1, rows, index=index)[0]

    @jax.jit
    def call_after_choosing(
        q: jax.Array, index_q: jax.Array, weights: jax.Array, k: jax.Array, pages: jax.Array
    ) -> jax.Array:
        index = IndexQueries(index_q, weights, top_k)
        chosen, pages = choose_positions(k, pages, 1, rows, index, latent_size=LATENT, backend=backend)
        return partial(ragged_paged_attention, **options)(q, None, None, pages, 1, rows, index=chosen)[0]

    for attend in (call, call_after_choosing):
        out = np.asarray(attend(q, index_q, weights, k, pages))
        assert np.isfinite(out).all()
        np.testing.assert_allclose(out[:token], expected[:token], atol=2e-5)
