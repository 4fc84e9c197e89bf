"""Attention for GPUs that multiply from registers, interpreted by the plans of several chips, and its copies simulated.

The interpreter runs the kernels with copies that arrive at barriers, which it checks. What GPUs before Hopper do
instead is to count copies, and a simulation checks the counts.
"""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import cache, partial
from io import StringIO
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.chips import GpuChip, chip_named
from pallas_kernels.ragged_paged_attention import backend_for, gpu_mma, plan_rows, ragged_paged_attention
from pallas_kernels.ragged_paged_attention.cases import RaggedCase, RowCase
from pallas_kernels.ragged_paged_attention.gpu_mma import copies
from pallas_kernels.ragged_paged_attention.gpu_mma.codes import decoded
from pallas_kernels.ragged_paged_attention.gpu_mma.copies import BlockCopies
from tests.pallas_kernels.attention_call import LAYER, Call, make_call
from tests.pallas_kernels.gpu_here import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="interprets the kernels of other GPUs, which needs a CPU")


def backend(name: str, num_sms: int = 1) -> Backend:
    chip = chip_named(name)
    assert isinstance(chip, GpuChip)
    return Backend("gpu", dataclasses.replace(chip, num_sms=num_sms), interpret=True)


@cache
def attention(case: RaggedCase, backend: Backend) -> Callable[..., Any]:
    options: dict[str, Any] = dict(scale=case.scale, soft_cap=case.soft_cap, window=case.window)
    return jax.jit(partial(ragged_paged_attention, quantization=case.quantization, backend=backend, **options))


def check(call: Call, backend: Backend) -> bytes:
    """The bits of the output of `call`, which is right, and whose copies do not race."""
    with redirect_stdout(StringIO()) as printed:
        attend = attention(dataclasses.replace(call.case, rows=()), backend)
        options = {"sinks": call.sinks, "slopes": call.slopes, "kv_scales": call.kv_scales}
        out, _ = attend(call.q, call.k, call.v, call.pages, LAYER, call.rows, **options)
    out = np.asarray(out)
    assert call.error(out) < call.tolerance
    assert np.isfinite(out.astype(np.float32)).all()
    assert "RACE DETECTED" not in printed.getvalue()
    return out.tobytes()


def rows(*lengths: tuple[int, int]) -> tuple[RowCase, ...]:
    return tuple(RowCase(*lengths) for lengths in lengths)


# Llama 3 8B on four devices. Blocks of 64 tokens on an A100 and of 32 on the others.
DECODE = RaggedCase("decode", 8, 2, 128, 16, 4, rows((1, 17), (1, 330), (0, 0), (1, 129)))
# A prompt of several tiles, drafts, and rows that decode.
MIXED = RaggedCase("mixed", 6, 2, 64, 32, 72, rows((1, 90), (50, 170), (4, 200), (0, 0)))


def test_split_kv_adds_up_to_the_same() -> None:
    call = make_call(DECODE, jnp.bfloat16, backend("a100"))
    split, whole = (check(call, backend("a100", sms)) for sms in (4, 1))
    assert split != whole  # else nothing was split
    assert split == check(call, backend("a100", 4))


@pytest.mark.parametrize(
    ("chip", "case"),
    [
        ("l4", dataclasses.replace(MIXED, window=70, soft_cap=3.0, sinks=True)),
        ("gb10", dataclasses.replace(MIXED, num_heads=32, slopes=True, page_size=128)),
        ("rtx3090", dataclasses.replace(MIXED, head_size=200, num_heads=2, page_size=16)),
    ],
    ids=["window", "groups-of-16", "wide-heads"],
)
def test_prompts_drafts_and_rows_that_decode(chip: str, case: RaggedCase) -> None:
    check(make_call(case, np.float16, backend(chip)), backend(chip))


@pytest.mark.parametrize(
    ("chip", "case"),
    [
        ("a100", dataclasses.replace(DECODE, kv_dtype="float8_e4m3fn")),
        ("t4", dataclasses.replace(MIXED, kv_dtype="int8", by_token=True, page_size=16)),
    ],
    ids=["float8", "int8-by-token"],
)
def test_pages_of_8_bits(chip: str, case: RaggedCase) -> None:
    check(make_call(case, np.float16, backend(chip)), backend(chip))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("code", [jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_every_code_is_decoded_exactly(code: Any, dtype: Any) -> None:
    codes = jnp.asarray(np.arange(256, dtype=np.uint8).view(jnp.dtype(code)))
    for has_float8 in (True, False):
        found = decoded(codes, jnp.dtype(dtype), has_float8)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found.astype(jnp.float32), codes.astype(jnp.float32))


@settings(max_examples=60)
@given(
    page_size=st.sampled_from([16, 32, 128]),
    block=st.sampled_from([32, 64]),
    stages=st.integers(2, 3),
    kv_len=st.integers(1, 400),
    data=st.data(),
)
def test_threads_wait_for_the_copies_of_their_block_and_no_others(
    page_size: int, block: int, stages: int, kv_len: int, data: st.DataObject
) -> None:
    blocks = -(-kv_len // block)
    seen = data.draw(st.integers(0, kv_len - 1))
    begin = data.draw(st.integers(seen // block, blocks - 1))
    end = data.draw(st.integers(begin + 1, blocks))
    with pytest.MonkeyPatch.context() as patch:
        copied = _simulate(patch, page_size, block, stages, begin, end, kv_len, seen)
    tokens = min(page_size, block)
    starts = range(begin * block, end * block, tokens)
    assert copied == [start for start in starts if seen - tokens < start < kv_len]


def _simulate(
    patch: pytest.MonkeyPatch, page_size: int, block: int, stages: int, begin: int, end: int, kv_len: int, seen: int
) -> Sequence[int]:
    """Runs the copies of a piece as threads do, with the identity as page table, and returns the positions copied."""
    copied: list[int] = []
    here: dict[int, int] = {}  # the copy that each position's part of shared memory waits for

    class Where:
        """A reference that remembers how it was indexed."""

        def __init__(self, *index: Any) -> None:
            self.index = index
            self.at = self

        def __getitem__(self, index: Any) -> "Where":
            return Where(*self.index, *(index if isinstance(index, tuple) else (index,)))

    def copy(source: Where, into: Where, oob_mode: Any) -> None:
        page, part = source.index
        first = int(page) * page_size + int(part.start)
        stage, rows = into.index
        here[int(stage) * block + int(rows.start)] = len(copied)
        copied.append(first)

    done = 0

    def wait(count: int) -> None:
        nonlocal done
        done = len(copied) - count

    patch.setattr(copies.plgpu, "copy_gmem_to_smem", copy)
    patch.setattr(copies.plgpu, "wait_gmem_to_smem", wait)
    patch.setattr(copies.pl, "when", lambda condition: lambda function: function() if condition else None)
    build: Any = SimpleNamespace(
        block=block, page_size=page_size, copy_tokens=min(page_size, block), stages=stages, num_pages=100,
        num_kv_heads=1, num_scales=0,
    )  # fmt: skip
    piece: Any = SimpleNamespace(row=0, head=0, begin=begin, end=end, kv_len=kv_len, seen=seen)
    table: Any = np.arange(100, dtype=np.int32)[None]
    ours = BlockCopies(build, "cp.async", Where(), Where(), table, jnp.int32(0), piece, {"blocks": Where()})
    ours.start_first()
    for number in range(begin, end):
        ours.wait(jnp.int32(number))
        tokens = build.copy_tokens
        for start in range(number * block, (number + 1) * block, tokens):
            if seen - tokens < start < kv_len:
                place = number % stages * block + start % block
                assert copied[here[place]] == start and here[place] < done
        later = sum(start >= (number + 1) * block for start in copied)
        assert len(copied) - done == later  # none of them is waited for
        ours.start_next(jnp.int32(number))
    return copied


def test_more_heads_of_a_kv_head_than_a_tile_has_rows_are_left_to_plain_xla() -> None:
    sizes: dict[str, Any] = dict(num_heads=71, num_kv_heads=1, head_size=64, rows=rows((1, 17), (1, 40)), num_tokens=2)
    many = dataclasses.replace(DECODE, kv_dtype="float8_e4m3fn", **sizes)
    call = make_call(many, np.float16, backend("l4"))
    check(call, backend("l4"))
    for name in ("l4", "h200"):
        assert (
            backend_for(64, backend(name), group=64).kind == "gpu"
            and backend_for(64, backend(name), group=71) == REFERENCE
        )
        plan = partial(plan_rows, call.rows, call.pages, dtype=np.float16, backend=backend(name))
        assert plan(num_heads=71) is None and plan(num_heads=64) is not None


def test_what_the_kernels_cannot_is_refused() -> None:
    assert backend_for(256, backend("l4")) == backend("l4")
    assert backend_for(576, backend("l4"), 512) == backend_for(512, backend("l4")) == REFERENCE
    call = make_call(dataclasses.replace(DECODE, rows=(RowCase(1, 3),), num_tokens=1), np.float16, backend("l4"))
    attend = partial(
        gpu_mma.attend, layer=LAYER, rows=call.rows, scale=1.0, soft_cap=None, window=8, sinks=None, slopes=None,
        interpret=True,
    )  # fmt: skip
    chips = {name: backend(name).chip for name in ("t4", "l4", "h200")}
    for name, dtype, message in (
        ("h200", jnp.float16, r"h200 has compute capability \(9, 0\)"),
        ("t4", jnp.bfloat16, "t4 does not multiply bfloat16"),
        ("l4", jnp.float32, "queries are float32"),
    ):
        with pytest.raises(NotImplementedError, match=f"{message}.*reference"):
            jax.eval_shape(partial(attend, chip=chips[name]), call.q.astype(dtype), call.written.astype(dtype))
