"""Ragged paged attention in machine code that Python writes, with vectors of three widths."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cpu.emit import Emitter
from pallas_kernels.cpu.frame import Frame
from pallas_kernels.cpu.machine_code import handler_assembly
from pallas_kernels.ragged_paged_attention import NO_WINDOW, RaggedRows
from pallas_kernels.ragged_paged_attention.cases import CASES, RaggedCase
from pallas_kernels.ragged_paged_attention.cpu.kernel import attention
from tests.pallas_kernels.attention_suite import LONG_MIXED, MIXED, QUICK, CompiledSuite, run
from tests.pallas_kernels.cpu_chips import SAPPHIRE_RAPIDS


class CpuSuite(CompiledSuite):
    """What only this kernel promises."""

    dtypes: ClassVar[Sequence[str]] = ("float32", "bfloat16")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        super().pytest_generate_tests(metafunc)
        if "dtype" in metafunc.fixturenames:
            metafunc.parametrize("dtype", self.dtypes)

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
    def test_a_token_has_the_same_bits_alone(self, case: RaggedCase, dtype: str) -> None:
        # Together they are tiles of other rows and of several queries; alone each is a decode row.
        call = self.call(case, jnp.dtype(dtype))
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


class TestTiles(CpuSuite):
    """Of AMX, which this CPU emulates: they multiply where queries and pages are bfloat16."""

    backend = "cpu-amx"
    cases = [case for case in CASES if case.name in QUICK and case.kv_dtype is None]
    dtypes = ("bfloat16",)

    def test_they_are_compiled_to_the_instructions_of_amx(self) -> None:
        def emit(e: Emitter, frame: Frame) -> None:
            attention(e, frame, "bfloat16", "bfloat16", "by-head")

        emitted = [line.split()[0] for line in handler_assembly("handler", emit, SAPPHIRE_RAPIDS).splitlines() if line]
        # Configured once for few queries, and in the function of many for whole tiles and for the others.
        counts = {name: emitted.count(name) for name in ("ldtilecfg", "tilerelease", "vdpbf16ps")}
        assert counts == {"ldtilecfg": 3, "tilerelease": 3, "vdpbf16ps": 0} and "tdpbf16ps" in emitted
