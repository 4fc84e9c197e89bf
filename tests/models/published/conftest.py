"""No model here keeps states, so all are compiled with the earlier emitters."""

from collections.abc import Iterator

import pytest

from tests.quick import earlier_emitters


@pytest.fixture(autouse=True, scope="module")
def quick_fusions_here() -> Iterator[None]:
    with earlier_emitters():
        yield
