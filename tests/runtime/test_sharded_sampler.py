"""The sampler on a vocabulary spread over devices: what one device would have sampled, bit for bit."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxvllm.runtime.row_blocks import by_blocks, rows_of_block
from jaxvllm.runtime.sampler import logprobs, sample
from jaxvllm.runtime.slot_fields import Rows
from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.chips import CHIPS
from sharding.axis import ALONE, ModelAxis
from sharding.mesh import MeshShape
from sharding.placement import make_mesh
from sharding.rules import MODEL
from tests.runtime.test_sampler import Row, state_of

pytestmark = pytest.mark.usefixtures("quick_programs")

ROWS = [
    Row(temperature=0.0),
    Row(temperature=0.0, min_length=99, stop_ids=(3, 17, 49)),
    Row(temperature=0.7, seed=(1, 2)),
    Row(temperature=1.3, top_k=4, seed=(3, 4), num_logprobs=3),
    Row(temperature=1.0, top_p=0.5, seed=(5, 6)),
    Row(temperature=2.0, min_p=0.1, top_k=9, top_p=0.9, min_length=99, stop_ids=(0,)),
    Row(temperature=0.0, num_logprobs=0),
    Row(temperature=0.0, allowed=(2, 33, 49)),
    Row(temperature=1.0, allowed=(1, 31, 32, 47), seed=(7, 8)),
    Row(temperature=0.0, allowed=(3, 49), min_length=99, stop_ids=(3, 17, 49)),  # a row that would be left empty
    Row(temperature=0.0, allowed_token_ids=(2, 33, 49)),
    Row(temperature=1.0, logit_bias=((1, -100.0), (2, 3.0), (33, 4.0)), seed=(9, 9)),
    Row(temperature=0.0, repetition_penalty=3.0, presence_penalty=1.0, prompt=(1, 2, 40), output=(2, 49, 49)),
    Row(temperature=1.0, frequency_penalty=-2.0, output=(2, 49, 49), seed=(1, 9)),
    Row(temperature=0.0, bad_words=((1,), (0, 2), (5, 49)), prompt=(5,)),
]
PADDING = 1e9  # what lies after the vocabulary would win if it were looked at


def on_mesh(run: Callable[..., Any], size: int, num_arguments: int) -> Callable[..., Any]:
    """`run(logits, ...)` on `size` devices, each with its share of the vocabulary."""
    everywhere = PartitionSpec()
    specs = (PartitionSpec(None, MODEL), *(everywhere,) * num_arguments)
    mesh = make_mesh(MeshShape(1, size), jax.devices())
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=everywhere, check_vma=False))


def both(logits: jax.Array, params: Any, positions: jax.Array, vocab_size: int, axis: ModelAxis) -> Any:
    tokens = sample(logits, params, positions, vocab_size, axis)
    return tokens, logprobs(logits, tokens, params, positions, vocab_size, axis)


@cache
def program(vocab_size: int, size: int) -> Callable[..., Any]:
    """What samples on so many devices: compiled once for each number of rows."""
    if size == 1:
        return jax.jit(partial(both, vocab_size=vocab_size, axis=ALONE))
    return on_mesh(partial(both, vocab_size=vocab_size, axis=ModelAxis(size)), size, 2)


# As many greedy rows as there are of all kinds, so that they run in the same program; no mesh divides 15 rows, or one.
@pytest.mark.parametrize(
    ("vocab_size", "size", "rows"),
    [
        pytest.param(
            vocab_size, size, rows, id=f"{vocab_size}-{size}-{name}", marks=[] if size == 2 else pytest.mark.slow
        )
        for vocab_size, size in ((50, 8), (50, 2), (3, 4))
        for name, rows in {"mixed": ROWS, "one": ROWS[:1], "greedy": [Row(temperature=0.0)] * len(ROWS)}.items()
        if size == 8 or name != "one"
    ],
)
def test_as_on_one_device(vocab_size: int, size: int, rows: list[Row]) -> None:
    random = np.random.default_rng(vocab_size)
    logits = random.standard_normal((len(rows), vocab_size)).astype(np.float32) * 3
    logits[:, 1] = logits.max(axis=1)  # a tie: the first token wins, on whichever device it is
    padded = np.pad(logits, ((0, 0), (0, -vocab_size % size)), constant_values=PADDING)
    params, positions = state_of(rows), np.arange(len(rows), dtype=np.int32)

    expected = program(vocab_size, 1)(logits, params, positions)
    got = program(vocab_size, size)(padded, params, positions)
    chex.assert_trees_all_equal(got, expected)
    assert np.asarray(expected[0])[0] <= 1


def test_the_best_of_nothing_but_minus_infinity_is_a_token() -> None:
    logits = np.full((2, 8), -np.inf, np.float32)
    run = on_mesh(lambda x: sample(x, state_of([Row(temperature=0.0)] * 2), jnp.zeros(2, int), 6, ModelAxis(4)), 4, 0)
    assert np.asarray(run(logits)).tolist() == [0, 0]


def test_in_blocks_as_all_at_once() -> None:
    vocab_size, size = 50, 8
    logits = np.random.default_rng(7).standard_normal((len(ROWS), vocab_size)).astype(np.float32) * 3
    padded = np.pad(logits, ((0, 0), (0, -vocab_size % size)), constant_values=PADDING)
    params, positions = state_of(ROWS), np.arange(len(ROWS), dtype=np.int32)

    def by_fours(logits: jax.Array, params: Rows, positions: jax.Array) -> Any:
        return by_blocks(partial(both, vocab_size=vocab_size, axis=ModelAxis(size)), logits, params, positions, 4)

    tokens, best = program(vocab_size, size)(padded, params, positions)
    in_blocks, best_in_blocks = on_mesh(by_fours, size, 2)(padded, params, positions)
    np.testing.assert_array_equal(in_blocks, tokens)
    wanted = np.array([row.num_logprobs >= 0 for row in ROWS])
    chex.assert_trees_all_equal(*(jax.tree.map(lambda x: x[wanted], one) for one in (best_in_blocks, best)))


def test_only_a_tpu_samples_in_blocks() -> None:
    tpu, gpu = (Backend.of_chip(CHIPS[name]) for name in ("v6e", "h200"))
    # 62,080 of 248,320 tokens are on each of four devices: 16 MiB are 67 rows, and each device samples whole tiles.
    assert rows_of_block(62_080, 4, tpu) == 64
    assert rows_of_block(248_320, 1, tpu) == 16
    assert rows_of_block(10**7, 4, tpu) == 32
    assert rows_of_block(62_080, 4, gpu) is rows_of_block(62_080, 4, REFERENCE) is None
