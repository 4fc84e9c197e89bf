"""Pages of a small cache, and what they hold."""

import numpy as np
import pytest

from jaxvllm.kv_transfer.page_format import Page, PageArray, PageFormat

NAME = bytes(range(32))  # of a page


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def form() -> PageFormat:
    """Two groups, of which the second has float16 and each head twice."""
    full = PageArray(2, 3, 4, 8, np.dtype(np.float32))
    return PageFormat("a model", (full, PageArray(1, 2, 4, 8, np.dtype(np.float16), copies=2)))


def some_page(form: PageFormat, number: int, *, windowed: bool = False) -> Page:
    """A page that differs from those of other numbers. With `windowed`, it has nothing of the second group."""
    rng = np.random.default_rng(number)
    arrays = [rng.normal(size=of.shape).astype(of.dtype) for of in form.arrays]
    return Page((*arrays[:-1], None if windowed else arrays[-1]))


def assert_same(page: Page, other: Page) -> None:
    for one, two in zip(page.arrays, other.arrays, strict=True):
        assert (one is None) == (two is None)
        if one is not None and two is not None:
            np.testing.assert_array_equal(one, two)
            assert one.dtype == two.dtype
