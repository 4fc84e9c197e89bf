"""What the n-gram proposer guesses is what a search of the row's tokens in plain Python finds."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxvllm.runtime.proposers.ngram import NgramProposer
from jaxvllm.runtime.slot_fields import HISTORY

pytestmark = pytest.mark.usefixtures("quick_programs")

WIDTH = 24  # tokens that a slot has room for
# Each is a compilation.
PROPOSERS = [(NgramProposer(1, 1), 3), (NgramProposer(1, 4), 5), (NgramProposer(2, 3), 1), (NgramProposer(3, 5), 15)]


def expected(tokens: list[int], proposer: NgramProposer, num_drafts: int) -> list[int]:
    """Tries every length, the longest first, and every place, the last first. No drafts: no place was found."""
    end = len(tokens)
    for length in range(proposer.longest, proposer.shortest - 1, -1):
        for place in range(end - 1, length - 1, -1):
            if tokens[place - length : place] == tokens[end - length :]:
                period = end - place
                return [tokens[place + index % period] for index in range(num_drafts)]
    return []


@partial(jax.jit, static_argnames=["proposer", "num_drafts"])
def propose(
    history: jax.Array, slots: jax.Array, lengths: jax.Array, proposer: NgramProposer, num_drafts: int
) -> tuple[jax.Array, jax.Array]:
    drafts = proposer.look({HISTORY.name: history}, slots, lengths, num_drafts)
    return drafts.tokens, drafts.counts


@pytest.mark.parametrize(("proposer", "num_drafts"), PROPOSERS)
@settings(deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=WIDTH), min_size=3, max_size=3),
    behind=st.integers(0, 2),
)
@example(rows=[[0], [0, 0], [1, 2, 1, 2, 1, 2]], behind=0)
@example(rows=[[0, 1, 2, 0, 1, 0, 2, 0, 1], [2] * WIDTH, [0, 1, 2] * 8], behind=2)
def test_guesses_what_followed_the_same_tokens(
    proposer: NgramProposer, num_drafts: int, rows: list[list[int]], behind: int
) -> None:
    """`behind` is what a slot has where the tokens of its row end: an older tenant's, which must not count."""
    slots = np.array([3, 0, 2], np.int32)
    history = np.full((4, WIDTH), behind, np.int32)
    for slot, row in zip(slots, rows, strict=True):
        history[slot, : len(row)] = row
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens, counts = propose(jnp.asarray(history), slots, lengths, proposer, num_drafts)
    assert tokens.shape == (3, num_drafts)
    got = [list(map(int, row[:count])) for row, count in zip(tokens, counts, strict=True)]
    assert got == [expected(row, proposer, num_drafts) for row in rows]


def test_the_longest_repetition_comes_first_and_then_the_last_place() -> None:
    proposer = NgramProposer(1, 3)
    assert expected([7, 8, 9, 1, 5, 9, 2, 7, 8, 9], proposer, 2) == [1, 5], "three tokens count more than one, nearer"
    assert expected([9, 1, 5, 9, 2, 6, 9], proposer, 2) == [2, 6]
    assert expected([4, 5, 4, 5], proposer, 5) == [4, 5, 4, 5, 4], "a loop is taken to go on"
    assert expected([1, 2, 3], proposer, 3) == []


@pytest.mark.parametrize(("shortest", "longest"), [(0, 3), (4, 3), (-1, -1)])
def test_a_proposer_that_cannot_be(shortest: int, longest: int) -> None:
    with pytest.raises(ValueError, match="prompt_lookup_min must be from 1 to prompt_lookup_max"):
        NgramProposer(shortest, longest)
