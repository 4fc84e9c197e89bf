"""Ragged paged attention in machine code that Python writes, with vectors of three widths."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention import NO_WINDOW, RaggedRows
from tests.pallas_kernels.attention_suite import LONG_MIXED, MIXED, CompiledSuite, run


class CpuSuite(CompiledSuite):
    """What only this kernel promises."""

    @pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
    @pytest.mark.parametrize(
        "case",
        [
            MIXED,
            replace(MIXED, name="all", window=NO_WINDOW, soft_cap=20.0, sinks=True, num_heads=6, head_size=48),
            # 64 numbers of a head are decoded together, and 16.
            replace(MIXED, name="by-token", head_size=80, soft_cap=20.0, kv_dtype="float8_e4m3fn", by_token=True),
        ],
        ids=str,
    )
    def test_a_token_has_the_same_bits_alone(self, case: Any, dtype: Any) -> None:
        # Together they are tiles of other rows and of several queries; alone each is a decode row.
        call = self.call(case, dtype)
        together, _ = run(call, self.backend)
        for index, row in enumerate(case.rows):
            for number in {0, row.query_len // 2, row.query_len - 1}:
                at = slice(case.first_token(index) + number, case.first_token(index) + number + 1)
                start = np.asarray([row.kv_len - row.query_len + number], np.int32)
                rows = RaggedRows.build(jnp.asarray(call.table[index : index + 1]), start, jnp.ones(1, jnp.int32), 1)
                one = dict(q=call.q[at], k=call.k[at], v=call.v[at], pages=call.written, rows=rows)
                alone, _ = run(call, self.backend, **one)
                np.testing.assert_array_equal(alone[0], together[at][0])

    def test_tiles_that_nobody_reads_are_zeros(self) -> None:
        call = self.call(LONG_MIXED, np.float32)
        whole, _ = run(call, self.backend)
        first, end = LONG_MIXED.first_token(1), LONG_MIXED.first_token(2)
        is_needed = np.ones(len(whole), bool)
        is_needed[first : end - 1] = False
        some, _ = run(call, self.backend, rows=replace(call.rows, is_needed=jnp.asarray(is_needed)))
        skipped = slice(first, first + 64)  # two tiles of 32; the third has the row's last token
        assert whole[skipped].any(axis=(1, 2)).all() and not some[skipped].any()
        np.testing.assert_array_equal(np.delete(some, skipped, axis=0), np.delete(whole, skipped, axis=0))


class TestCpu(CpuSuite):
    backend = "cpu"


class TestVectorsOfEight(CpuSuite):
    backend = "cpu-8"


class TestVectorsOfFour(CpuSuite):
    backend = "cpu-4"
