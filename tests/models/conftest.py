"""What all files here share."""

from collections.abc import Iterator

import jax
import numpy as np
import pytest
from jax.typing import DTypeLike

from jaxvllm.models import shards
from jaxvllm.models.declaration import ParamDecl
from tests.quick import earlier_emitters, quick_compilation


def _zeros_on(decl: ParamDecl, dtype: DTypeLike, sharding_of: shards.ShardingOf) -> jax.Array:
    return jax.device_put(np.zeros(decl.shape, decl.dtype_in(dtype)), sharding_of(decl))


@pytest.fixture(autouse=True, scope="module")
def quick_programs() -> Iterator[None]:
    """Zeros come from the host: a program for each shape of a stack takes 25 ms of the CPU to compile."""
    with quick_compilation(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "zeros_on", _zeros_on)
        yield


@pytest.fixture(scope="module")
def quick_fusions() -> Iterator[None]:
    """For modules whose models keep no states: programs take a third less of the CPU."""
    with earlier_emitters():
        yield
