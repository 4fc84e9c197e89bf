"""Quick compilation for all kernels: each program here runs a few times, and most of the time is XLA's."""

from collections.abc import Iterator

import pytest

from tests.interpreters import quick_callbacks
from tests.pallas_kernels.gpu_here import INTERPRETED
from tests.quick import earlier_emitters, quick_compilation


@pytest.fixture(scope="module", autouse=True)
def quick_programs() -> Iterator[None]:
    """The programs of XLA take half less of the CPU; what Pallas or our own emitter writes is as ever."""
    if not INTERPRETED:  # a GPU's kernels are compiled as ever
        yield
        return
    with quick_compilation(), earlier_emitters(), quick_callbacks():
        yield
