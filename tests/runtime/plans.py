"""Step plans by hand: decode rows and prefill chunks, with numbers that tell every field of every row apart."""

from collections.abc import Sequence

import numpy as np

from jaxvllm.core.step_plan import NOT_SCORED, PageEntries, StepPlan


def make_plan(num_decode: int, chunks: Sequence[int] = (), *, first_slot: int = 0, row_tokens: int = 1) -> StepPlan:
    """`num_decode` decode rows, then a prefill row for each length in `chunks`, in slots from `first_slot` on."""
    count = num_decode + len(chunks)
    numbers = np.arange(count, dtype=np.int32)
    lengths = np.asarray([1] * num_decode + list(chunks), np.int32)
    return StepPlan(
        slots=first_slot + numbers[::-1],
        epochs=100 + numbers,
        starts=200 + numbers,
        lengths=lengths,
        new_pages=(PageEntries(numbers[:num_decode], 600 + numbers[:num_decode], 300 + numbers[:num_decode]),),
        max_new=(numbers % 3 != 1).astype(np.int32),
        num_decode=num_decode,
        token_ids=400 + np.arange(sum(chunks), dtype=np.int32),
        next_tokens=np.where((numbers >= num_decode) & (numbers % 2 == 0), 500 + numbers, NOT_SCORED).astype(np.int32),
        wants_logprobs=False,
        has_logit_rules=False,
        row_tokens=row_tokens,
    )
