"""States in pages: each recurrence in NumPy, and rows that find, leave and take back their states."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.models.causal_conv import CausalConv
from jaxvllm.models.gated_delta import GatedDelta
from jaxvllm.models.kimi_delta import ChannelDelta
from jaxvllm.models.mamba import ChannelScan
from jaxvllm.models.mamba2 import SelectiveScan
from jaxvllm.models.recurrence import RecurrentRule, one_by_one
from jaxvllm.models.short_conv import WindowAlone
from jaxvllm.models.state_memory import Columns, StateMemory
from pallas_kernels.ragged_paged_attention import RaggedRows

HEADS, PAGE_SIZE, NUM_PAGES, PLACE = 3, 4, 24, 1
# The first row begins, the second goes on in the middle of a page, the third on a new page; the fourth has no token.
STARTS, LENGTHS = (0, 6, 8, 0), (7, 3, 1, 0)

type Tokens = dict[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Case:
    """A rule with weights, what may be a token, and what one head reads of tokens as the papers write the rule."""

    rule: RecurrentRule
    weights: dict[str, np.ndarray]  # [K, ..]
    shapes: dict[str, tuple[int, ...]]  # of what a token has
    by_numpy: Callable[[dict[str, np.ndarray], np.ndarray, Tokens], np.ndarray]  # of one head, in float64

    @property
    def memory(self) -> StateMemory:
        return StateMemory(HEADS, self.rule)

    def random_tokens(self, count: int, seed: int) -> Tokens:
        random = np.random.default_rng(seed)
        num_channels = 9 if self.rule.conv is None else self.rule.conv.channels
        channels = random.normal(size=(count, HEADS, num_channels))
        rest = {name: random.uniform(0.1, 1, size=(count, HEADS, *shape)) for name, shape in self.shapes.items()}
        rest = {name: -x if name == "g" else x for name, x in rest.items()}  # a logarithm of what is left
        return {name: x.astype(np.float32) for name, x in {"channels": channels, **rest}.items()}

    def expected(self, tokens: Tokens) -> np.ndarray:
        """What one sequence reads at each of its tokens, [T, K, ..]."""
        read = []
        for head in range(HEADS):
            weights = {name: x[head].astype(np.float64) for name, x in self.weights.items()}
            mixed = mixed_by_numpy(self.rule.conv, weights, tokens["channels"][:, head].astype(np.float64))
            read.append(self.by_numpy(weights, mixed, {name: x[:, head] for name, x in tokens.items()}))
        return np.stack(read, axis=1)


def mixed_by_numpy(conv: CausalConv | None, weights: Tokens, channels: np.ndarray) -> np.ndarray:
    if conv is None:
        return channels
    seen = np.lib.stride_tricks.sliding_window_view(np.pad(channels, ((conv.size - 1, 0), (0, 0))), conv.size, axis=0)
    mixed = np.einsum("tcs,sc->tc", seen, weights["taps"]) + weights.get("bias", 0)
    return mixed / (1 + np.exp(-mixed)) if conv.has_activation else mixed


def delta_by_numpy(weights: Tokens, mixed: np.ndarray, tokens: Tokens) -> np.ndarray:
    S, read = np.zeros((2, 6, 5)), np.zeros((len(mixed), 2, 5))
    for t in range(len(mixed)):
        q, k, v = mixed[t, :6], mixed[t, 6:12], mixed[t, 12:].reshape(2, 5)
        q, k = (x / np.sqrt(x @ x + 1e-6) for x in (q, k))
        for value in range(2):
            S[value] *= np.exp(tokens["g"][t, value])
            S[value] += np.outer(k, tokens["beta"][t, value] * (v[value] - S[value].T @ k))
            read[t, value] = S[value].T @ q / np.sqrt(6)
    return read


def channel_delta_by_numpy(weights: Tokens, mixed: np.ndarray, tokens: Tokens) -> np.ndarray:
    S, read = np.zeros((6, 6)), np.zeros((len(mixed), 6))
    for t in range(len(mixed)):
        q, k, v = mixed[t].reshape(3, 6)
        q, k = (x / np.sqrt(x @ x + 1e-6) for x in (q, k))
        S = np.diag(np.exp(tokens["g"][t])) @ S
        S = S + np.outer(k, tokens["beta"][t] * (v - S.T @ k))
        read[t] = S.T @ q / np.sqrt(6)
    return read


def scan_by_numpy(weights: Tokens, mixed: np.ndarray, tokens: Tokens) -> np.ndarray:
    h, read = np.zeros((3, 4, 7)), np.zeros((len(mixed), 3, 4))
    for t in range(len(mixed)):
        x, b, c = mixed[t, :12].reshape(3, 4), mixed[t, 12:19], mixed[t, 19:]
        for head in range(3):
            h[head] *= np.exp(tokens["g"][t, head])
            h[head] += tokens["dt"][t, head] * np.outer(x[head], b)
            read[t, head] = h[head] @ c + weights["skip"][head] * x[head]
    return read


def channels_by_numpy(weights: Tokens, mixed: np.ndarray, tokens: Tokens) -> np.ndarray:
    h, read = np.zeros((9, 4)), np.zeros((len(mixed), 9))
    for t, x in enumerate(mixed):
        for i in range(9):
            dt = tokens["dt"][t, i]
            h[i] = np.exp(dt * weights["pace"][:, i]) * h[i] + dt * x[i] * tokens["b"][t]
            read[t, i] = tokens["c"][t] @ h[i] + weights["skip"][i] * x[i]
    return read


def random_weights(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {name: random.normal(size=(HEADS, *shape)).astype(np.float32) for name, shape in shapes.items()}


CASES = {
    "gated delta": Case(
        RecurrentRule(CausalConv(22, 4), GatedDelta(values_per_key=2, key_size=6, value_size=5)),
        random_weights(taps=(4, 22)),
        {"g": (2,), "beta": (2,)},
        delta_by_numpy,
    ),
    "Kimi delta": Case(
        RecurrentRule(CausalConv(18, 4), ChannelDelta(size=6)),
        random_weights(taps=(4, 18)),
        {"g": (6,), "beta": ()},
        channel_delta_by_numpy,
    ),
    "Mamba-2": Case(
        RecurrentRule(CausalConv(26, 4, has_bias=True), SelectiveScan(num_heads=3, head_size=4, state_size=7)),
        random_weights(taps=(4, 26), bias=(26,), skip=(3,)),
        {"g": (3,), "dt": (3,)},
        scan_by_numpy,
    ),
    "Mamba": Case(
        RecurrentRule(None, ChannelScan(num_channels=9, state_size=4)),
        {"pace": -np.abs(random_weights(pace=(4, 9))["pace"]), **random_weights(skip=(9,))},
        {"dt": (9,), "b": (4,), "c": (4,)},
        channels_by_numpy,
    ),
    "short convolution": Case(
        RecurrentRule(CausalConv(10, 3, has_bias=True, has_activation=False), WindowAlone()),
        random_weights(taps=(3, 10), bias=(10,)),
        {},
        lambda weights, mixed, tokens: mixed,
    ),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def rows_of(starts: tuple[int, ...], lengths: tuple[int, ...], num_tokens: int, first_page: int = 1) -> RaggedRows:
    table = 1 + np.arange(len(starts) * 4, dtype=np.int32).reshape(-1, 4)
    table[0, 0] = first_page
    return RaggedRows.build(jnp.asarray(table), jnp.asarray(starts), jnp.asarray(lengths), num_tokens)


@partial(jax.jit, static_argnums=0)
def advance(case: Case, pages: jax.Array, rows: RaggedRows, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
    return case.memory.advance(pages, PLACE, Columns(rows, PAGE_SIZE), case.weights, tokens)


@partial(jax.jit, static_argnums=0)
def look_ahead(case: Case, pages: jax.Array, rows: RaggedRows, tokens: Tokens) -> Any:
    return case.memory.look_ahead(pages, PLACE, Columns(rows, PAGE_SIZE), case.weights, tokens, max(LENGTHS))


@partial(jax.jit, static_argnums=0)
def commit(case: Case, pages: jax.Array, rows: RaggedRows, taken: Any, counts: jax.Array) -> jax.Array:
    return case.memory.commit(pages, PLACE, Columns(rows, PAGE_SIZE), taken, counts)


def packed(sequences: list[dict[str, np.ndarray]], starts: Any, lengths: Any, num_tokens: int) -> dict[str, jax.Array]:
    parts = {
        name: [one[name][start : start + count] for one, start, count in zip(sequences, starts, lengths, strict=True)]
        for name in sequences[0]
    }
    return {
        name: jnp.asarray(np.resize(np.concatenate(of), (num_tokens, *of[0].shape[1:]))) for name, of in parts.items()
    }


@pytest.fixture(scope="module")
def sequences(case: Case) -> list[Tokens]:
    return [case.random_tokens(12, seed) for seed in range(4)]


@pytest.fixture(scope="module")
def before(case: Case, sequences: list[Tokens]) -> jax.Array:
    """Pages in which the rows have got as far as `STARTS`, two tokens at a time."""
    pages = jnp.full(case.memory.pages(2, NUM_PAGES, PAGE_SIZE, jnp.bfloat16, None).shape, jnp.nan)  # type: ignore[arg-type]
    done = [0, 0, 0, 0]
    while any(at < end for at, end in zip(done, STARTS, strict=True)):
        counts = [min(2, end - at) for at, end in zip(done, STARTS, strict=True)]
        tokens = packed(sequences, done, counts, 8)
        _, pages = advance(case, pages, rows_of(tuple(done), tuple(counts), 8), tokens)
        done = [at + count for at, count in zip(done, counts, strict=True)]
    return pages


def test_rows_of_any_length_read_what_numpy_reads(case: Case, sequences: Any, before: jax.Array) -> None:
    # The first column of the first row has no page, because nobody needs the state there.
    rows, tokens = rows_of(STARTS, LENGTHS, 16, first_page=0), packed(sequences, STARTS, LENGTHS, 16)
    read, pages = advance(case, before, rows, tokens)
    first = 0
    for sequence, start, count in zip(sequences, STARTS, LENGTHS, strict=True):
        expected = case.expected(sequence)[start : start + count]
        np.testing.assert_allclose(read[first : first + count], expected, atol=1e-5)
        first += count
    assert np.isnan(pages[1 - PLACE]).all(), "another layer's pages were written"
    # Those of the columns in which tokens were computed, and no others.
    both = zip(np.asarray(before[PLACE]), np.asarray(pages[PLACE]), strict=True)
    changed = [page for page, (was, now) in enumerate(both) if page and not np.array_equal(was, now, equal_nan=True)]
    assert changed == [2, 6, 7, 11] and not np.isnan(pages[PLACE, changed]).any()


def test_tokens_that_are_looked_at_first_leave_the_same_states(case: Case, sequences: Any, before: jax.Array) -> None:
    rows, tokens = rows_of(STARTS, LENGTHS, 16), packed(sequences, STARTS, LENGTHS, 16)
    read, taken = look_ahead(case, before, rows, tokens)
    for counts in ((7, 3, 1, 0), (5, 0, 1, 0), (1, 2, 0, 0)):
        pages = commit(case, before, rows, taken, jnp.asarray(counts))
        alone = before
        for step in range(max(counts)):
            at = [start + step if step < count else 0 for start, count in zip(STARTS, counts, strict=True)]
            lengths = tuple(int(step < count) for count in counts)
            token = {name: jnp.stack([one[name][t] for one, t in zip(sequences, at, strict=True)]) for name in tokens}
            once, alone = advance(case, alone, rows_of(tuple(at), lengths, 4), token)
            for row, first in enumerate((0, 7, 10)):
                if lengths[row]:
                    np.testing.assert_array_equal(once[row], read[first + step])
        np.testing.assert_array_equal(pages[PLACE, 1:], alone[PLACE, 1:])


@pytest.mark.parametrize("num_tokens", [24, 12, 7])
def test_a_run_of_kimi_delta_in_blocks_is_its_tokens_one_by_one(num_tokens: int) -> None:
    delta, random = ChannelDelta(size=6), np.random.default_rng(0)
    tokens = {name: jnp.asarray(random.normal(size=(num_tokens, 6)), jnp.float32) for name in ("q", "k", "v", "g")}
    tokens |= {"k": tokens["k"] / 3, "g": -jnp.exp(2 * tokens["g"]), "beta": jnp.linspace(0.1, 1, num_tokens)}
    state = (jnp.asarray(random.normal(size=(6, 6)), jnp.float32),)
    for got, expected in zip(
        jax.tree.leaves(delta.run(state, tokens)), jax.tree.leaves(one_by_one(delta, state, tokens)), strict=True
    ):
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_a_page_has_the_rows_that_a_tpu_tiles() -> None:
    memory = CASES["gated delta"].memory
    pages = memory.pages(2, NUM_PAGES, PAGE_SIZE, jnp.bfloat16, None)  # type: ignore[arg-type]
    # 2 * 6 rows of S, and 66 numbers of channels in rows of 5.
    assert (pages.shape, pages.dtype) == ((2, NUM_PAGES, HEADS, 32, 5), jnp.float32)
    assert memory.page_bytes(PAGE_SIZE, jnp.bfloat16) == HEADS * 32 * 5 * 4


def test_a_page_has_all_of_a_state(case: Case) -> None:
    random = np.random.default_rng(1)
    state = tuple(jnp.asarray(random.normal(size=(HEADS, *part))) for part in case.rule.parts)
    for was, now in zip(state, case.memory.unpack(case.memory.pack(state)), strict=True):
        np.testing.assert_array_equal(was, now)
