"""The GPU's kernel, interpreted, in every case."""

from tests.pallas_kernels.attention_suite import AttentionSuite


class TestGpu(AttentionSuite):
    backend = "gpu"
