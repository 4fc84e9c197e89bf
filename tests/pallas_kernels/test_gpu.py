"""What is particular to the GPU kernel: its work lists against brute force, and what the joined parts add up to."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.chips import GpuChip, chip_named
from pallas_kernels.ragged_paged_attention import NO_WINDOW, backend_for, gpu, ragged_paged_attention
from pallas_kernels.ragged_paged_attention.cases import RaggedCase, RowCase
from pallas_kernels.ragged_paged_attention.gpu.work_plan import plan_decode, plan_latent, plan_prefill
from tests.pallas_kernels.attention_call import LAYER, Call, build_rows, make_call
from tests.pallas_kernels.gpu_here import INTERPRETED


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


@pytest.mark.parametrize(("heads", "pipes", "queries"), [(1, 3, 8), (2, 5, 1), (1, 40, 4)])
def test_tiles_of_latents_are_computed_once_and_joined_where_they_are_cut(heads: int, pipes: int, queries: int) -> None:
    block, group, num_rows, num_tokens = 64, 8, 5, 24
    sizes = {"block": block, "max_pipes": pipes, "page_size": 16}
    make_plan = jax.jit(lambda rows: plan_latent(rows, queries=queries, heads=heads, group=group, **sizes))
    rng = np.random.default_rng(queries)
    table = np.zeros((num_rows, 64), np.int32)
    for longest in (1, 200, 900):
        lengths = rng.integers(0, 5, num_rows)
        starts = rng.integers(0, longest, num_rows) * (lengths > 0)
        for tokens in (num_rows, num_tokens):
            lengths = np.minimum(lengths, 1) if tokens == num_rows else lengths
            rows = build_rows(table, starts.astype(np.int32), lengths.astype(np.int32), tokens)
            plan = jax.tree.map(np.asarray, make_plan(rows))
            outputs, cut = Counter[int](), {}
            for pipe in range(len(plan.joins)):
                for tile, head, begin, end, blocks in latent_pieces_of(plan, heads, block, pipe):
                    _, kv_len, count, token = plan.shares.rows[tile].tolist()
                    row, first = int(plan.table_rows[tile]), (token * heads + head) * group
                    if kv_len:  # padding has none
                        assert token in range(*rows.query_starts[row : row + 2].tolist())
                        last = token + count - 1 if tokens == num_tokens else row
                        assert kv_len == int(rows.positions[last]) + 1
                    outputs += Counter(first + index for index in range(count * group) if begin == 0)
                    cut.setdefault((first, count * group), []).append((pipe, begin, end, blocks))
            assert outputs == Counter(range(tokens * heads * group))
            expected = set()
            for (first, height), parts in cut.items():
                assert [begin for _, begin, _, _ in parts] == [0, *(end for _, _, end, _ in parts[:-1])]
                assert parts[-1][2] == parts[0][3]
                if len(parts) > 1:
                    expected.add((parts[0][0] + 1, first, height, parts[-1][0]))
            assert {(pipe, *join.tolist()) for pipe, join in enumerate(plan.joins) if join[1]} == expected


def latent_pieces_of(plan: Any, heads: int, block: int, pipe: int) -> list[tuple[int, ...]]:
    """(tile, head, first block, end, blocks) of every piece of a pipe, walked as the kernel walks them."""
    (share, total), (tile, visits) = plan.shares.line.tolist(), plan.shares.pipes[pipe].tolist()
    at, stop, pieces = pipe * share, min((pipe + 1) * share, total), []
    for _ in range(visits):
        before, kv_len = plan.shares.rows[tile, :2].tolist()
        blocks = max(-(-kv_len // block), 1)
        head, begin = divmod(at - before * heads, blocks)
        end = min(blocks, begin + stop - at)
        pieces.append((tile, head, begin, end, blocks))
        at += end - begin
        tile += at >= (before + blocks) * heads
    return pieces


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
            slopes=None, chip=chip, interpret=INTERPRETED,
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


LATENT: dict[str, Any] = {"num_heads": 7, "num_kv_heads": 1, "head_size": 40, "latent_size": 24}
DECODE_LATENT = RaggedCase("decode", page_size=16, num_tokens=3, rows=ROWS, **LATENT)
# Eight queries of eight heads are a tile, so the last row has two.
VERIFY_LATENT = RaggedCase("verify", page_size=64, num_tokens=20, rows=VERIFY.rows, **LATENT)


def latent_backend(name: str = "h200", num_sms: int = 1) -> Backend:
    return Backend("gpu", gpu_chip(name, num_sms=num_sms), interpret=INTERPRETED)


@cache
def compiled_latents(case: RaggedCase, backend: Backend) -> Callable[..., jax.Array]:
    return jax.jit(
        lambda q, pages, rows, sinks, kv_scales: ragged_paged_attention(
            q, None, None, pages, LAYER, rows, scale=case.scale, window=case.window, sinks=sinks, kv_scales=kv_scales,
            quantization=case.quantization, latent_size=case.latent_size, backend=backend,
        )[0]
    )  # fmt: skip


def attend_latents(call: Call, backend: Backend) -> np.ndarray:
    arguments = call.q, call.written, call.rows, call.sinks, call.kv_scales
    return np.asarray(compiled_latents(call.case, backend)(*arguments))


def test_latents_that_are_cut_add_up_to_the_same(capfd: pytest.CaptureFixture[str]) -> None:
    whole, cut = (latent_backend(num_sms=sms) for sms in (1, 3))
    call = make_call(DECODE_LATENT, jnp.bfloat16, whole)
    outputs = [attend_latents(call, backend) for backend in (whole, cut)]
    for out in outputs:
        assert call.error(out) < call.tolerance
        assert np.isfinite(out.astype(np.float32)).all()
    assert outputs[0].tobytes() != outputs[1].tobytes()  # else nothing was cut
    assert attend_latents(call, cut).tobytes() == outputs[1].tobytes()
    assert "RACE DETECTED" not in capfd.readouterr().out


def test_latents_of_many_heads_by_the_other_matrix_unit(capfd: pytest.CaptureFixture[str]) -> None:
    backend = latent_backend("b200", num_sms=3)
    # Of 72 heads each half is a group.
    rows = (RowCase(3, 200), RowCase(1, 5), RowCase(2, 66))
    call = make_call(
        dataclasses.replace(VERIFY_LATENT, num_heads=72, num_tokens=7, rows=rows, window=30), np.float16, backend
    )
    assert call.error(attend_latents(call, backend)) < call.tolerance
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("chip", "case", "kv_dtype", "dtype"),
    [("h200", VERIFY_LATENT, "int8", np.float16), ("b200", DECODE_LATENT, "float8_e4m3fn", jnp.bfloat16)],
    ids=["int8", "float8"],
)
def test_latents_of_8_bits(
    chip: str, case: RaggedCase, kv_dtype: str, dtype: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    backend = latent_backend(chip, num_sms=3)
    call = make_call(dataclasses.replace(case, kv_dtype=kv_dtype), dtype, backend)
    assert call.error(attend_latents(call, backend)) < call.tolerance
    assert "RACE DETECTED" not in capfd.readouterr().out


def test_latents_that_only_plain_xla_reads() -> None:
    # DeepSeek V3 and, with the key of an index, V3.2.
    backend = latent_backend()
    assert backend_for(576, backend, 512) == backend
    assert backend_for(704, backend, 512) == REFERENCE


def test_latents_with_sinks_are_refused() -> None:
    call = make_call(dataclasses.replace(DECODE_LATENT, sinks=True), np.float16, latent_backend())
    with pytest.raises(NotImplementedError, match=r"latents with sinks.*reference"):
        attend_latents(call, latent_backend())


def test_copies_write_where_the_copy_engine_can(monkeypatch: pytest.MonkeyPatch) -> None:
    # A copy by a tensor map writes to multiples of 128 bytes, which the interpreter does not check. jax 0.11.2 makes
    # plain ones, which write to multiples of 16, where it is promised that nothing lies out of bounds.
    copies: list[tuple[int, Any]] = []

    def record(source: Any, into: Any, *arguments: Any, oob_mode: Any = None) -> None:
        copies.append((math.prod(into.shape) * into.dtype.itemsize, oob_mode))
        copy(source, into, *arguments, oob_mode=oob_mode)

    copy = plgpu.copy_gmem_to_smem
    monkeypatch.setattr(plgpu, "copy_gmem_to_smem", record)
    for case in (dataclasses.replace(VERIFY, page_size=16), dataclasses.replace(VERIFY_LATENT, page_size=16)):
        backend = latent_backend()
        call = make_call(dataclasses.replace(case, kv_dtype="int8", by_token=True), np.float16, backend)
        jax.eval_shape(
            partial(
                ragged_paged_attention, scale=1.0, window=NO_WINDOW, quantization=call.case.quantization,
                latent_size=case.latent_size, backend=backend,
            ),
            call.q, None, None, call.written, LAYER, call.rows,
        )  # fmt: skip
    promised = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
    assert {size for size, mode in copies if mode == promised} == {64}
    assert all(size % 128 == 0 for size, mode in copies if mode != promised)


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
