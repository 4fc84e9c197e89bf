"""The roofline's counts equal those made by looking at every query and every position."""

import numpy as np
import pytest

from jaxvllm.bench.kernels.counts import Work
from pallas_kernels.ragged_paged_attention.cases import CASES, SERVING, RaggedCase, RowCase

FLOAT32 = np.dtype(np.float32)
# A window of one position; windows that begin inside a chunk of queries, and before it.
EDGES = tuple(
    RaggedCase(f"window-{window}", 4, 2, 16, 16, 64, (RowCase(20, 33), RowCase(9, 9), RowCase(1, 7)), window=window)
    for window in (1, 2, 8, 13, 14, 20, 33, 34)
)


def brute_force(case: RaggedCase, dtype: np.dtype) -> Work:
    stored = np.dtype(case.kv_dtype or dtype)
    read, written, tokens, operations = set(), set(), 0, 0
    value = case.latent_size or case.head_size
    stored_elements = case.head_size if case.latent_size else 2 * case.head_size  # a latent is the end of its key
    for index, row in enumerate(case.rows):
        for query in range(row.kv_len - row.query_len, row.kv_len):
            seen = [at for at in range(row.kv_len) if query - case.window < at <= query]
            read |= {(index, at) for at in seen}
            written.add((index, query))
            tokens += 1
            for _ in range(case.num_heads):
                operations += len(seen) * (2 * case.head_size + 2 * value)  # q . k, then weight * v
    kv = (len(read) + len(written)) * case.num_kv_heads * stored_elements * stored.itemsize
    return Work(kv + tokens * case.num_heads * (case.head_size + value) * dtype.itemsize, operations)


@pytest.mark.parametrize("case", CASES + EDGES, ids=str)
def test_equals_brute_force(case: RaggedCase) -> None:
    assert Work.of(case, FLOAT32) == brute_force(case, FLOAT32)


def test_a_case_by_hand() -> None:
    """64 rows of 4096 bfloat16 tokens, 8 KV heads, 32 query heads of 128."""
    case = next(case for case in SERVING if case.name == "decode-64x4096-q32-d128")
    work = Work.of(case, np.dtype(np.float16))
    assert work.bytes == 64 * (4096 + 1) * 8 * 256 * 2 + 2 * 64 * 32 * 128 * 2
    assert work.flops == 64 * 4096 * 32 * 4 * 128


def test_eight_bit_pages_move_half() -> None:
    rows = (RowCase(1, 1000),)
    full = Work.of(RaggedCase("a", 1, 1, 64, 16, 1, rows), np.dtype(np.float16))
    half = Work.of(RaggedCase("b", 1, 1, 64, 16, 1, rows, kv_dtype="int8"), np.dtype(np.float16))
    assert full.bytes - half.bytes == 1001 * 128
    assert full.flops == half.flops
