"""The GPU's kernel, interpreted, in every case that `test_gpu` does not have."""

import numpy as np

from tests.pallas_kernels.attention_call import BACKENDS, make_call
from tests.pallas_kernels.attention_suite import BY_TOKEN, InterpretedSuite, interpreted, run


class TestGpu(InterpretedSuite):
    backend = "gpu"
    # Prompts with sinks read FP8 in "mixed-fp8". Pages of 64 tokens: `test_gpu`.
    cases = interpreted("mixed-sinks")

    def test_float16_has_small_weights_times_scales_of_tokens(self) -> None:
        # A weight of 1e-5 times a scale of 0.02 would be three of float16's smallest steps.
        case = next(case for case in BY_TOKEN if case.name == "mixed-int8-by-token")
        call = make_call(case, np.float16, BACKENDS[self.backend], first_wins=True)
        assert call.error(run(call, self.backend)[0]) < call.tolerance
