"""What all files here share."""

from collections.abc import Iterator

import pytest

from tests.quick import quick_compilation


@pytest.fixture(autouse=True, scope="module")
def quick_programs() -> Iterator[None]:
    with quick_compilation():
        yield
