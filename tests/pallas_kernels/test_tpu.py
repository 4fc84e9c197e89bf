"""What only the TPU kernel has: its block sizes, what it fetches, and how it writes. Its results: the common suite."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.backend import Backend
from pallas_kernels.chips import CHIPS, TpuChip
from pallas_kernels.ragged_paged_attention import NO_WINDOW, RaggedRows, ragged_paged_attention, tpu
from pallas_kernels.ragged_paged_attention.cases import RaggedCase, RowCase
from pallas_kernels.ragged_paged_attention.tpu import blocks as tpu_blocks
from pallas_kernels.ragged_paged_attention.tpu.attend import Attender
from pallas_kernels.ragged_paged_attention.tpu.blocks import VMEM_SHARES, Blocks, Problem, Stage
from pallas_kernels.ragged_paged_attention.tpu.write import Merger, Writer
from tests.pallas_kernels.attention_call import LAYER, Call, make_call

TPUS = [chip for chip in CHIPS.values() if isinstance(chip, TpuChip)]
V5E = next(chip for chip in TPUS if chip.name == "v5e")
STAGES: tuple[Stage, ...] = ("decode", "verify", "prefill")
LLAMA = Problem(32, 8, 128, 16, "bfloat16", "bfloat16")
PROBLEMS = [
    LLAMA,
    replace(LLAMA, page_size=128, kv_dtype="int8"),
    Problem(7, 1, 64, 16, "float32", "float32"),
    Problem(64, 1, 128, 64, "bfloat16", "bfloat16"),
    Problem(32, 32, 128, 16, "bfloat16", "bfloat16"),
    Problem(16, 8, 256, 32, "bfloat16", "float8_e4m3fn"),
    replace(LLAMA, page_size=64, kv_dtype="int8", by_token=True),
    # DeepSeek V3 with all of its heads.
    Problem(128, 1, 640, 64, "bfloat16", "bfloat16", 512),
]
# The smallest: a few dozen tokens are several fetches, tiles and runs.
SMALL = {
    "decode": Blocks(tile_queries=1, fetch_pages=8, step_pages=8, slots=2),
    "verify": Blocks(tile_queries=16, fetch_pages=8, step_pages=8, slots=2),
    "prefill": Blocks(tile_queries=32, fetch_pages=16, step_pages=8, slots=3),
}


def rows(*lengths: tuple[int, int]) -> tuple[RowCase, ...]:
    return tuple(RowCase(query_len, kv_len) for query_len, kv_len in lengths)


# Rows begin and end within stripes, pages, tiles of 32 and runs of 128; padding rows lie between.
MIXED = RaggedCase(
    "mixed", 4, 2, 64, 16, 240,
    rows((0, 0), (1, 130), (90, 300), (0, 0), (0, 0), (5, 135), (1, 16), (1, 1), (16, 16), (40, 65), (33, 33), (0, 0)),
    sinks=True,
)  # fmt: skip
# One KV head for so many query heads that half of them are a tile of their own.
DIVIDED = RaggedCase("divided", 16, 1, 64, 16, 80, rows((20, 33), (0, 0), (1, 130), (5, 135), (40, 40)), sinks=True,
                     slopes=True)  # fmt: skip
DECODE = RaggedCase("decode", 8, 2, 64, 32, 7, rows((0, 0), (1, 31), (1, 32), (0, 0), (1, 33), (1, 290), (0, 0)))


@pytest.fixture(autouse=True)
def no_races(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """The interpreter prints what it finds: races, and copies that nobody waited for."""
    yield
    printed = "".join(capfd.readouterr())
    assert "RACE DETECTED" not in printed and "non-zero count" not in printed, printed


def backend(chip: TpuChip = V5E) -> Backend:
    return Backend("tpu", chip, interpret=True)


def call_of(case: RaggedCase, dtype: Any = np.float32, chip: TpuChip = V5E) -> Call:
    return make_call(case, dtype, backend(chip))


@cache
def compiled(case: RaggedCase, chip: TpuChip) -> Callable[..., Any]:
    """The jitted call of (q, k, v, pages, rows, window, sinks, slopes, kv_scales) with the smallest blocks.

    Copies happen when they are started: whatever touches their memory before they are waited for is a race. (The common
    suite has them happen when they are waited for: what nobody waits for never does.)
    """

    def blocks(stage: Stage, *_: Any) -> Blocks:
        return replace(SMALL[stage], head_parts=2 if case == DIVIDED and stage != "decode" else 1)

    def call(
        q: Any, k: Any, v: Any, pages: Any, rows: RaggedRows, window: Any, sinks: Any, slopes: Any, kv_scales: Any
    ) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tpu.kernel, "choose", blocks)
            patch.setattr(pltpu, "InterpretParams", partial(pltpu.InterpretParams, dma_execution_mode="eager"))
            return ragged_paged_attention(
                q, k, v, pages, LAYER, rows, scale=case.scale, soft_cap=case.soft_cap, window=window, sinks=sinks,
                slopes=slopes, quantization=case.quantization, kv_scales=kv_scales, backend=backend(chip),
            )  # fmt: skip

    return jax.jit(call)


def run(call: Call, chip: TpuChip = V5E, **changes: Any) -> tuple[np.ndarray, np.ndarray]:
    """Output and pages of `call`, some of its arguments changed."""
    names = ("q", "k", "v", "pages", "rows", "window", "sinks", "slopes", "kv_scales")
    arguments = {"window": call.case.window} | changes
    values = [arguments[name] if name in arguments else getattr(call, name) for name in names]
    out, pages = compiled(replace(call.case, window=NO_WINDOW), chip)(*values)
    return np.array(out), np.asarray(pages)


def check(call: Call, chip: TpuChip = V5E) -> None:
    """Right outputs, and pages in which nothing but the new tokens changed, up to the last bit."""
    out, pages = run(call, chip)
    assert out.dtype == call.q.dtype
    assert call.error(out) < call.tolerance
    assert np.isfinite(out).all()
    np.testing.assert_array_equal(pages[:, 1:].astype(np.float32), call.written[:, 1:].astype(np.float32))


@pytest.mark.parametrize(
    "case", [DECODE, MIXED, replace(MIXED, window=20), DIVIDED], ids=["decode", "mixed", "window", "divided"]
)
def test_small_blocks(case: RaggedCase) -> None:
    check(call_of(case))


def test_stripes_of_one_byte() -> None:
    # They are 32 tokens: half of these pages.
    lengths = rows((1, 97), (50, 80), (3, 67), (1, 64))
    check(call_of(RaggedCase("int8", 2, 1, 64, 64, 60, lengths, kv_dtype="int8")))
    check(call_of(RaggedCase("e5m2", 2, 1, 64, 64, 3, rows((1, 97), (1, 64), (1, 31)), kv_dtype="float8_e5m2")))


def test_heads_of_several_registers() -> None:
    check(call_of(RaggedCase("192", 2, 1, 192, 16, 48, rows((1, 70), (20, 40)), soft_cap=9.0)))
    check(call_of(RaggedCase("256", 2, 1, 256, 16, 2, rows((1, 70), (1, 150))), jnp.bfloat16))


def test_rows_are_shared_by_two_cores() -> None:
    (v5p,) = [chip for chip in TPUS if chip.name == "v5p"]
    assert v5p.num_cores == 2
    case = replace(MIXED, num_heads=2, num_kv_heads=1)
    check(call_of(case, chip=v5p), v5p)


@pytest.mark.parametrize("case", [DECODE, MIXED], ids=str)
def test_pages_outside_the_window_are_not_fetched(case: RaggedCase) -> None:
    # NaN in the pages before the one that the window begins in: fetched, it would be multiplied by a weight of 0.
    call = call_of(replace(case, window=40))
    pages = call.pages.copy()
    for row, table in zip(case.rows, call.table, strict=True):
        first_seen = max(row.kv_len - row.query_len + 1 - 40, 0)
        pages[LAYER, table[: first_seen // case.page_size]] = np.nan
    assert call.error(run(call, pages=pages)[0]) < call.tolerance
    assert call.error(run(call, pages=pages, window=40 + case.page_size)[0]) == np.inf


def test_a_page_table_of_a_long_context() -> None:
    # 131072 tokens in pages of 16, of which the row fills few; a table of all rows would not fit scalar memory.
    call = call_of(DECODE)
    wide = np.pad(call.table, ((0, 0), (0, 8192 - call.table.shape[1])))
    out, _ = run(call, rows=replace(call.rows, page_table=jnp.asarray(wide)))
    assert call.error(out) < call.tolerance


def test_what_the_kernel_cannot_do() -> None:
    call = call_of(DECODE)
    with pytest.raises(NotImplementedError, match="computes in float32 or bfloat16, not float16: use the backend ref"):
        run(call_of(DECODE, np.float16))
    wide = jnp.zeros((len(DECODE.rows), V5E.smem_bytes // 16 + 1), jnp.int32)
    with pytest.raises(NotImplementedError, match="at most 65536 pages a row, not 65537: use larger pages"):
        run(call, rows=replace(call.rows, page_table=wide))
    with pytest.raises(NotImplementedError, match="do not fit VMEM: shard the heads"):
        tpu_blocks.model("prefill", Problem(4096, 4096, 256, 128, "float32", "float32"), V5E)


@pytest.mark.parametrize("chip", TPUS, ids=lambda chip: chip.name)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_blocks_of_the_model_fit_the_chip(problem: Problem, chip: TpuChip) -> None:
    total = 0
    for stage in STAGES:
        blocks = tpu_blocks.model(stage, problem, chip)
        assert (blocks.tile_queries == 1) == (stage == "decode")
        assert blocks.step_pages * problem.page_size >= 128
        assert blocks.vmem_bytes(problem) <= VMEM_SHARES[stage] * chip.vmem_bytes
        total += scratch_bytes(Attender.scratch(problem, blocks, *arrays(problem)))
        total += 16 * blocks.tile_rows(problem) * blocks.step_pages * problem.page_size
    pages, *_ = arrays(problem)
    total += scratch_bytes(Writer.scratch(pages, tpu_blocks.write_tokens(problem, chip)))
    total += scratch_bytes(Merger.scratch(pages, 3))
    assert total < 0.85 * chip.vmem_bytes


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_the_model_counts_every_buffer(problem: Problem) -> None:
    for stage in STAGES:
        blocks = tpu_blocks.model(stage, problem, V5E)
        assert scratch_bytes(Attender.scratch(problem, blocks, *arrays(problem))) <= blocks.vmem_bytes(problem)


def test_many_heads_of_one_kv_head_are_divided() -> None:
    # No more rows than of fewer heads, and no tile of one query, whose row is merged into its page.
    for chip in TPUS:
        blocks = {stage: tpu_blocks.model(stage, PROBLEMS[-1], chip) for stage in STAGES}
        assert blocks["decode"].head_parts == 1 < blocks["verify"].head_parts
        assert all(blocks[stage].tile_rows(PROBLEMS[-1]) >= tpu_blocks.TILE_ROWS for stage in ("verify", "prefill"))


def test_a_faster_memory_has_more_on_its_way() -> None:
    fetched = {
        chip.name: tpu_blocks.model("decode", LLAMA, chip).fetch_pages * LLAMA.page_size * LLAMA.token_bytes
        for chip in TPUS
    }
    assert fetched["v5e"] <= fetched["v6e"] < fetched["v7x"]
    for chip in TPUS:
        # Two of three slots are on their way.
        assert 2 * fetched[chip.name] > 0.8 * chip.hbm_bandwidth / chip.num_cores * tpu_blocks.DMA_LATENCY


def arrays(problem: Problem) -> tuple[Any, Any, Any]:
    pages = (1, 1, problem.num_kv_heads, problem.page_size, problem.width)
    tokens = (64, -(-problem.num_heads // 8) * 8, problem.head_size)
    rows = problem.num_kv_heads * -(-problem.num_scales * problem.page_size // 128)
    scales = jax.ShapeDtypeStruct((1, 1, rows, 128), jnp.float32) if problem.by_token else None
    return jax.ShapeDtypeStruct(pages, problem.kv_dtype), jax.ShapeDtypeStruct(tokens, problem.dtype), scales


def scratch_bytes(scratch: dict[str, Any]) -> int:
    """VMEM of the buffers, the last axis to whole registers."""
    return sum(
        int(np.prod(buffer.shape[:-1])) * -(-buffer.shape[-1] // 128) * 128 * jnp.dtype(buffer.dtype).itemsize
        for buffer in scratch.values()
        if getattr(buffer, "memory_space", None) == pltpu.VMEM
    )


def test_the_tuned_table_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(8, 2, 64, 32, "float32", "float32")  # that of DECODE
    blocks = Blocks(tile_queries=1, fetch_pages=12, step_pages=4, slots=5)
    assert tpu_blocks.choose("decode", problem, V5E) == tpu_blocks.model("decode", problem, V5E) != blocks
    file = tmp_path / "tuned.json"
    entry = {"stage": "decode", "chip": V5E.name, "problem": asdict(problem), "blocks": asdict(blocks)}
    file.write_text(json.dumps([entry]))
    monkeypatch.setattr(tpu_blocks, "TUNED_FILE", file)
    assert tpu_blocks.choose("decode", problem, V5E) == blocks
    for other in TPUS[1:]:
        assert tpu_blocks.choose("decode", problem, other) == tpu_blocks.model("decode", problem, other)
    call = call_of(DECODE)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, pages: jax.Array) -> Any:
        return ragged_paged_attention(q, k, v, pages, LAYER, call.rows, scale=0.125, window=9, backend=backend())

    traced = jax.make_jaxpr(attend)(call.q, call.k, call.v, call.pages)
    assert "[5,12,2,32,128]" in str(traced), "the kernel's buffer of pages"


def test_the_shipped_table_is_valid() -> None:
    assert isinstance(tpu_blocks.tuned_table(tpu_blocks.TUNED_FILE), dict)


def test_a_broken_table_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tuned.json"
    file.write_text('[{"stage": "decode", "chip": "v5e", "problem": {"heads": 3}, "blocks": {}}]')
    with pytest.raises(ValueError, match="must have stage, chip, problem and blocks"):
        tpu_blocks.tuned_table(file)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((3, 8, 8, 2), "power of two"),
        ((1, 8, 8, 1), "slots at least two"),
        ((1, 12, 8, 2), "multiple of step_pages"),
        ((16, 8, 8, 2, 3), "head_parts must be a power of two"),
        ((1, 8, 8, 2, 2), "at most tile_queries"),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Blocks(*sizes)
