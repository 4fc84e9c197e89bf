"""Forks on the device change the slots and pages that they name, and nothing else."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.core.step_plan import Fork, PageCopy
from jaxvllm.runtime.forks import FORK_BATCH, fork_slots, pack_forks
from jaxvllm.runtime.slot_fields import SlotSizes
from jaxvllm.runtime.state import state_shapes

pytestmark = pytest.mark.usefixtures("quick_programs")

SIZES = SlotSizes(num_slots=6, max_pages=4, page_size=2, vocab_size=40, windows=(None, 3))
jitted = jax.jit(partial(fork_slots, sizes=SIZES))


def test_forks_are_copies_with_a_page_and_a_token_of_their_own() -> None:
    random = np.random.default_rng(0)
    rows = SIZES.num_slots + 1
    state = jax.tree.map(lambda x: random.integers(1, 9, x.shape).astype(x.dtype), state_shapes(SIZES))
    state["length"][:] = random.integers(2, SIZES.max_tokens + 1, rows)
    pages = [random.normal(size=(layers, 12, 1, 2, 4)).astype(np.float32) for layers in (2, 3)]
    forks = [
        Fork(2, 4, 31, (PageCopy(1, 5, 7), PageCopy(1, 3, 4))),
        Fork(2, 2, 30, (None, None)),
        Fork(0, 5, 32, (PageCopy(3, 6, 8), None)),
    ]
    expected, copied = jax.tree.map(np.copy, state), [of_group.copy() for of_group in pages]
    for fork in forks:
        for new, old in zip(jax.tree.leaves(expected), jax.tree.leaves(state), strict=True):
            new[fork.slot] = old[fork.source]
        expected["history"][fork.slot, state["length"][fork.source] - 1] = fork.token_id
        for group, copy in enumerate(fork.copies):
            if copy is not None:
                expected["page_tables"][fork.slot, group, copy.column] = copy.page
                copied[group][:, copy.page] = pages[group][:, copy.source]
    on_device = jax.tree.map(jnp.asarray, (tuple(pages), state))
    got_pages, got = jitted(*on_device, pack_forks(forks, SIZES))
    chex.assert_trees_all_equal(got, expected)
    for of_group, wanted in zip(got_pages, copied, strict=True):
        np.testing.assert_array_equal(of_group, wanted)


@pytest.mark.parametrize("count", [0, FORK_BATCH])
def test_a_batch_holds_up_to_its_size(count: int) -> None:
    packed = pack_forks([Fork(0, 0, 1, (None, None))] * count, SIZES)
    assert packed.shape == (FORK_BATCH, 9) and (packed[:, 2] == 1).sum() == count
