"""The GPU's kernel, interpreted, in every case that `test_gpu` does not have."""

from tests.pallas_kernels.attention_suite import InterpretedSuite, interpreted


class TestGpu(InterpretedSuite):
    backend = "gpu"
    # Rows that decode read this dtype in "mixed-fp8", too, as prompts with sinks do, and the decode form has bytes in
    # "decode-int8". Pages of 64 tokens: `test_gpu`.
    cases = interpreted("decode-fp8", "mixed-sinks")
