"""Ragged paged attention in machine code that Python writes, with vectors of three widths."""

from tests.pallas_kernels.attention_suite import AttentionSuite


class TestCpu(AttentionSuite):
    backend = "cpu"


class TestVectorsOfEight(AttentionSuite):
    backend = "cpu-8"


class TestVectorsOfFour(AttentionSuite):
    backend = "cpu-4"
