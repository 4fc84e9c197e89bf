"""The compilation counter counts, so that a test which asserts zero can fail."""

from collections.abc import Callable
from typing import Any


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
