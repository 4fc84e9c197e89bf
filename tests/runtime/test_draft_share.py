"""Drafts are divided so that as many as possible are right, checked by trying every division."""

from itertools import product

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxvllm.runtime.draft_share import measured_acceptance, share_drafts
from jaxvllm.runtime.slot_fields import ACCEPTANCE

pytestmark = pytest.mark.usefixtures("quick_programs")

MOST = 3
ROWS = st.tuples(st.integers(0, MOST), st.sampled_from([0.05, 0.1, 0.2, 0.5, 0.7, 0.9, 0.95]))


def shared(rows: list[tuple[int, float]], room: int) -> list[int]:
    counts, acceptance = (jnp.asarray(column) for column in zip(*rows, strict=True))
    return share_drafts(counts, acceptance.astype(jnp.float32), jnp.int32(room), MOST).tolist()


@given(st.lists(ROWS, min_size=3, max_size=3), st.integers(0, 10))
def test_no_other_division_has_more_right_drafts(rows: list[tuple[int, float]], room: int) -> None:
    def right(division: tuple[int, ...]) -> float:
        return sum(a**place for count, (_, a) in zip(division, rows, strict=True) for place in range(1, count + 1))

    got = shared(rows, room)
    possible = [range(count + 1) for count, _ in rows]
    assert all(count in range_ for count, range_ in zip(got, possible, strict=True))
    assert sum(got) == min(room, sum(count for count, _ in rows)), "no room is left while there are drafts"
    best = max(right(one) for one in product(*possible) if sum(one) <= room)
    assert right(tuple(got)) == pytest.approx(best)


def test_a_row_that_is_always_right_or_never_has_some_of_its_first_drafts() -> None:
    assert shared([(3, 1.0), (3, 0.0)], 4) == [3, 1]
    assert shared([(3, 0.0), (0, 1.0)], 1) == [1, 0]
    assert shared([(2, 0.0), (2, 1.0)], 100) == [2, 2]


def test_acceptance_follows_what_was_right() -> None:
    """Drafts after the first wrong one say nothing, and a row without drafts is forgotten slowly."""
    drafted, accepted = jnp.array([3, 3, 3, 0]), jnp.array([3, 1, 0, 0])
    acceptance = jnp.full(4, 0.8, jnp.float32)
    for _ in range(200):
        acceptance = measured_acceptance(acceptance, drafted, accepted)
    np.testing.assert_allclose(acceptance, [1.0, 0.5, 0.0, ACCEPTANCE.default], atol=0.01)
    once = measured_acceptance(jnp.full(4, 0.8, jnp.float32), drafted, accepted)
    assert once[1] < once[3] < 0.8 < once[0]
