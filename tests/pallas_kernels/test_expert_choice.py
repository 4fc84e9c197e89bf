"""What comes before products of experts: the largest numbers of rows, and rows in the order of their groups."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.grouped_matmul import order_rows, top_k
from tests.pallas_kernels.cpu_chips import CPU_CHIPS

LANES = sorted(CPU_CHIPS)
BACKENDS = {lanes: Backend("cpu", chip) for lanes, chip in CPU_CHIPS.items()}
# Numbers that tie, both zeros, infinities, the smallest ones, and NaN of both signs, the last of which has all bits.
NUMBERS = np.asarray([1, 1, 2, -2, 0.5, 0, 0, -0.0, np.inf, -np.inf, 1e-45, -1e-45, np.nan, -np.nan, 0], np.float32)
NUMBERS[-1:] = np.frombuffer(b"\xff" * 4, np.float32)
# Rows of less than a vector, of one, and of several; more rows than an item has.
SHAPES = ((3, 5, 2), (2, 16, 16), (70, 41, 6))


@cache
def largest(lanes: int, k: int) -> Any:
    return jax.jit(lambda x: top_k(x, k, BACKENDS[lanes]))


@cache
def expected(k: int) -> Any:
    return jax.jit(lambda x: jax.lax.top_k(x, k))


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_the_largest_are_those_of_xla(lanes: int, shape: tuple[int, int, int], data: st.DataObject) -> None:
    num_rows, size, k = shape
    seed = data.draw(st.integers(0, 2**32 - 1))
    few = data.draw(st.lists(st.integers(0, len(NUMBERS) - 1), min_size=1, max_size=size))
    x = NUMBERS[np.random.default_rng(seed).choice(few, (num_rows, size))]
    values, places = largest(lanes, k)(x)
    wanted_values, wanted_places = expected(k)(x)
    np.testing.assert_array_equal(places, wanted_places)
    np.testing.assert_array_equal(np.asarray(values).view(np.uint32), np.asarray(wanted_values).view(np.uint32))


@pytest.mark.parametrize("lanes", LANES)
@settings(max_examples=25, deadline=None)
@given(groups=st.lists(st.integers(0, 6), min_size=40, max_size=40))
def test_rows_are_ordered_as_by_a_stable_sort(lanes: int, groups: list[int]) -> None:
    ordered = ordering(lanes)(jnp.asarray(groups, jnp.int32))
    np.testing.assert_array_equal(ordered.rows, np.argsort(groups, kind="stable"))
    np.testing.assert_array_equal(np.asarray(ordered.rows)[np.asarray(ordered.places)], np.arange(40))
    np.testing.assert_array_equal(ordered.starts, np.searchsorted(np.sort(groups), np.arange(7)))


@cache
def ordering(lanes: int) -> Any:
    return jax.jit(lambda groups: order_rows(groups, 6, BACKENDS[lanes] if lanes else REFERENCE))


def test_plain_xla_orders_rows_alike() -> None:
    groups = jnp.asarray([3, 6, 0, 3, 6, 1, 0, 3], jnp.int32)
    for ours, plain in zip(ordering(LANES[-1])(groups), ordering(0)(groups), strict=True):
        np.testing.assert_array_equal(ours, plain)
