"""The compilation counter counts, so that a test which asserts zero can fail. What is named as waiting exists."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.waiting_apart import WAITING


def test_counts_a_compilation_and_not_a_cached_call(compilations: Callable[[], Any]) -> None:
    import jax
    import numpy as np

    double = jax.jit(lambda x: x * 2)
    four, eight = np.zeros(4, np.float32), np.zeros(8, np.float32)
    with compilations() as first:
        double(four)
    with compilations() as again:
        double(four)
    with compilations() as other_shape:
        double(eight)
    assert (first.count, again.count, other_shape.count) == (1, 0, 1), (first.names, again.names)


def test_what_waits_is_still_there() -> None:
    """Of a file that has another name, nobody would notice that its tests no longer have a process of their own."""
    root = Path(__file__).parent.parent
    assert [name for name in WAITING if not (root / name).exists()] == []
