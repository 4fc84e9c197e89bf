"""The TPU's kernel, interpreted, in every case that `test_tpu` does not have."""

from tests.pallas_kernels.attention_suite import InterpretedSuite, interpreted


class TestTpu(InterpretedSuite):
    backend = "tpu"
    # Sinks beside prompts, pages of 64 tokens, and heads of several registers with a soft cap: `test_tpu`.
    cases = interpreted("mixed-sinks", "mixed-wide-heads")
