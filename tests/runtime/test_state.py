"""Admissions survive the way to the device, and touch no slot but their own."""

from dataclasses import fields
from functools import partial
from typing import Any

import chex
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxvllm.core.plan import Admission
from jaxvllm.core.request import QueueKey, Request
from jaxvllm.core.sampling_params import MAX_LOGPROBS, MAX_SEED, MIN_SEED, SamplingParams
from jaxvllm.core.slots import MAX_STOP_IDS, NO_TOKEN
from jaxvllm.runtime.state import ADMISSION_BATCH, DeviceState, SamplingState, admit, pack_admissions

NUM_SLOTS, MAX_PAGES = 12, 5
jitted_admit = jax.jit(admit)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    params = SamplingParams(
        temperature=draw(st.floats(0, 10)),
        top_p=draw(st.floats(0.01, 1)),
        top_k=draw(st.integers(-1, 2**31 - 1)),
        min_p=draw(st.floats(0, 1)),
        min_tokens=draw(st.integers(0, 50)),
        max_tokens=None,
        logprobs=draw(st.none() | st.integers(0, MAX_LOGPROBS)),
    )
    return Request(
        request_id="r",
        prompt_token_ids=np.zeros(draw(st.integers(1, 100)), np.int32),
        sampling_params=params,
        seed=draw(st.integers(MIN_SEED, MAX_SEED)),
        stop_token_ids=tuple(draw(st.lists(st.integers(0, 2**31 - 1), max_size=MAX_STOP_IDS))),
        limit=1000,
        key=QueueKey(0, 0),
    )


@st.composite
def admission_batches(draw: st.DrawFn) -> list[Admission]:
    slots = draw(st.lists(st.integers(0, NUM_SLOTS - 1), unique=True, max_size=ADMISSION_BATCH))
    pages = st.lists(st.integers(1, 2**31 - 1), min_size=1, max_size=MAX_PAGES)
    return [Admission(slot, draw(requests()), np.asarray(draw(pages), np.int32)) for slot in slots]


def filled() -> DeviceState:
    """A state in which no value is what a new engine has."""
    state = jax.eval_shape(partial(DeviceState.create, NUM_SLOTS, MAX_PAGES))
    return jax.tree.map(lambda x: np.full(x.shape, 99, x.dtype), state)


@settings(max_examples=60)
@given(admission_batches())
def test_round_trip(admissions: list[Admission]) -> None:
    before = filled()
    after: Any = jax.tree.map(np.asarray, jitted_admit(before, pack_admissions(admissions, NUM_SLOTS, MAX_PAGES)))
    for admission in admissions:
        slot, request, params = admission.slot, admission.request, admission.request.sampling_params
        got = after.sampling.take(slot)
        # Bit for bit: the floats cross as int32 words.
        assert got.temperature == np.float32(0 if params.greedy else params.temperature)
        assert got.top_p == np.float32(params.top_p) and got.min_p == np.float32(params.min_p)
        assert got.top_k == params.top_k
        assert int(got.seed[0]) + (int(got.seed[1]) << 32) == request.seed % 2**64
        assert got.min_length == request.num_prompt_tokens + params.min_tokens
        assert got.num_logprobs == (-1 if params.logprobs is None else params.logprobs)
        stops = [*request.stop_token_ids, *[NO_TOKEN] * (MAX_STOP_IDS - len(request.stop_token_ids))]
        np.testing.assert_array_equal(got.stop_ids, stops)
        # The pages of the slot's former tenant are gone.
        pages = [*admission.pages, *[0] * (MAX_PAGES - len(admission.pages))]
        np.testing.assert_array_equal(after.page_table[slot], pages)
    untouched = np.delete(np.arange(NUM_SLOTS + 1), [admission.slot for admission in admissions])
    chex.assert_trees_all_equal(*(jax.tree.map(lambda x: x[untouched], state) for state in (before, after)))
    np.testing.assert_array_equal(after.last_token, before.last_token)


def test_the_trash_slot_stays_plain() -> None:
    # Padding rows have its parameters: were it to want log-probabilities or top_p, every padded step would pay.
    new = DeviceState.create(NUM_SLOTS, MAX_PAGES)
    assert new.trash_slot == NUM_SLOTS
    assert (new.sampling.temperature[-1], new.sampling.top_p[-1], new.sampling.num_logprobs[-1]) == (0, 1, -1)
    after = jitted_admit(new, pack_admissions((), NUM_SLOTS, MAX_PAGES))
    chex.assert_trees_all_equal(new, after)


def test_every_sampling_parameter_reaches_the_device() -> None:
    state = jitted_admit(filled(), pack_admissions([Admission(3, example(), np.ones(1, np.int32))], NUM_SLOTS, 5))
    for field in fields(SamplingState):
        assert not np.any(np.asarray(getattr(state.sampling, field.name))[3] == 99), field.name


def example() -> Request:
    return Request("r", np.zeros(4, np.int32), SamplingParams(), -2, (7,), 100, QueueKey(0, 0))


def test_a_negative_seed_is_its_two_s_complement() -> None:
    packed = pack_admissions([Admission(0, example(), np.ones(1, np.int32))], NUM_SLOTS, MAX_PAGES)
    seed = np.asarray(jitted_admit(filled(), packed).sampling.seed)[0]
    assert seed.tolist() == [2**32 - 2, 2**32 - 1]


def test_more_than_a_batch_is_our_bug() -> None:
    admissions = [Admission(0, example(), np.ones(1, np.int32))] * (ADMISSION_BATCH + 1)
    with pytest.raises(AssertionError):
        pack_admissions(admissions, NUM_SLOTS, MAX_PAGES)
