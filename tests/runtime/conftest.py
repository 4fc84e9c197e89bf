"""What several files here need of jax's cache of compiled programs."""

from collections.abc import Iterator

import pytest

from tests.jax_cache import jax_cache


@pytest.fixture
def no_cache() -> Iterator[None]:
    """As in a process where nobody has chosen a cache yet."""
    with jax_cache(None):
        yield
