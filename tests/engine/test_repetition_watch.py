"""Whether rows repeat themselves is found on the host, as rarely as is enough."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxvllm.core.request import GenerationRequest, QueueKey, Request
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.core.slots import SlotTable
from jaxvllm.engine.repetition_watch import FIRST_PAUSE, LAST, SAME, RepetitionWatch, repeated_share
from jaxvllm.text.prompts import Prompt


def brute_force(tokens: list[int], last: int) -> float:
    repeated = 0
    for at in range(max(SAME, len(tokens) - last), len(tokens)):
        for earlier in range(at - 1, SAME - 1, -1):
            if tokens[earlier - SAME : earlier] == tokens[at - SAME : at]:
                repeated += tokens[earlier] == tokens[at]
                break
    return repeated / last


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(1, 20), st.sampled_from([0, 2**21 - 3]))
def test_the_share_is_what_a_search_for_the_last_equal_tokens_finds(tokens: list[int], last: int, first: int) -> None:
    ids = [first + token for token in tokens]
    assert repeated_share(np.array(ids, np.int32), last) == pytest.approx(brute_force(ids, last))


def slots_with(rows: list[np.ndarray]) -> SlotTable:
    slots = SlotTable(4, 1024)
    for number, outputs in enumerate(rows):
        asked = GenerationRequest(str(number), Prompt(None, np.array([1, 2], np.int32)), SamplingParams())
        slot = slots.occupy(Request(asked, seed=0, stop_token_ids=(), limit=1000, key=QueueKey(0, number)), 0, False)
        slots.append_tokens(np.array([slot]), outputs[None].astype(np.int32), np.array([len(outputs)], np.int32))
    return slots


LOOP, NEW = np.arange(200) % 7, np.arange(200)


@pytest.mark.parametrize(
    ("rows", "is_found"),
    [([LOOP], True), ([NEW], False), ([LOOP, LOOP, NEW], True), ([LOOP, NEW, NEW], False), ([LOOP[: LAST - 1]], False)],
    ids=["a loop", "new text", "mostly loops", "mostly new text", "too short to tell"],
)
def test_rows_are_found_that_repeat_half_of_their_tokens(rows: list[np.ndarray], is_found: bool) -> None:
    watch = RepetitionWatch()
    assert not watch.is_found(slots_with(rows), FIRST_PAUSE - 1), "it looked too early"
    assert watch.is_found(slots_with(rows), FIRST_PAUSE) == is_found


def test_it_looks_more_rarely_the_more_often_it_found_nothing() -> None:
    watch, slots = RepetitionWatch(), slots_with([NEW])
    assert not watch.is_found(slots, FIRST_PAUSE) and not watch.is_found(slots, 2 * FIRST_PAUSE)
    loops = slots_with([LOOP])
    assert not watch.is_found(loops, 4 * FIRST_PAUSE - 1)
    assert watch.is_found(loops, 4 * FIRST_PAUSE)
