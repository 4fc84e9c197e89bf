"""What all files here share."""

from collections.abc import Iterator

import pytest

from tests.quick import earlier_emitters, quick_compilation


@pytest.fixture(autouse=True, scope="module")
def quick_programs() -> Iterator[None]:
    with quick_compilation():
        yield


@pytest.fixture(scope="module")
def quick_fusions() -> Iterator[None]:
    """For modules whose models keep no states: programs take a third less of the CPU."""
    with earlier_emitters():
        yield
