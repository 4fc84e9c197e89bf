"""Steps whose tokens states take in, for the tests of kernels: pages at random, and the order of tokens."""

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.linear_attention.cases import StateCase

LAYERS, PLACE = 2, 1
TRASH = 0


@pytest.fixture(autouse=True)
def no_races(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """The interpreter prints what it finds: races, and copies that nobody waited for."""
    yield
    printed = "".join(capfd.readouterr())
    assert "RACE DETECTED" not in printed and "non-zero count" not in printed, printed


def of_rows(case: StateCase) -> list[range]:
    """The tokens of each row."""
    counts = [count for _, count in case.rows]
    begins = np.cumsum([0, *counts[:-1]]) if case.num_tokens > len(counts) else np.arange(len(counts))
    return [range(begin, begin + count) for begin, count in zip(begins.tolist(), counts, strict=True)]


def random_pages(
    case: StateCase, shape: tuple[int, int, int], used: int, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """The page table, and pages of such a shape, of whose heads `used` numbers count.

    Pages that hold no state before the step are NaN. Some columns that no row needs later have page 0.
    """
    table = 1 + random.permutation(len(case.rows) * case.columns).astype(np.int32).reshape(-1, case.columns)
    pages = np.full((LAYERS, table.size + 1, *shape), np.nan, np.float32)
    for row, (start, count) in enumerate(case.rows):
        # As the host leaves them out: columns before the last two of those that the step computes.
        table[row, -(-start // case.page_size) : (start + count - 1) // case.page_size - 1] = TRASH
        if start > 0:
            page = pages[PLACE, table[row, (start - 1) // case.page_size]]
            page[:] = random.normal(size=page.shape)
            page.reshape(len(page), -1)[:, used:] = 0
    return table, pages


def with_padding(case: StateCase, channels: np.ndarray, dtype: str) -> np.ndarray:
    """The channels in another type, and NaN for tokens that are no row's."""
    channels = np.array(jnp.asarray(channels, dtype))
    channels[sorted(set(range(case.num_tokens)) - {token for tokens in of_rows(case) for token in tokens})] = np.nan
    return channels


def taken_in(case: StateCase, page_table: np.ndarray, pages: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yields each token and head with the state before, which is to take it in, and writes that into the pages."""
    for row, ((start, _), tokens) in enumerate(zip(case.rows, of_rows(case), strict=True)):
        before = pages[PLACE, page_table[row, max(start - 1, 0) // case.page_size]]
        state = before.copy() if start else np.zeros_like(before)
        for position, token in enumerate(tokens, start):
            for head in range(len(state)):
                yield token, head, state[head]
            pages[PLACE, page_table[row, position // case.page_size]] = state
