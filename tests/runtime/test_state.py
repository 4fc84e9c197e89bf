"""Admissions survive the way to the device, and touch no slot but their own."""

from functools import partial
from typing import Any

import chex
import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxvllm.core.request import GenerationRequest, Prompt, QueueKey, Request
from jaxvllm.core.sampling_params import MAX_LOGPROBS, MAX_SEED, MIN_SEED, SamplingParams
from jaxvllm.core.slots import MAX_STOP_IDS, NO_TOKEN
from jaxvllm.core.step_plan import Admission
from jaxvllm.runtime.penalties import count_tokens
from jaxvllm.runtime.sampler import FILTER_RULES, LOGIT_RULES
from jaxvllm.runtime.slot_fields import Rows, SlotSizes
from jaxvllm.runtime.state import (
    ADMISSION_BATCH,
    RECALL_TOKENS,
    SLOT_FIELDS,
    DeviceState,
    admit,
    admit_rare,
    new_state,
    pack_admissions,
    pack_rare,
    pack_recalls,
    pack_recounts,
    recall,
    recount,
    state_bytes,
)

pytestmark = pytest.mark.usefixtures("quick_programs")

NUM_SLOTS, MAX_PAGES = 12, 5
SIZES = SlotSizes(NUM_SLOTS, MAX_PAGES, page_size=1024, vocab_size=70, windows=(None, 5))
jitted_admit = jax.jit(partial(admit, sizes=SIZES))
jitted_admit_rare = jax.jit(partial(admit_rare, sizes=SIZES))
jitted_recount = jax.jit(recount)


def request_of(
    params: SamplingParams, num_tokens: int = 1, seed: int = 0, stop_token_ids: tuple[int, ...] = ()
) -> Request:
    prompt = Prompt(None, np.zeros(num_tokens, np.int32))
    return Request(
        asked=GenerationRequest("r", prompt, params),
        seed=seed,
        stop_token_ids=stop_token_ids,
        limit=1000,
        key=QueueKey(0, 0),
    )


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
        repetition_penalty=draw(st.sampled_from([1.0, 1.5])),
        logit_bias=draw(st.sampled_from([None, {3: 1.0}])),
        allowed_token_ids=draw(st.sampled_from([None, [1, 2]])),
    )
    return request_of(
        params,
        num_tokens=draw(st.integers(1, 100)),
        seed=draw(st.integers(MIN_SEED, MAX_SEED)),
        stop_token_ids=tuple(draw(st.lists(st.integers(0, 2**31 - 1), max_size=MAX_STOP_IDS))),
    )


@st.composite
def admission_batches(draw: st.DrawFn) -> list[Admission]:
    slots = draw(st.lists(st.integers(0, NUM_SLOTS - 1), unique=True, max_size=ADMISSION_BATCH))
    columns = st.integers(1, MAX_PAGES)
    pages = columns.flatmap(lambda count: st.lists(st.integers(0, 2**31 - 1), min_size=2 * count, max_size=2 * count))
    return [Admission(slot, draw(requests()), np.asarray(draw(pages), np.int32).reshape(2, -1)) for slot in slots]


def filled() -> DeviceState:
    """A state in which no value is what a new engine has."""
    state = jax.eval_shape(partial(new_state, SIZES))
    return jax.tree.map(lambda x: np.full(x.shape, 99, x.dtype), state)


def fields_of(state: DeviceState) -> dict[str, np.ndarray]:
    rows = Rows(state, np.arange(NUM_SLOTS + 1))  # type: ignore[arg-type]
    return {field.name: np.asarray(rows[field.name]) for field in SLOT_FIELDS}


@settings(max_examples=60)
@given(admission_batches())
def test_round_trip(admissions: list[Admission]) -> None:
    before = filled()
    after: Any = jax.tree.map(np.asarray, jitted_admit(before, pack_admissions(admissions, SIZES)))
    of_slots = fields_of(after)
    for admission in admissions:
        slot, request, params = admission.slot, admission.request, admission.request.sampling_params
        got = {name: values[slot] for name, values in of_slots.items()}
        # Bit for bit: the floats cross as int32 words.
        assert got["temperature"] == np.float32(0 if params.greedy else params.temperature)
        assert got["top_p"] == np.float32(params.top_p) and got["min_p"] == np.float32(params.min_p)
        assert got["top_k"] == params.top_k
        assert int(got["seed"][0]) + (int(got["seed"][1]) << 32) == request.seed % 2**64
        assert got["min_length"] == request.num_prompt_tokens + params.min_tokens
        assert got["num_logprobs"] == (-1 if params.logprobs is None else params.logprobs)
        stops = [*request.stop_token_ids, *[NO_TOKEN] * (MAX_STOP_IDS - len(request.stop_token_ids))]
        np.testing.assert_array_equal(got["stop_ids"], stops)
        late = dict.fromkeys(request.stop_token_ids)  # without the EOS that requests of an engine have
        np.testing.assert_array_equal(got["late_ids"], [*late, *[NO_TOKEN] * (MAX_STOP_IDS - len(late))])
        # The pages of the slot's former tenant are gone.
        pages = [[*row, *[0] * (MAX_PAGES - len(row))] for row in admission.pages]
        np.testing.assert_array_equal(got["page_tables"], pages)
        assert (got["length"], got["limit"], got["is_masked"]) == (0, request.limit, 0)
    untouched = np.delete(np.arange(NUM_SLOTS + 1), [admission.slot for admission in admissions])
    chex.assert_trees_all_equal(*(jax.tree.map(lambda x: x[untouched], state) for state in (before, after)))
    for name in ("history", "mask"):  # of which an admission brings nothing
        np.testing.assert_array_equal(after[name], before[name])


@settings(max_examples=60)
@given(requests())
@example(request_of(SamplingParams(temperature=0.5)))
@example(request_of(SamplingParams(temperature=0, top_k=3)))
@example(request_of(SamplingParams(top_p=0.5)))
@example(request_of(SamplingParams(min_p=0.5)))
@example(request_of(SamplingParams(min_tokens=1)))
@example(request_of(SamplingParams(frequency_penalty=0.5)))
@example(request_of(SamplingParams(presence_penalty=0.5)))
def test_a_request_without_logit_rules_asks_for_none(request_: Request) -> None:
    admission = Admission(1, request_, np.ones((2, 1), np.int32))
    state = jitted_admit(new_state(SIZES), pack_admissions([admission], SIZES))
    filters = () if request_.sampling_params.greedy else FILTER_RULES  # a greedy row is not filtered
    rows, positions = Rows(state, np.array([1])), np.array([request_.num_prompt_tokens])
    asks = any(bool(rule.asks(rows, positions)[0]) for rule in (*LOGIT_RULES, *filters))
    assert asks == request_.sampling_params.has_logit_rules


def test_the_trash_slot_stays_plain() -> None:
    # Padding rows have its parameters: were it to want log-probabilities or top_p, every padded step would pay.
    new = new_state(SIZES)
    assert len(new["length"]) - 1 == SIZES.trash_slot == NUM_SLOTS
    trash = {name: values[-1] for name, values in fields_of(new).items()}
    for field in SLOT_FIELDS:
        np.testing.assert_array_equal(trash[field.name], field.default, field.name)
    after = jitted_admit(new, pack_admissions((), SIZES))
    chex.assert_trees_all_equal(new, after)


def test_every_sampling_parameter_reaches_the_device() -> None:
    admission = admitted(repetition_penalty=2.0)
    before = filled()
    state = jitted_admit(before, pack_admissions([admission], SIZES))
    state = jitted_admit_rare(state, pack_rare(admission, SIZES))
    old, new = fields_of(before), fields_of(state)
    for field in SLOT_FIELDS:
        filled_in = field.is_rare or field.fill is not None
        assert not filled_in or not np.any(new[field.name][3] == old[field.name][3]), field.name


def example(**params: Any) -> Request:
    asked = GenerationRequest("r", Prompt(None, np.zeros(4, np.int32)), SamplingParams(**params))
    return Request(asked, -2, (7,), 100, QueueKey(0, 0))


def admitted(**params: Any) -> Admission:
    return Admission(3, example(**params), np.ones((2, 1), np.int32))


def rare_fields(state: DeviceState) -> dict[str, np.ndarray]:
    return {field.name: fields_of(state)[field.name][3] for field in SLOT_FIELDS if field.is_rare}


def test_a_request_that_asks_for_nothing_rare_sends_nothing_rare() -> None:
    assert pack_rare(admitted(temperature=0.5, logprobs=3, stop_token_ids=[3]), SIZES) is None


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (dict(repetition_penalty=2.0), {"prompt_tokens": [1, 0, 0], "output_counts": 0, "allowed": 0}),
        (dict(frequency_penalty=1.0, allowed_token_ids=[3, 69]), {"prompt_tokens": [1, 0, 0], "allowed": [8, 0, 32]}),
        (dict(allowed_token_ids=[3, 69]), {"prompt_tokens": 0, "biases": NO_TOKEN, "bad_words": NO_TOKEN}),
    ],
)
def test_what_is_rare_is_all_set_for_a_request_that_asks_for_some(params: Any, expected: dict[str, Any]) -> None:
    before = filled()
    after = jitted_admit_rare(before, pack_rare(admitted(**params), SIZES))
    for name, value in expected.items():
        np.testing.assert_array_equal(rare_fields(after)[name], np.broadcast_to(value, rare_fields(after)[name].shape))
    others = np.delete(np.arange(NUM_SLOTS + 1), 3)
    chex.assert_trees_all_equal(*(jax.tree.map(lambda x: np.asarray(x)[others], state) for state in (before, after)))


def test_biases_and_bad_words_cross() -> None:
    admission = admitted(logit_bias={5: 1.5, 2: -3})
    admission.request.bad_word_ids = ((7, 8, 9), (4,))
    got = rare_fields(jitted_admit_rare(filled(), pack_rare(admission, SIZES)))
    np.testing.assert_array_equal(got["biases"][0, :3], [2, 5, NO_TOKEN])
    np.testing.assert_array_equal(got["biases"][1, :2].view(np.float32), [-3, 1.5])
    np.testing.assert_array_equal(got["bad_words"][:, :5], [[7, 8, 9, 4, -1], [0, 0, 0, 3, -1], [2, 2, 2, 3, -1]])


@pytest.mark.parametrize("count", [0, 3, RECALL_TOKENS + 5, 2 * 32767])
def test_a_preempted_request_brings_its_counts(count: int) -> None:
    admission = admitted(presence_penalty=1.0)
    outputs = np.random.default_rng(count).integers(0, 70, count).astype(np.int32)
    outputs[: count // 2 + 1] = 11
    admission.request.output_token_ids = outputs
    state = jitted_admit_rare(filled(), pack_rare(admission, SIZES))
    calls = pack_recounts(admission)
    assert len(calls) == -(-count // RECALL_TOKENS)
    for packed in calls:
        state = jitted_recount(state, packed)
    expected = np.minimum(np.bincount(outputs, minlength=70), 32767)
    np.testing.assert_array_equal(rare_fields(state)["output_counts"], expected)
    free = admitted()
    free.request.output_token_ids = outputs
    assert pack_recounts(free) == []


def test_sampled_tokens_are_counted_for_those_who_ask_up_to_what_fits() -> None:
    state = jax.tree.map(lambda x: x, new_state(SIZES))
    counts = np.zeros((NUM_SLOTS + 1, 70), np.int16)
    counts[2, 7] = 32767
    state |= {"output_counts": counts, "presence_penalty": np.asarray([0, 1, 1, *[0] * 10], np.float32)}
    slots = np.asarray([0, 1, 2, NUM_SLOTS])
    tokens = np.asarray([[7, 7, 7, 3], [7, 5, 7, 3], [7, 5, 7, 3], [7, 7, 7, 3]])
    after = jax.jit(count_tokens)(state, slots, tokens, np.asarray([4, 3, 4, 4]))
    counts[1, 7], counts[1, 5], counts[2, 5], counts[2, 3] = 2, 1, 1, 1
    np.testing.assert_array_equal(after["output_counts"], counts)


def test_a_negative_seed_is_its_two_s_complement() -> None:
    packed = pack_admissions([Admission(0, example(), np.ones((2, 1), np.int32))], SIZES)
    seed = fields_of(jitted_admit(filled(), packed))["seed"][0]
    assert seed.tolist() == [2**32 - 2, 2**32 - 1]


def test_more_than_a_batch_is_our_bug() -> None:
    admissions = [Admission(0, example(), np.ones((2, 1), np.int32))] * (ADMISSION_BATCH + 1)
    with pytest.raises(AssertionError):
        pack_admissions(admissions, SIZES)


@pytest.mark.parametrize("num_cached", [0, 1, RECALL_TOKENS, RECALL_TOKENS + 3])
def test_a_cached_prefix_is_recalled(num_cached: int) -> None:
    tokens = np.arange(7, 7 + RECALL_TOKENS + 10, dtype=np.int32)
    asked = GenerationRequest("r", Prompt(None, tokens), SamplingParams())
    request = Request(asked, 0, (), 10_000, QueueKey(0, 0))
    before = filled()
    after = before
    for packed in pack_recalls(Admission(3, request, np.ones((2, 1), np.int32), num_cached)):
        after = jax.jit(recall)(after, packed)
    history = np.asarray(after["history"])
    np.testing.assert_array_equal(history[3, :num_cached], tokens[:num_cached])
    assert (history[3, num_cached:] == 99).all() and (np.delete(history, 3, axis=0) == 99).all()


def test_the_bytes_of_the_state_are_counted() -> None:
    assert state_bytes(SIZES) == sum(leaf.nbytes for leaf in jax.tree.leaves(new_state(SIZES)))
