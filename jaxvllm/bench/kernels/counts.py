"""Counts what a case of attention must move and compute at least: its place on the roofline."""

from dataclasses import dataclass

import numpy as np

from pallas_kernels.ragged_paged_attention.cases import RaggedCase, RowCase


@dataclass(frozen=True)
class Work:
    """The bytes to and from the device's memory, and the floating-point operations, of one layer's call."""

    bytes: int
    flops: int

    @classmethod
    def of(cls, case: RaggedCase, dtype: np.dtype) -> "Work":
        """Returns the least work of `case` with queries of `dtype`.

        The bytes are those of all keys and values that any query of a row sees, read once; of this step's keys and
        values, written; and of queries and outputs. The operations are two matrix products over the pairs of query and
        position that are seen, without the masked half of a tile and without the softmax. Padding counts nothing.
        """
        kv_itemsize = np.dtype(case.kv_dtype or dtype).itemsize
        token_kv_bytes = case.token_elements * kv_itemsize + case.token_scales * np.dtype(np.float32).itemsize
        head_elements = case.num_heads * (case.head_size + case.value_size)
        seen = sum(_positions_seen(row, case.window) for row in case.rows)
        pairs = sum(_pairs_seen(row, case.window) for row in case.rows)
        queries = sum(row.query_len for row in case.rows)
        return cls(
            bytes=(seen + queries) * token_kv_bytes + queries * head_elements * dtype.itemsize,
            flops=2 * pairs * head_elements,
        )


def _positions_seen(row: RowCase, window: int) -> int:
    """Counts the positions that any query of the row sees: all from the begin of the first query's window on."""
    return min(row.kv_len, row.query_len + window - 1) if row.query_len else 0


def _pairs_seen(row: RowCase, window: int) -> int:
    """Counts pairs: the query at position p sees min(p + 1, window) positions."""
    first, end = row.kv_len - row.query_len, row.kv_len
    whole = min(max(window, first), end)  # queries from here on see a full window
    return (whole * (whole + 1) - first * (first + 1)) // 2 + (end - whole) * window
