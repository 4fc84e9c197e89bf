"""Readouts are reports of a step about rows, beside their tokens, for the requests that want them.

Each readout is one value here, which says who wants it, and one in `jaxvllm/runtime/readouts`, which computes it. No
step does anything for readouts that none of its rows wants.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from jaxvllm.core.request import Request
from jaxvllm.core.step_plan import Ints, StepPlan, TopLogprobs

type RowFlags = NDArray[np.bool_]


@dataclass(frozen=True)
class Readout[Value]:
    """One kind of report. `Value` is what the host gets of a step."""

    name: str
    wants: Callable[[Request], bool]
    # It is read of every chunk of a prompt, of every row that yields a token, or of both.
    reads: Literal["prompts", "tokens", "all"]

    def of(self, reports: Mapping[str, Any]) -> Value | None:
        """Returns this readout's value among the `reports` of a step, or None if no row wanted it."""
        value: Value | None = reports.get(self.name)
        return value


# The values of all tokens f32[V], before one is sampled, by the number of the row.
DISTRIBUTIONS = Readout[Mapping[int, NDArray[np.float32]]](
    "distributions", lambda request: request.sampling_params.wants_distributions, reads="tokens"
)
# The log-probabilities of the tokens of prompts, and of the best ones: of few, or of more than MAX_LOGPROBS. Tokens are
# numbered over all rows that want the same.
SCORES = Readout[TopLogprobs]("scores", lambda request: request.wants_few_scores, reads="prompts")
WIDE_SCORES = Readout[TopLogprobs]("wide_scores", lambda request: request.wants_wide_scores, reads="prompts")
# The hidden states of a chunk as one vector f32[E], by the number of the row: the last one, or the sum of all.
POOLED = Readout[Mapping[int, NDArray[np.float32]]]("pooled", lambda request: request.is_pooled, reads="prompts")

# The experts that the tokens of a step have chosen, [T, layers, k].
ROUTED = Readout[NDArray[np.unsignedinteger[Any]]]("routed", lambda request: request.tells_experts, reads="all")

READOUTS: tuple[Readout[Any], ...] = (DISTRIBUTIONS, SCORES, WIDE_SCORES, POOLED, ROUTED)


def scored_tokens(plan: StepPlan, readout: Readout[TopLogprobs]) -> Ints:
    """Returns i32[2, N]: the numbers of the tokens that want SCORES, or WIDE_SCORES, and the tokens after them."""
    following = np.zeros(plan.num_tokens, np.int32)
    following[plan.num_decode : -1] = plan.token_ids[1:]
    following[np.cumsum(plan.lengths) - 1] = np.maximum(plan.next_tokens, 0)
    tokens = np.flatnonzero(np.repeat(plan.readouts[readout.name], plan.lengths)).astype(np.int32)
    return np.stack([tokens, following[tokens]])
