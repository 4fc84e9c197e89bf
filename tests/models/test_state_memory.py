"""States in pages: the gated delta rule in NumPy, and rows that find, leave and take back their states."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.models.gated_delta import GatedDeltaRule
from jaxvllm.models.state_memory import Columns, StateMemory
from pallas_kernels.ragged_paged_attention import RaggedRows

RULE = GatedDeltaRule(values_per_key=2, key_size=6, value_size=5, conv_size=4)
HEADS, PAGE_SIZE, NUM_PAGES, PLACE = 3, 4, 24, 1
MEMORY = StateMemory(HEADS, RULE)
# The first row begins, the second goes on in the middle of a page, the third on a new page; the fourth has no token.
STARTS, LENGTHS = (0, 6, 8, 0), (7, 3, 1, 0)


def random_tokens(count: int, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "channels": random.normal(size=(count, HEADS, RULE.channels)).astype(np.float32),
        "g": -random.exponential(size=(count, HEADS, 2)).astype(np.float32),
        "beta": random.uniform(size=(count, HEADS, 2)).astype(np.float32),
    }


CONV = np.random.default_rng(0).normal(size=(HEADS, RULE.conv_size, RULE.channels)).astype(np.float32)


def by_numpy(tokens: dict[str, np.ndarray]) -> np.ndarray:
    """What one sequence reads at each of its tokens, [T, K, r, Dv], as the papers write the rule, in float64."""
    read = np.zeros((len(tokens["g"]), HEADS, 2, RULE.value_size))
    for head in range(HEADS):
        S = np.zeros((2, RULE.key_size, RULE.value_size))
        channels = np.pad(tokens["channels"][:, head].astype(np.float64), ((3, 0), (0, 0)))
        for t in range(len(read)):
            mixed = (channels[t : t + 4] * CONV[head]).sum(0)
            mixed = mixed / (1 + np.exp(-mixed))
            q, k, v = mixed[:6], mixed[6:12], mixed[12:].reshape(2, 5)
            q, k = (x / np.sqrt(x @ x + 1e-6) for x in (q, k))
            for value in range(2):
                S[value] *= np.exp(tokens["g"][t, head, value])
                S[value] += np.outer(k, tokens["beta"][t, head, value] * (v[value] - S[value].T @ k))
                read[t, head, value] = S[value].T @ q / np.sqrt(6)
    return read


def rows_of(starts: tuple[int, ...], lengths: tuple[int, ...], num_tokens: int, first_page: int = 1) -> Columns:
    table = 1 + np.arange(len(starts) * 4, dtype=np.int32).reshape(-1, 4)
    table[0, 0] = first_page
    return Columns(
        RaggedRows.build(jnp.asarray(table), jnp.asarray(starts), jnp.asarray(lengths), num_tokens), PAGE_SIZE
    )


def packed(sequences: list[dict[str, np.ndarray]], starts: Any, lengths: Any, num_tokens: int) -> dict[str, jax.Array]:
    parts = {
        name: [one[name][start : start + count] for one, start, count in zip(sequences, starts, lengths, strict=True)]
        for name in sequences[0]
    }
    return {
        name: jnp.asarray(np.resize(np.concatenate(of), (num_tokens, *of[0].shape[1:]))) for name, of in parts.items()
    }


@pytest.fixture(scope="module")
def sequences() -> list[dict[str, np.ndarray]]:
    return [random_tokens(12, seed) for seed in range(4)]


@pytest.fixture(scope="module")
def before(sequences: list[dict[str, np.ndarray]]) -> jax.Array:
    """Pages in which the rows have got as far as `STARTS`, two tokens at a time."""
    pages = jnp.full(MEMORY.pages(2, NUM_PAGES, PAGE_SIZE, jnp.bfloat16, None).shape, jnp.nan)  # type: ignore[arg-type]
    done = [0, 0, 0, 0]
    while any(at < end for at, end in zip(done, STARTS, strict=True)):
        counts = [min(2, end - at) for at, end in zip(done, STARTS, strict=True)]
        tokens = packed(sequences, done, counts, 8)
        _, pages = MEMORY.advance(pages, PLACE, rows_of(tuple(done), tuple(counts), 8), {"conv": CONV}, tokens)
        done = [at + count for at, count in zip(done, counts, strict=True)]
    return pages


def test_rows_of_any_length_read_what_numpy_reads(sequences: Any, before: jax.Array) -> None:
    # The first column of the first row has no page, because nobody needs the state there.
    columns, tokens = rows_of(STARTS, LENGTHS, 16, first_page=0), packed(sequences, STARTS, LENGTHS, 16)
    read, pages = jax.jit(lambda *given: MEMORY.advance(given[0], PLACE, columns, {"conv": CONV}, given[1]))(
        before, tokens
    )
    first = 0
    for sequence, start, count in zip(sequences, STARTS, LENGTHS, strict=True):
        expected = by_numpy(sequence)[start : start + count]
        np.testing.assert_allclose(read[first : first + count], expected, atol=1e-5)
        first += count
    assert np.isnan(pages[1 - PLACE]).all(), "another layer's pages were written"
    # Those of the columns in which tokens were computed, and no others.
    both = zip(np.asarray(before[PLACE]), np.asarray(pages[PLACE]), strict=True)
    changed = [page for page, (was, now) in enumerate(both) if page and not np.array_equal(was, now, equal_nan=True)]
    assert changed == [2, 6, 7, 11] and not np.isnan(pages[PLACE, changed]).any()


def test_tokens_that_are_looked_at_first_leave_the_same_states(sequences: Any, before: jax.Array) -> None:
    columns, tokens = rows_of(STARTS, LENGTHS, 16), packed(sequences, STARTS, LENGTHS, 16)
    read, taken = MEMORY.look_ahead(before, PLACE, columns, {"conv": CONV}, tokens, max(LENGTHS))
    for counts in ((7, 3, 1, 0), (5, 0, 1, 0), (1, 2, 0, 0)):
        pages = MEMORY.commit(before, PLACE, columns, taken, jnp.asarray(counts))
        alone = before
        for step in range(max(counts)):
            at = [start + step if step < count else 0 for start, count in zip(STARTS, counts, strict=True)]
            lengths = tuple(int(step < count) for count in counts)
            token = {name: jnp.stack([one[name][t] for one, t in zip(sequences, at, strict=True)]) for name in tokens}
            once, alone = MEMORY.advance(alone, PLACE, rows_of(tuple(at), lengths, 4), {"conv": CONV}, token)
            for row, first in enumerate((0, 7, 10)):
                if lengths[row]:
                    np.testing.assert_array_equal(once[row], read[first + step])
        np.testing.assert_array_equal(pages[PLACE, 1:], alone[PLACE, 1:])


def test_a_page_has_the_rows_that_a_tpu_tiles() -> None:
    pages = MEMORY.pages(2, NUM_PAGES, PAGE_SIZE, jnp.bfloat16, None)  # type: ignore[arg-type]
    # 2 * 6 rows of S, and 66 numbers of channels in rows of 5.
    assert (pages.shape, pages.dtype) == ((2, NUM_PAGES, HEADS, 32, 5), jnp.float32)
    assert MEMORY.page_bytes(PAGE_SIZE, jnp.bfloat16) == HEADS * 32 * 5 * 4
    state = tuple(jnp.asarray(np.random.default_rng(1).normal(size=(HEADS, *part))) for part in RULE.parts)
    for was, now in zip(state, MEMORY.unpack(MEMORY.pack(state)), strict=True):
        np.testing.assert_array_equal(was, now)
