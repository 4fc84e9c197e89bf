"""The metadata of a ragged batch: which token belongs to which row. It is computed once a step for all layers."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

# A window that no context reaches. It fits int32, because the window of a layer is a traced scalar inside a scan.
NO_WINDOW = 2**30


class RowParts(NamedTuple):
    """Parts of rows, each within one chunk of positions. After the last one, parts are not real and arbitrary."""

    firsts: jax.Array  # i32[R]: the first part of each row
    counts: jax.Array  # i32[R]: how many parts it has
    rows: jax.Array  # i32[N]: the row of each part
    numbers: jax.Array  # i32[N]: the number of its chunk
    is_real: jax.Array  # bool[N]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["page_table", "query_starts", "kv_lens", "token_rows", "positions", "is_needed"],
    meta_fields=[],
)
@dataclass(frozen=True)
class RaggedRows:
    """R rows over T tokens. The queries of row r are tokens `query_starts[r]:query_starts[r + 1]`, its last ones.

    A row without queries is padding. Tokens from `query_starts[R]` on are padding too; they carry row R - 1.
    """

    page_table: jax.Array  # i32[R, max_pages]; entries past a row's pages may hold anything in range
    query_starts: jax.Array  # i32[R + 1]
    kv_lens: jax.Array  # i32[R], this step's tokens included
    token_rows: jax.Array  # i32[T]
    positions: jax.Array  # i32[T]; 0 for padding
    # bool[T]: False for tokens whose output nobody reads: a kernel may leave it out. None: all are needed.
    is_needed: jax.Array | None = None

    @classmethod
    def build(cls, page_table: jax.Array, starts: jax.Array, query_lens: jax.Array, num_tokens: int) -> "RaggedRows":
        """Builds rows that compute `query_lens` i32[R] tokens each, from positions `starts` i32[R] on.

        `num_tokens` T equal to R promises that no row has more than one query, and that row r owns token r.
        """
        num_rows = len(starts)
        tokens = jnp.arange(num_tokens, dtype=jnp.int32)
        if num_tokens == num_rows:
            query_starts = jnp.arange(num_rows + 1, dtype=jnp.int32)
            return cls(page_table, query_starts, starts + query_lens, tokens, starts)
        query_starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(query_lens, dtype=jnp.int32)])
        token_rows = jnp.searchsorted(query_starts[1:], tokens, side="right", method="compare_all")
        token_rows = jnp.minimum(token_rows, num_rows - 1).astype(jnp.int32)
        positions = starts[token_rows] + tokens - query_starts[token_rows]
        positions = jnp.where(tokens < query_starts[-1], positions, 0)
        return cls(page_table, query_starts, starts + query_lens, token_rows, positions)

    def part(self, first: jax.Array, end: jax.Array, num_tokens: int) -> "RaggedRows":
        """Returns what these rows compute in tokens `first:end`, which are at most `num_tokens`; the rest is padding.

        Where rows and tokens are not the same, `num_tokens` is more than R, since each of the rows is in the result.
        """
        tokens = first + jnp.arange(num_tokens, dtype=jnp.int32)
        is_here = tokens < end
        positions = jnp.where(is_here, jnp.take(self.positions, tokens, mode="clip"), 0)
        if self.decode_only:
            kv_lens = jnp.where(is_here, jnp.take(self.kv_lens, tokens, mode="clip"), 0)
            page_table = jnp.take(self.page_table, tokens, axis=0, mode="clip")
            own = jnp.arange(num_tokens + 1, dtype=jnp.int32)
            return RaggedRows(page_table, own, kv_lens, own[:-1], positions)
        assert num_tokens > len(self.kv_lens), "rows with one token each would be taken for rows that decode"
        query_starts = jnp.clip(self.query_starts - first, 0, end - first)
        # A row that goes on after this part has so many keys fewer here.
        kv_lens = self.kv_lens - jnp.maximum(self.query_starts[1:] - end, 0)
        kv_lens = jnp.where(jnp.diff(query_starts) > 0, kv_lens, 0)
        token_rows = jnp.where(is_here, jnp.take(self.token_rows, tokens, mode="clip"), len(self.kv_lens) - 1)
        return RaggedRows(self.page_table, query_starts, kv_lens, token_rows, positions)

    def in_chunks(self, chunk: int, page_size: int) -> "RaggedRows":
        """Returns rows whose tokens see nothing before their own chunk, which begins at a multiple of `chunk`.

        A row with queries in several chunks becomes several rows. Each begins at its chunk's first page, so `chunk`
        must be a multiple of `page_size`. Padding may follow the tokens, so that rows stay fewer than these.
        """
        num_tokens, num_rows = len(self.token_rows), len(self.kv_lens)
        if self.decode_only:
            first = jnp.maximum(self.kv_lens - 1, 0) // chunk
            table, before = self._table_from(jnp.arange(num_rows), first, chunk, page_size), first * chunk
            kv_lens, positions = self.kv_lens - before, self.positions - before
            return RaggedRows(table, self.query_starts, kv_lens, self.token_rows, positions)
        parts, starts = self.parts(chunk), self.starts()
        row, number = parts.rows, parts.numbers
        begin = jnp.maximum(starts[row], number * chunk)
        end = jnp.minimum((starts + self.query_lens())[row], (number + 1) * chunk)
        query_lens = jnp.where(parts.is_real, end - begin, 0)
        begin = jnp.where(parts.is_real, begin - number * chunk, 0)
        table = self._table_from(row, number, chunk, page_size)
        return RaggedRows.build(table, begin, query_lens, max(num_tokens, len(row) + 1))

    def parts(self, chunk: int) -> RowParts:
        """Returns the parts of the queries of each row that multiples of `chunk` cut, row after row."""
        num_tokens, num_rows = len(self.token_rows), len(self.kv_lens)
        # Each row with queries has one part, and one more for each multiple of the chunk within: at most one, and
        # further ones after as many tokens as a chunk has. A part has a token at least.
        number = jnp.arange(min(num_tokens, 2 * num_rows + num_tokens // chunk), dtype=jnp.int32)
        starts, lens = self.starts(), self.query_lens()
        first = starts // chunk
        counts = jnp.where(lens > 0, (starts + lens - 1) // chunk - first + 1, 0)
        until = jnp.cumsum(counts, dtype=jnp.int32)
        row = jnp.searchsorted(until, number, side="right", method="compare_all")
        is_real, row = row < num_rows, jnp.minimum(row, num_rows - 1)
        of_chunk = jnp.where(is_real, first[row] + number - (until - counts)[row], 0)
        return RowParts(until - counts, counts, row, of_chunk, is_real)

    def _table_from(self, rows: jax.Array, number: jax.Array, chunk: int, page_size: int) -> jax.Array:
        """Returns the page tables of these rows i32[N], from the first page of chunk `number` i32[N] on."""
        pages = chunk // page_size
        columns = number[:, None] * pages + jnp.arange(min(pages, self.page_table.shape[1]), dtype=jnp.int32)
        return self.page_table.at[rows[:, None], columns].get(mode="clip")

    @property
    def decode_only(self) -> bool:
        """Whether the shapes alone tell that every row has at most one query."""
        return len(self.token_rows) == len(self.kv_lens)

    def query_lens(self) -> jax.Array:
        """Returns the number of queries i32[R] of each row. With one token a row, padding rows are those without KV."""
        if self.decode_only:
            return jnp.minimum(self.kv_lens, 1)
        return jnp.diff(self.query_starts)

    def starts(self) -> jax.Array:
        """Returns the position i32[R] of each row's first query."""
        return self.kv_lens - self.query_lens()

    def is_real(self) -> jax.Array:
        """Returns bool[T], true for tokens that are not padding."""
        if self.decode_only:
            return self.kv_lens > 0
        return jnp.arange(len(self.token_rows)) < self.query_starts[-1]
