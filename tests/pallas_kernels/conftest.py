"""Quick compilation for all kernels: each program here runs a few times, and most of the time is XLA's."""

from collections.abc import Iterator

import pytest

from tests.quick import earlier_emitters, quick_compilation


@pytest.fixture(scope="module", autouse=True)
def quick_programs() -> Iterator[None]:
    """The interpreters' programs take a fifth less of the CPU; what Pallas or our own emitter writes is as ever."""
    with quick_compilation():
        yield


@pytest.fixture(scope="module")
def quick_interpreters() -> Iterator[None]:
    """For modules that interpret kernels: their programs take another quarter less."""
    with earlier_emitters():
        yield
