"""The TPU's kernel, interpreted, in every case that `test_tpu` does not have."""

from tests.pallas_kernels.attention_suite import InterpretedSuite, interpreted


class TestTpu(InterpretedSuite):
    backend = "tpu"
    # Rows that decode read this dtype in "mixed-fp8", too, and the decode form has bytes in "decode-int8". Sinks beside
    # prompts, pages of 64 tokens, and heads of several registers with a soft cap: `test_tpu`.
    cases = interpreted("decode-fp8", "mixed-sinks", "mixed-wide-heads")
