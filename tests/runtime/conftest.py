"""What several files here need of jax's cache of compiled programs."""

from collections.abc import Iterator

import pytest

from tests.jax_cache import jax_cache
from tests.quick import earlier_emitters, quick_compilation


@pytest.fixture
def no_cache() -> Iterator[None]:
    """As in a process where nobody has chosen a cache yet."""
    with jax_cache(None):
        yield


@pytest.fixture(scope="module")
def quick_programs() -> Iterator[None]:
    """For modules that ask for it: what is compiled there runs once or not at all."""
    with quick_compilation(), earlier_emitters():
        yield


@pytest.fixture(scope="module")
def long_running() -> Iterator[None]:
    """For modules that compute so much that -O0 would take longer."""
    with earlier_emitters():
        yield
