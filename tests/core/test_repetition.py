"""Where an output repeats itself, against the definition."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxvllm.core.errors import ParameterError
from jaxvllm.core.repetition import RepetitionDetector
from jaxvllm.core.sampling_params import RepetitionDetectionParams


def ends_with_repetition(tokens: list[int], params: RepetitionDetectionParams) -> bool:
    """Whether the last tokens are `min_count` times one pattern, by comparing all of them."""
    for size in range(max(params.min_pattern_size, 1), params.max_pattern_size + 1):
        if size * params.min_count <= len(tokens):
            if tokens[-size * params.min_count :] == tokens[-size:] * params.min_count:
                return True
    return False


@st.composite
def detections(draw: st.DrawFn) -> RepetitionDetectionParams:
    largest = draw(st.integers(0, 6))
    smallest = draw(st.integers(0, largest))
    return RepetitionDetectionParams(
        max_pattern_size=largest, min_pattern_size=smallest, min_count=draw(st.integers(2, 4))
    )


@given(
    params=detections(),
    steps=st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=12),
    min_tokens=st.integers(0, 12),
)
def test_the_first_repetition_ends_it_however_the_tokens_come(
    params: RepetitionDetectionParams, steps: list[list[int]], min_tokens: int
) -> None:
    tokens = sum(steps, [])
    ends = [
        count
        for count in range(1, len(tokens) + 1)
        if count >= min_tokens and ends_with_repetition(tokens[:count], params)
    ]
    detector = RepetitionDetector(params, max_tokens=60)
    before = 0
    for step in steps:
        end = detector.first_end(step, min_tokens)
        if end is not None:
            assert before + end == ends[0]
            return
        before += len(step)
    assert not ends


def test_patterns_for_which_there_is_no_room_cost_nothing() -> None:
    detector = RepetitionDetector(RepetitionDetectionParams(max_pattern_size=2**31 - 1, min_count=3), max_tokens=12)
    assert len(detector._sizes) == 4
    assert detector.first_end([1, 2, 3, 4] * 3, 0) == 12


def test_what_detects_nothing_is_refused_or_off() -> None:
    assert RepetitionDetector(RepetitionDetectionParams(), max_tokens=8).first_end([1] * 8, 0) is None
    with pytest.raises(ParameterError, match="min_count must be at least 2"):
        RepetitionDetectionParams(max_pattern_size=3, min_count=1)
