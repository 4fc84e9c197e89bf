"""What is particular to the GPU kernel: its work lists against brute force, and what the joined parts add up to."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.chips import GpuChip, chip_named
from pallas_kernels.ragged_paged_attention import gpu
from pallas_kernels.ragged_paged_attention.cases import RaggedCase, RowCase
from pallas_kernels.ragged_paged_attention.gpu.work_plan import plan_decode, plan_prefill
from tests.pallas_kernels.attention_call import LAYER, Call, make_call


def gpu_chip(name: str = "h200", **changes: Any) -> GpuChip:
    chip = chip_named(name)
    assert isinstance(chip, GpuChip)
    return dataclasses.replace(chip, **changes)


def pieces_of(plan: Any, heads: int, block: int, pipe: int) -> list[tuple[int, int, int]]:
    """(row, head, block) of every block in a pipe's share, walked as the kernel walks it."""
    rows, share, total = np.asarray(plan.rows), *map(int, plan.line)
    row, visits = np.asarray(plan.pipes)[pipe]
    at, stop = pipe * share, min((pipe + 1) * share, total)
    seen = []
    for _ in range(visits):
        before, kv_len = rows[row, :2]
        blocks = -(-kv_len // block)
        head, first = divmod(at - before * heads, blocks) if blocks else (0, 0)
        end = min(blocks, first + stop - at)
        seen += [(row, head, index) for index in range(first, end)]
        at += end - first
        row += at >= (before + blocks) * heads
    assert at == max(stop, pipe * share)
    return [(int(row), int(head), int(index)) for row, head, index in seen]


@pytest.mark.parametrize(("heads", "pipes", "least"), [(1, 1, 1), (2, 7, 2), (8, 40, 1), (3, 100, 3)])
def test_shares_are_equal_and_cover_every_block_once_in_order(heads: int, pipes: int, least: int) -> None:
    block, num_rows = 64, 9
    ones = jnp.ones(num_rows, jnp.int32)
    make_plan = jax.jit(
        lambda kv_lens: plan_decode(kv_lens, ones, ones, block=block, heads=heads, pipes=pipes, least=least)
    )
    rng = np.random.default_rng(heads)
    for longest in (1, 64, 65, 700, 5000):
        # Some rows are padding, in the middle too.
        kv_lens = rng.integers(0, longest + 1, num_rows) * rng.integers(0, 2, num_rows)
        plan = make_plan(kv_lens.astype(np.int32))
        shares = [pieces_of(plan, heads, block, pipe) for pipe in range(pipes)]
        expected = [
            (row, head, index)
            for row, kv_len in enumerate(kv_lens)
            for head in range(heads)
            for index in range(-(-kv_len // block))
        ]
        assert [piece for share in shares for piece in share] == expected
        full = max(least, -(-len(expected) // pipes))
        assert all(len(share) == full for share in shares[: len(expected) // full])
        # No two pieces write to one slot.
        pieces = {(row, head, pipe) for pipe, share in enumerate(shares) for row, head, _ in share}
        slots = Counter(row * heads + head + pipe for row, head, pipe in pieces)
        assert max(slots.values(), default=1) == 1


@pytest.mark.parametrize(("per_tile", "num_tokens"), [(1, 40), (4, 200), (32, 300)])
def test_tiles_cover_every_token_once(per_tile: int, num_tokens: int) -> None:
    num_rows = 8
    make_plan = jax.jit(lambda *lengths: plan_prefill(*lengths, num_tokens, queries=per_tile))
    rng = np.random.default_rng(per_tile)
    for longest in (1, num_tokens // num_rows):
        query_lens = rng.integers(0, longest + 1, num_rows) * rng.integers(0, 2, num_rows)
        kv_lens = query_lens + rng.integers(0, 100, num_rows) * (query_lens > 0)
        starts = np.concatenate([[0], np.cumsum(query_lens)])
        wide = query_lens > 5  # the others are decode's
        lengths = (kv_lens, np.where(wide, query_lens, 0), starts)
        plan = make_plan(*(x.astype(np.int32) for x in lengths))
        found = []
        for row, token, queries, position, kv_len in np.asarray(plan.tiles)[: int(plan.num_tiles[0])].tolist():
            assert 1 <= queries <= per_tile
            found += [(token + i, row, position + i, kv_len) for i in range(queries)]
        expected = [
            (starts[row] + i, row, kv_lens[row] - query_lens[row] + i, kv_lens[row])
            for row in range(num_rows)
            if wide[row]
            for i in range(query_lens[row])
        ]
        padding = num_tokens - starts[-1]
        expected += [(starts[-1] + i, num_rows - 1, i - padding, 0) for i in range(padding)]
        assert sorted(found) == sorted(expected)


SHAPE: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 64, "page_size": 16}
ROWS = (RowCase(1, 300), RowCase(0, 0), RowCase(1, 129))
DECODE = RaggedCase("decode", num_tokens=3, rows=ROWS, **SHAPE)
VERIFY = RaggedCase(
    "verify", num_tokens=20, rows=(RowCase(3, 200), RowCase(1, 5), RowCase(14, 40)), **SHAPE | {"page_size": 64}
)


@cache
def compiled(case: RaggedCase, chip: GpuChip) -> Callable[..., jax.Array]:
    return jax.jit(
        lambda q, pages, rows, sinks: gpu.attend(
            q, pages, LAYER, rows, scale=case.scale, soft_cap=case.soft_cap, window=case.window, sinks=sinks,
            slopes=None, chip=chip, interpret=True,
        )
    )  # fmt: skip


def attend(call: Call, chip: GpuChip) -> np.ndarray:
    """The kernel on pages that hold this step's KV already."""
    out = np.asarray(compiled(call.case, chip)(call.q, call.written, call.rows, call.sinks))
    assert out.dtype == call.q.dtype
    return out


def test_split_kv_adds_up_to_the_same(capfd: pytest.CaptureFixture[str]) -> None:
    call = make_call(dataclasses.replace(DECODE, sinks=True), jnp.bfloat16)
    # 10 blocks of KV: five pipes of two, or two of five.
    split, whole = (attend(call, gpu_chip(num_sms=sms)) for sms in (3, 1))
    assert call.error(split) < call.tolerance
    assert call.error(whole) < call.tolerance
    assert split.tobytes() != whole.tobytes()  # else nothing was split
    assert np.isfinite(split.astype(np.float32)).all()
    assert split.tobytes() == attend(call, gpu_chip(num_sms=3)).tobytes()
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.parametrize("name", ["h200", "b200"])
def test_either_matrix_unit_without_races(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    call = make_call(dataclasses.replace(VERIFY, window=30, soft_cap=3.0), np.float16)
    out = attend(call, gpu_chip(name, num_sms=2))
    assert call.error(out) < call.tolerance
    assert np.isfinite(out).all()
    assert "RACE DETECTED" not in capfd.readouterr().out


def test_what_a_window_left_behind_may_be_nan() -> None:
    # Position 299 sees 230 on. All before is another request's by now, within the first page too.
    call = make_call(dataclasses.replace(DECODE, window=70, rows=(RowCase(1, 300),), num_tokens=1), np.float16)
    pages = call.written.copy()
    for page in call.table[0, : 230 // 16]:
        pages[:, page] = np.nan
    pages[:, call.table[0, 230 // 16], :, : 230 % 16] = np.nan
    assert call.error(attend(dataclasses.replace(call, written=pages), gpu_chip(num_sms=1))) < call.tolerance


@pytest.mark.parametrize(
    ("chip", "case", "dtype", "message"),
    [
        (gpu_chip("a100"), DECODE, np.float16, r"a100 has compute capability \(8, 0\), below \(9, 0\)"),
        (gpu_chip(), DECODE, np.float32, "queries are float32, neither"),
        (gpu_chip(), dataclasses.replace(DECODE, num_heads=130), np.float16, "65 query heads share a KV head"),
        (gpu_chip(), dataclasses.replace(DECODE, head_size=320), np.float16, "heads have size 320"),
        (gpu_chip(shared_memory_per_block=2**16), DECODE, np.float16, "do not fit the shared memory of h200"),
    ],
)
def test_what_the_kernel_cannot_is_refused(chip: GpuChip, case: RaggedCase, dtype: Any, message: str) -> None:
    call = make_call(dataclasses.replace(case, rows=(RowCase(1, 3),), num_tokens=1), dtype)
    with pytest.raises(NotImplementedError, match=f"{message}.*reference"):
        attend(call, chip)
