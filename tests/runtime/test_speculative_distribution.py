"""Tokens of steps with drafts follow the distribution that NumPy computes from the logits, whatever was guessed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.core.step_plan import PageEntries
from jaxvllm.models.families import model_spec
from jaxvllm.runtime import decoding
from jaxvllm.runtime.batch import pack
from jaxvllm.runtime.buckets import Bucket
from jaxvllm.runtime.cache_shape import CacheShape
from jaxvllm.runtime.proposers import Drafts, HistoryProposer
from jaxvllm.runtime.slot_fields import DeviceState, Rows
from jaxvllm.runtime.state import new_state
from jaxvllm.runtime.step_model import DRAFT_MARK, Computed, StepModel
from jaxvllm.runtime.token_mask import pack_bits
from pallas_kernels.backend import REFERENCE
from pallas_kernels.ragged_paged_attention import RaggedRows
from tests.models.fixture import Fixture
from tests.runtime.plans import make_plan
from tests.runtime.test_sampler import Row, kept, processed, softmax

pytestmark = pytest.mark.usefixtures("long_running")

type Decode = Callable[..., Any]

VOCAB, PROMPT, NUM_NEW = 6, (0, 3), 3
ROWS, NUM_CALLS, NUM_DRAFTS = 1024, 49, 2  # 50,176 sequences
# The model: what may follow is known by the last token.
LOGITS = np.random.default_rng(3).normal(0, 1.2, (VOCAB, VOCAB)).astype(np.float32)
SPEC = replace(model_spec(Fixture.load("llama").config), vocab_size=VOCAB)
SHAPE = CacheShape(
    num_pages=4,
    page_size=16,
    num_slots=ROWS,
    max_pages=1,
    dtype=jnp.dtype(jnp.float32),
    step_tokens=8,
    has_drafts=True,
)
MODEL = StepModel(SPEC, SHAPE, REFERENCE)
BUCKET = Bucket(ROWS * (1 + NUM_DRAFTS), ROWS, width=NUM_NEW, num_drafts=NUM_DRAFTS)
DIVIDED = replace(BUCKET, num_tokens=ROWS * 2)  # where rows divide the drafts by how many were right
OPTIONS = [
    Row(temperature=0.7),
    Row(top_p=0.8),
    Row(top_k=3),
    Row(min_p=0.25),
    Row(repetition_penalty=1.8, frequency_penalty=0.6, presence_penalty=0.5),
]
# How drafts are divided among rows depends on no option: one that looks at the output so far stands for all.
CASES = [*((BUCKET, row) for row in OPTIONS), (DIVIDED, OPTIONS[-1])]


@dataclass(frozen=True)
class _Likely(HistoryProposer):
    """Guesses for half of the slots the likeliest tokens, and for the others the second likeliest."""

    def look(self, state: DeviceState, slots: jax.Array, lengths: jax.Array, num_drafts: int) -> Drafts:
        following = jnp.asarray(np.argsort(-LOGITS, axis=1)[:, :2])
        guesses = [state["history"][slots, lengths - 1]]
        for _ in range(num_drafts):
            guesses.append(following[guesses[-1], slots % 2])
        return Drafts(jnp.stack(guesses[1:], axis=1).astype(jnp.int32), jnp.full(len(slots), num_drafts))


def exact(row: Row) -> np.ndarray:
    """f64[VOCAB, VOCAB, VOCAB]: the probability of each sequence of `NUM_NEW` tokens."""

    @cache
    def following(output: tuple[int, ...]) -> np.ndarray:
        so_far = replace(row, prompt=PROMPT, output=output)
        scaled = processed(LOGITS[(*PROMPT, *output)[-1]], so_far) / np.float32(row.temperature)
        keep, unclear = kept(scaled, so_far)
        assert not unclear
        return softmax(np.where(keep, scaled, -np.inf))

    every = np.ndindex((VOCAB,) * NUM_NEW)
    values = [np.prod([following(tokens[:at])[token] for at, token in enumerate(tokens)]) for tokens in every]
    return np.reshape(values, (VOCAB,) * NUM_NEW)


def state_of(row: Row) -> DeviceState:
    """Every slot asks for the same."""
    state = new_state(MODEL.sizes)
    penalties = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    given = {name: getattr(row, name) for name in ("temperature", "top_k", "top_p", "min_p", *penalties)}
    given |= {"limit": len(PROMPT) + NUM_NEW, "num_prompt": len(PROMPT)}
    rows = Rows(state, jnp.arange(MODEL.sizes.num_slots + 1))
    state |= {name: jnp.full_like(rows[name], value) for name, value in given.items()}
    state["prompt_tokens"] = jnp.broadcast_to(pack_bits(np.array(PROMPT, np.int32)), state["prompt_tokens"].shape)
    return state


def begun(state: DeviceState, seeds: np.ndarray) -> DeviceState:
    """`state`, in which every slot has computed its prompt, and no more."""
    history = jnp.zeros_like(state["history"]).at[:, : len(PROMPT)].set(np.array(PROMPT))
    counts = jnp.zeros_like(state["output_counts"])
    lengths = jnp.full_like(state["length"], len(PROMPT))
    return state | {"history": history, "output_counts": counts, "length": lengths, "seed": jnp.asarray(seeds)}


def _pass_tokens_on(
    params: Any, kv_pages: Any, token_ids: jax.Array, rows: RaggedRows, *rest: Any, adapters: None = None
) -> tuple[Computed, Any]:
    return Computed(rows, token_ids, token_ids, token_ids[None]), kv_pages


@pytest.fixture(scope="module")
def bucket(request: pytest.FixtureRequest) -> Bucket:
    found: Bucket = request.param
    return found


@pytest.fixture(scope="module")
def decode(bucket: Bucket) -> Iterator[Decode]:
    """`decoding.decode` of a model that looks its logits up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "compute", _pass_tokens_on)
        patch.setattr(decoding, "project_logits", lambda params, shard, tokens: jnp.asarray(LOGITS)[tokens])
        yield jax.jit(partial(decoding.decode, model=MODEL, bucket=bucket, proposer=_Likely()), donate_argnums=2)


@pytest.mark.parametrize(("bucket", "row"), CASES, ids=str, indirect=["bucket"], scope="module")
def test_sequences_come_as_often_as_they_should(row: Row, bucket: Bucket, decode: Decode) -> None:
    plan = replace(
        make_plan(ROWS, row_tokens=BUCKET.row_tokens),
        slots=np.arange(ROWS, dtype=np.int32),
        max_new=np.full(ROWS, NUM_NEW, np.int32),
        new_pages=(PageEntries(*[np.zeros(0, np.int32)] * 3),),
        num_drafts=NUM_DRAFTS,
    )
    packed = pack(plan, bucket, MODEL.sizes)
    rng = np.random.default_rng(0)
    counts: np.ndarray = np.zeros((VOCAB,) * NUM_NEW, int)
    accepted = np.zeros(NUM_DRAFTS, int)
    state = state_of(row)
    for _ in range(NUM_CALLS):
        seeds = rng.integers(0, 2**32, (ROWS + 1, 2), dtype=np.uint32)
        _, state, output = decode((), (), begun(state, seeds), packed)
        yielded = np.asarray(output.yielded)
        assert (yielded[:, 0] == NUM_NEW).all()
        np.add.at(counts, tuple(yielded[:, 1 : 1 + NUM_NEW].T % DRAFT_MARK), 1)
        accepted += yielded[:, -NUM_DRAFTS:].sum(axis=0)
    number = ROWS * NUM_CALLS
    least = 0.02 if bucket == BUCKET else 0.01  # where they are divided, few rows have two
    assert (accepted > least * number).all(), "drafts were accepted at each place"
    expected = exact(row) * number
    assert expected.sum() == pytest.approx(number)
    assert counts[expected == 0].sum() == 0
    often = expected >= 5
    cells = [*zip(counts[often], expected[often], strict=True), (counts[~often].sum(), expected[~often].sum())]
    statistic = sum((got - wanted) ** 2 / wanted for got, wanted in cells if wanted > 0)
    freedom = int(often.sum())
    # Its mean is `freedom` and its variance twice that: a right sampler exceeds four deviations once in 10,000 seeds.
    assert statistic < freedom + 4 * np.sqrt(2 * freedom), f"chi-square {statistic:.1f} with {freedom} free cells"
