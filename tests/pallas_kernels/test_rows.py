"""Rows cut into chunks: every token is in one of them, and sees the pages of its own chunk alone, up to itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention import RaggedRows

PAGE = 4


def seen_pages(rows: RaggedRows) -> list[tuple[list[tuple[int, int]], int]]:
    """Returns, for each real token, the page and offset of all positions that it sees, and its own number."""
    table, starts = np.asarray(rows.page_table), np.asarray(rows.query_starts)
    found = []
    for row in range(len(starts) - 1):
        num_queries = int(rows.query_lens()[row])
        for token in range(starts[row], starts[row] + num_queries):
            last = int(rows.kv_lens[row]) - num_queries + token - starts[row]
            assert int(rows.token_rows[token]) == row and int(rows.positions[token]) == last
            found.append(([(int(table[row, at // PAGE]), at % PAGE) for at in range(last + 1)], int(token)))
    return found


def in_own_chunk(rows: RaggedRows, chunk: int) -> list[tuple[list[tuple[int, int]], int]]:
    """Returns what tokens of `rows` see of their own chunk."""
    return [(seen[(len(seen) - 1) // chunk * chunk :], token) for seen, token in seen_pages(rows)]


@pytest.mark.parametrize("chunk", [4, 8, 64])
@pytest.mark.parametrize("seed", range(3))
def test_prompts_and_rows_that_decode(chunk: int, seed: int) -> None:
    stream = np.random.default_rng(seed)
    num_rows, num_tokens = 3, int(stream.integers(4, 40))
    cuts = np.sort(stream.integers(0, num_tokens + 1, num_rows))
    lens = jnp.asarray(np.diff(np.concatenate([[0], cuts])), jnp.int32)
    starts = jnp.asarray(stream.integers(0, 30, num_rows), jnp.int32)
    table = jnp.asarray(stream.permutation(np.arange(num_rows * 18)).reshape(num_rows, 18) + 1, jnp.int32)
    rows = RaggedRows.build(table, jnp.where(lens > 0, starts, 0), lens, num_tokens)
    cut = jax.jit(lambda rows: rows.in_chunks(chunk, PAGE))(rows)
    assert len(cut.kv_lens) < len(cut.token_rows) and int(cut.kv_lens.max()) <= chunk
    assert seen_pages(cut) == in_own_chunk(rows, chunk)
    assert cut.page_table.shape[1] == min(chunk // PAGE, 18)


def test_the_most_rows_that_tokens_can_make() -> None:
    """Rows of two tokens each, in two chunks."""
    table = jnp.arange(24, dtype=jnp.int32).reshape(4, 6)
    rows = RaggedRows.build(table, jnp.full(4, 7, jnp.int32), jnp.full(4, 2, jnp.int32), 8)
    assert seen_pages(rows.in_chunks(8, PAGE)) == in_own_chunk(rows, 8)


def test_one_token_each() -> None:
    table = jnp.arange(24, dtype=jnp.int32).reshape(4, 6)
    lens = jnp.asarray([1, 1, 1, 0], jnp.int32)
    rows = RaggedRows.build(table, jnp.asarray([7, 8, 17, 0], jnp.int32), lens, 4)
    cut = rows.in_chunks(8, PAGE)
    assert cut.decode_only
    assert seen_pages(cut) == in_own_chunk(rows, 8)
