"""Versions of weights: what names pages, and which tokens are whose."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxvllm.core.weight_version import (
    WeightStarts,
    WeightVersion,
    WeightVersionSpan,
    begin_version,
    check_kv_change,
    version_spans,
)

PAGE = bytes(range(32))


def test_pages_have_the_same_name_in_engines_of_the_same_weights_alone() -> None:
    first = WeightVersion()
    assert (first.name, first.mark(PAGE)) == ("default", PAGE)
    assert first.after("a").mark(PAGE) == first.after(None).after("b").after("a").mark(PAGE)
    versions = [first, first.after("a"), first.after("a").after("a"), first.after("b"), first.after("default")]
    versions += [first.after(None), first.after(None), first.after(None).after(None)]
    assert [version.name for version in versions[-3:]] == ["1", "1", "2"]
    names = {version.mark(PAGE) for version in versions}
    assert len(names) == len(versions) and {len(name) for name in names} == {32}
    assert [version.is_shared for version in versions] == [True] * 5 + [False] * 3


@pytest.mark.parametrize("name", ["", "x" * 257, 5])
def test_a_name_is_a_text(name: str) -> None:
    with pytest.raises(ValueError, match="version must be a text of 1 to 256 characters"):
        WeightVersion().after(name)


def test_kv_is_dropped_or_kept() -> None:
    with pytest.raises(ValueError, match="kv must be drop or keep, not 'reset'"):
        check_kv_change("reset")


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("abc")), min_size=1), st.integers(0, 5))
def test_each_token_is_of_the_version_that_began_last(steps: list[tuple[int, str]], num_lost: int) -> None:
    """Each step yields so many tokens of a version. A stop string may take the last ones away again."""
    starts: WeightStarts = []
    tokens: list[str] = []
    for count, name in steps:
        begin_version(starts, len(tokens), name)
        tokens += [name] * count
    kept = tokens[: max(len(tokens) - num_lost, 0)]
    spans = version_spans(starts, len(kept))
    assert [span.version for span in spans for _ in range(span.start, span.end)] == kept
    assert all(one.end == two.start and one.version != two.version for one, two in pairwise(spans))


def test_a_request_without_tokens_has_no_span() -> None:
    assert version_spans([(0, "a")], 0) == []
    assert version_spans([(0, "a"), (3, "b")], 3) == [WeightVersionSpan("a", 0, 3)]
