"""The kernel that takes tokens into states on GPUs, interpreted, against the recurrence in float64."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.chips import GpuChip, chip_named
from pallas_kernels.linear_attention import gpu
from pallas_kernels.ragged_paged_attention import RaggedRows
from tests.pallas_kernels.gpu_here import INTERPRETED

LAYER, GROUPS, REST, PAGE_SIZE = 1, 2, 8, 4


@pytest.fixture(autouse=True)
def no_races(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    printed = "".join(capfd.readouterr())
    assert "RACE DETECTED" not in printed, printed


@dataclass(frozen=True, eq=False)
class Kind:
    """A rule, by the sizes of a head's matrix."""

    keys: int
    values: int
    keys_last: bool = False
    corrects: bool = True
    by_channel: bool = False
    heads: int = 2

    @property
    def shape(self) -> tuple[int, int]:
        return (self.values, self.keys) if self.keys_last else (self.keys, self.values)

    def tile(self, decode_only: bool) -> gpu.StateTile:
        tile = gpu.choose_tile(self.shape, keys_last=self.keys_last, decode_only=decode_only)
        assert tile is not None
        return tile


DELTA, SCAN = Kind(32, 64, by_channel=True), Kind(32, 16, keys_last=True, corrects=False)


def tokens_of(kind: Kind, count: int) -> Any:
    rng = np.random.default_rng(count)
    shapes = {
        "queries": (kind.keys,),
        "keys": (kind.keys,),
        "values": (kind.heads, kind.values),
        "logs": (kind.heads, kind.keys if kind.by_channel else 1),
        "betas": (kind.heads,),
    }
    made: dict[str, Any] = {
        name: rng.standard_normal((count, GROUPS, *shape), np.float32) for name, shape in shapes.items()
    }
    made |= {name: made[name] / kind.keys**0.5 for name in ("queries", "keys")}
    made["betas"] = 1 / (1 + np.exp(-made["betas"]))
    # Some tokens, or some channels of them, leave nearly everything, and others nothing.
    strengths = rng.choice(np.array([0.1, 20], np.float32), made["logs"].shape, p=[0.9, 0.1])
    made["logs"] = -np.abs(made["logs"]) * strengths
    return gpu.StateTokens(**made)


def by_hand(kind: Kind, state: np.ndarray, token: gpu.StateTokens) -> tuple[np.ndarray, np.ndarray]:
    """The states [K, r, ..] after a token, and what is read, [K, r, Dv]."""
    q, k, v, logs, beta = (np.asarray(x, np.float64) for x in token)
    S = np.swapaxes(state, -1, -2) if kind.keys_last else state
    S = S * np.exp(logs)[..., None]
    wrong = v - np.einsum("grkv,gk->grv", S, k) if kind.corrects else v
    S = S + np.einsum("gk,grv->grkv", k, beta[..., None] * wrong)
    return np.swapaxes(S, -1, -2) if kind.keys_last else S, np.einsum("grkv,gk->grv", S, q)


@partial(jax.jit, static_argnums=(0, 1))
def take(kind: Kind, decode_only: bool, pages: Any, rows: RaggedRows, tokens: Any, rest: Any) -> Any:
    plan = gpu.plan_states(rows, PAGE_SIZE)
    rest = rest[: len(plan.columns)]
    tile = kind.tile(decode_only)
    return plan, *gpu.take_tokens(
        pages, jnp.int32(LAYER), plan, tokens, rest, tile=tile, corrects=kind.corrects, interpret=INTERPRETED
    )


def check(kind: Kind, starts: tuple[int, ...], lens: tuple[int, ...], num_tokens: int, table: np.ndarray) -> None:
    rows = RaggedRows.build(jnp.asarray(table), jnp.asarray(starts), jnp.asarray(lens), num_tokens)
    tokens, rng = tokens_of(kind, num_tokens), np.random.default_rng(0)
    S, W = kind.heads * kind.shape[0] + REST, kind.shape[1]
    pages = np.full((2, table.max() + 2, GROUPS, S, W), np.nan, np.float32)
    for row, start in enumerate(starts):
        if start > 0:
            pages[LAYER, table[row, (start - 1) // PAGE_SIZE]] = rng.standard_normal((GROUPS, S, W))
    rest = rng.standard_normal((num_tokens, GROUPS, REST, W)).astype(np.float32)
    expected_pages, expected = pages.copy(), np.zeros((num_tokens, GROUPS, kind.heads, kind.values))
    column = 0
    for row, (start, count) in enumerate(zip(starts, lens, strict=True)):
        before = pages[LAYER, table[row, (start - 1) // PAGE_SIZE], :, :-REST] if start else np.zeros(1)
        state = np.resize(np.asarray(before, np.float64), (GROUPS, kind.heads, *kind.shape))
        for index in range(count):
            token, position = int(rows.query_starts[row]) + index, start + index
            state, expected[token] = by_hand(kind, state, gpu.StateTokens(*(x[token] for x in tokens)))
            if index == count - 1 or (position + 1) % PAGE_SIZE == 0:
                if page := table[row, position // PAGE_SIZE]:
                    expected_pages[LAYER, page] = np.concatenate([state.reshape(GROUPS, -1, W), rest[column]], axis=1)
                column += 1
    plan, read, got = take(kind, rows.decode_only, pages, rows, tokens, rest)
    assert int(plan.rows[:, 2].sum()) == column
    is_real = np.asarray(rows.is_real())
    np.testing.assert_allclose(np.asarray(read)[is_real], expected[is_real], atol=1e-5)
    np.testing.assert_allclose(np.asarray(got), expected_pages, atol=1e-5)


@pytest.mark.parametrize("kind", [DELTA, SCAN], ids=["delta rule", "selective scan"])
def test_rows_of_any_length(kind: Kind) -> None:
    # The first row begins, and nobody needs its first column. The second goes on within a page, the third on a new one.
    # The fourth has no token, and the fifth begins with one. Its page before and that of the third are the same.
    table = 1 + np.arange(20, dtype=np.int32).reshape(5, 4)
    table[0, 0] = 0
    table[4, 1] = table[2, 1]
    check(kind, (0, 6, 8, 0, 8), (9, 1, 2, 0, 1), 16, table)


@pytest.mark.parametrize("kind", [DELTA, SCAN], ids=["delta rule", "selective scan"])
def test_rows_that_decode(kind: Kind) -> None:
    check(kind, (3, 0, 4, 0), (1, 0, 1, 1), 4, 1 + np.arange(8, dtype=np.int32).reshape(4, 2))


CHUNKED = {
    "delta rule": Kind(128, 64),
    "decays of channels": Kind(64, 64, by_channel=True, heads=1),
    "selective scan": Kind(64, 64, keys_last=True, corrects=False),
}


def gpu_chip(name: str) -> GpuChip:
    chip = chip_named(name)
    assert isinstance(chip, GpuChip)
    return chip


@partial(jax.jit, static_argnums=(0, 1))
def take_by_chunks(kind: Kind, chip: GpuChip, pages: Any, rows: RaggedRows, tokens: Any, rest: Any) -> Any:
    sizes: dict[str, Any] = {"keys_last": kind.keys_last, "corrects": kind.corrects}
    unit = gpu.choose_chunks(kind.shape, **sizes, chip=chip, interpret=INTERPRETED)
    assert unit is not None
    plan = gpu.plan_chunks(rows, 16, rows.query_lens() > gpu.FEW_TOKENS)
    rest = rest[: len(plan.visits)]
    read = jnp.full((len(rows.token_rows), GROUPS, kind.heads, kind.values), 7.0)
    return plan, *gpu.take_chunks(pages, read, jnp.int32(LAYER), plan, tokens, rest, unit=unit, chip=chip)


@pytest.mark.parametrize("name", CHUNKED)
def test_chunks_of_rows(name: str) -> None:
    kind, rng = CHUNKED[name], np.random.default_rng(0)
    # The first row begins, fills a tile and ends in the next one. The second is another kernel's, and the fourth has
    # no token. The third goes on within a page and reaches another one; the last one begins on a new page.
    starts, lens, num_tokens = np.array([0, 9, 31, 0, 32]), np.array([70, 1, 20, 0, 17]), 120
    table = 1 + np.arange(25, dtype=np.int32).reshape(5, 5)
    table[0, :3] = 0  # as the host leaves out columns that nobody needs
    rows = RaggedRows.build(jnp.asarray(table), jnp.asarray(starts), jnp.asarray(lens), num_tokens)
    begins = np.asarray(rows.query_starts)
    tokens = tokens_of(kind, num_tokens)
    tokens.keys[40:] = tokens.keys[40]  # keys that repeat are what powers of the system would not survive
    for x in tokens:
        x[begins[1]], x[begins[-1] :] = np.nan, np.nan
    tokens.keys[begins[4], 0] = np.nan  # stays in its row and its group, whatever is in the same tile
    S, W = kind.heads * kind.shape[0] + REST, kind.shape[1]
    pages = np.full((2, 26, GROUPS, S, W), np.nan, np.float32)
    for row in (2, 4):
        pages[LAYER, table[row, (starts[row] - 1) // 16]] = rng.standard_normal((GROUPS, S, W))
    rest = rng.standard_normal((num_tokens, GROUPS, REST, W)).astype(np.float32)
    plan, read, got = take_by_chunks(kind, replace(gpu_chip("h200"), num_sms=3), pages, rows, tokens, rest)
    rest_of = {page: rest[visit] for visit, (*_, page) in enumerate(np.asarray(plan.visits).tolist()) if page}
    expected_pages, pages = pages.copy(), pages[LAYER].astype(np.float64)
    for row in (0, 2, 4):
        before = pages[table[row, (starts[row] - 1) // 16], :, :-REST] if starts[row] else np.zeros(1)
        state = np.resize(before, (GROUPS, kind.heads, *kind.shape))
        for position in range(starts[row], starts[row] + lens[row]):
            token = begins[row] + position - starts[row]
            state, expected = by_hand(kind, state, gpu.StateTokens(*(x[token] for x in tokens)))
            np.testing.assert_allclose(read[token], expected, atol=1e-5, rtol=2e-5)
            page = table[row, position // 16]
            if page and (position == starts[row] + lens[row] - 1 or position % 16 == 15):
                of_page = np.concatenate([state.reshape(GROUPS, -1, W), rest_of.pop(page)], axis=1)
                expected_pages[LAYER, page] = of_page
    assert not rest_of and np.all(read[begins[1]] == 7) and np.all(read[begins[-1] :] == 7)
    np.testing.assert_allclose(got, expected_pages, atol=1e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("matrix", "keys_last", "lines"),
    [
        ((128, 128), False, 64),  # Qwen3-Next, Kimi Linear
        ((256, 128), False, 32),
        ((64, 64), False, 64),
        ((64, 128), True, 64),  # Granite 4
        ((80, 128), True, 16),
        ((100, 128), False, None),
        ((128, 16), False, None),
        ((512, 32), False, None),  # more than the registers of a warpgroup hold
    ],
)
def test_tiles(matrix: tuple[int, int], keys_last: bool, lines: int | None) -> None:
    tile = gpu.choose_tile(matrix, keys_last=keys_last, decode_only=True)
    assert (tile and tile.lines) == lines


@pytest.mark.parametrize(
    ("chip", "matrix", "keys_last", "is_taken"),
    [
        ("h100", (128, 128), False, True),
        ("h200", (64, 128), True, True),
        ("h200", (80, 128), True, False),
        ("h200", (256, 128), False, False),  # more than the registers of a warpgroup hold
        ("b200", (128, 128), False, False),  # it has no wgmma
    ],
)
def test_what_goes_by_chunks(chip: str, matrix: tuple[int, int], keys_last: bool, is_taken: bool) -> None:
    unit = gpu.choose_chunks(matrix, keys_last=keys_last, corrects=True, chip=gpu_chip(chip), interpret=True)
    assert (unit is not None) == is_taken
