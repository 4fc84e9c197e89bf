"""A step is cut only where the cut is quicker, and always computes something."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxvllm.core.step_sizes import StepSizes

POWERS = tuple((tokens, rows) for tokens in (16, 32, 64, 128, 256, 512) for rows in (8, tokens // 2))


def seconds(sizes: StepSizes, num_tokens: int, num_rows: int) -> int:
    """What a step costs, in tokens."""
    return sizes.overhead + min(tokens for tokens, rows in sizes.sizes if tokens >= num_tokens and rows >= num_rows)


@pytest.mark.parametrize(
    ("num_decode", "num_prompt", "overhead", "computed"),
    [
        (0, 300, 5, 256),  # 256 + 64 are less than 512
        (10, 300, 5, 246),
        (0, 300, 200, 300),  # where any step costs as much as 200 tokens, 512 are the least
        (0, 500, 5, 500),  # 256 + 256 are no less than 512
        (0, 256, 5, 256),  # fills its size
        (0, 12, 5, 12),  # there is no smaller size
        (40, 90, 5, 88),  # the rows decode again in the second step, which is no waste
    ],
)
def test_what_is_computed(num_decode: int, num_prompt: int, overhead: int, computed: int) -> None:
    assert StepSizes(POWERS, overhead).prompt_tokens(num_decode, num_prompt, num_decode + 1) == computed


def test_a_size_that_decode_rows_fill_is_no_choice() -> None:
    assert StepSizes(((32, 8), (64, 8)), overhead=0).prompt_tokens(32, 1, 5) == 1


def test_a_size_has_room_for_the_rows() -> None:
    sizes = StepSizes(((32, 8), (64, 8), (64, 32), (128, 64)), overhead=0)
    assert sizes.prompt_tokens(0, 65, 8) == 64
    assert sizes.prompt_tokens(0, 65, 32) == 65, "the rest would need a size of 64, with which nothing is gained"
    assert sizes.prompt_tokens(40, 30, 41) == 30, "no smaller size has so many rows"


@given(
    st.lists(st.tuples(st.integers(2, 80), st.integers(1, 40)), min_size=1, max_size=6),
    st.integers(0, 30),
    st.integers(0, 40),
    st.integers(1, 60),
    st.integers(1, 10),
)
def test_a_cut_step_fills_its_size_and_saves_time(
    drawn: list[tuple[int, int]], overhead: int, num_decode: int, num_prompt: int, num_chunks: int
) -> None:
    num_rows = num_decode + min(num_chunks, num_prompt)
    sizes = StepSizes((*drawn, (200, 60)), overhead)
    computed = sizes.prompt_tokens(num_decode, num_prompt, num_rows)
    assert 1 <= computed <= num_prompt
    if computed < num_prompt:
        assert any(tokens == num_decode + computed and rows >= num_rows for tokens, rows in sizes.sizes)
        whole = seconds(sizes, num_decode + num_prompt, num_rows)
        rest = seconds(sizes, num_prompt - computed + num_decode, num_rows)
        assert seconds(sizes, num_decode + computed, num_rows) + rest - num_decode < whole


def test_where_no_size_is_known_nothing_is_cut() -> None:
    assert StepSizes((), 0).prompt_tokens(0, 9, 1) == 9


@given(st.integers(1, 500))
def test_a_rest_is_not_cut_forever(num_prompt: int) -> None:
    sizes, left, steps = StepSizes(POWERS, 5), [num_prompt], 0
    while left[-1]:
        left.append(left[-1] - sizes.prompt_tokens(0, left[-1], 1))
    steps = len(left) - 1
    assert steps <= len(POWERS) and all(b < a for a, b in pairwise(left))
