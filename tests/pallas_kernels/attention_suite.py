"""What every backend of ragged paged attention must do, against a dense float64 oracle, NaN in all that no row owns.

A test file a backend makes its class from one of the suites, so that they run side by side.
"""

from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import cache, partial
from io import StringIO
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention import (
    NO_WINDOW,
    KVQuantization,
    RaggedRows,
    kv_pages_struct,
    ragged_paged_attention,
)
from pallas_kernels.ragged_paged_attention.cases import CASES, RaggedCase, RowCase
from tests.pallas_kernels.attention_call import BACKENDS, DTYPES, LAYER, LAYERS, Call, make_call


@cache
def attention(
    scale: float,
    soft_cap: float | None,
    latent_size: int | None,
    quantization: KVQuantization | None,
    name: str,
) -> Callable[..., Any]:
    """The jitted call of (q, k, v, pages, layer, rows, window=..., sinks=..., slopes=..., kv_scales=...).

    The window is data, as in a model's scan over layers: most of an interpreter's time goes into compiling, and cases
    of the same shapes share a program.
    """
    options: dict[str, Any] = dict(scale=scale, soft_cap=soft_cap, latent_size=latent_size, quantization=quantization)
    options |= {"backend": BACKENDS[name]}
    return jax.jit(partial(ragged_paged_attention, **options))


def run(call: Call, name: str, **changes: Any) -> tuple[np.ndarray, Any]:
    """Output and pages of `call` by the backend `name`, some of its arguments changed."""
    arguments = {
        name: getattr(call, name) for name in ("q", "k", "v", "pages", "rows", "sinks", "slopes", "kv_scales")
    } | {"layer": LAYER, "window": call.case.window} | changes  # fmt: skip
    positional = [arguments.pop(name) for name in ("q", "k", "v", "pages", "layer", "rows")]
    case = call.case
    function = attention(case.scale, case.soft_cap, case.latent_size, case.quantization, name)
    out, pages = function(*positional, **arguments)
    return np.asarray(out), jax.tree.map(np.asarray, pages)


# One of each kind. The others, interpreted for GPUs and TPUs, take half of four minutes.
QUICK = (
    "decode-mqa",
    "decode-window",
    "mixed-any-order",
    "mixed-window",
    "decode-sinks",
    "mixed-int8",
    "mixed-int8-by-token",
    "verify-drafts",
)


def marks_of(case: RaggedCase) -> Sequence[pytest.MarkDecorator]:
    return () if case.name in QUICK else [pytest.mark.slow]


# Of one byte, whose tokens have scales of their own.
BY_TOKEN = tuple(
    replace(case, name=f"{case.name}-by-token", kv_dtype=case.kv_dtype or "int8", by_token=True)
    for case in CASES
    if case.name in ("mixed-int8", "decode-fp8", "mixed-latent")
)
# Of the same programs as cases above.
EMPTY = RowCase(0, 0)
DECODE = RaggedCase(
    "decode", 4, 2, 16, 16, 6, (RowCase(1, 300), RowCase(1, 40), RowCase(1, 90), EMPTY, EMPTY, EMPTY), window=33
)
MIXED = RaggedCase("mixed", 4, 2, 16, 16, 48, (RowCase(1, 300), RowCase(30, 40), RowCase(2, 90)), window=33)
# Parts of them are calls of the programs of DECODE and MIXED. Those of LONG_MIXED cut two rows.
LONG_DECODE = replace(
    DECODE, num_tokens=12, rows=(*DECODE.rows, EMPTY, RowCase(1, 299), RowCase(1, 33), RowCase(1, 65), EMPTY, EMPTY)
)
LONG_MIXED = replace(MIXED, num_tokens=144, rows=(RowCase(1, 300), RowCase(94, 104), RowCase(2, 90)))
# One program instead of twenty small ones.
part_of = jax.jit(RaggedRows.part, static_argnames="num_tokens")


@dataclass(frozen=True)
class Result:
    call: Call
    out: np.ndarray
    pages: Any
    printed: str  # the interpreters print the races that they see


class AttentionSuite:
    """The tests of one backend, whose name a subclass gives."""

    backend: str
    cases: ClassVar[Sequence[RaggedCase]] = (*CASES, *BY_TOKEN)
    bfloat16_cases: ClassVar[Sequence[str]] = ("decode-mqa", "mixed-any-order")  # with decoding, drafts and a prompt
    repeated_cases: ClassVar[Sequence[str]] = ("decode-gqa", "mixed-any-order")
    outputs: ClassVar[dict[tuple[str, str], bytes]] = {}  # of a backend's first run of a case

    @classmethod
    def call(cls, case: RaggedCase, dtype: Any = None) -> Call:
        return make_call(case, dtype or DTYPES[cls.backend], BACKENDS[cls.backend])

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "result" in metafunc.fixturenames:
            cases = [pytest.param(case, marks=marks_of(case), id=case.name) for case in self.cases]
            metafunc.parametrize("result", cases, indirect=True, scope="class")
        if "bfloat16_case" in metafunc.fixturenames:
            metafunc.parametrize("bfloat16_case", self.bfloat16_cases)
        if "repeated_case" in metafunc.fixturenames:
            metafunc.parametrize("repeated_case", self.repeated_cases)

    @pytest.fixture(scope="class")
    @classmethod
    def result(cls, request: pytest.FixtureRequest) -> Result:
        """Each case computed once for all tests."""
        call = cls.call(request.param)
        with redirect_stdout(StringIO()) as printed:
            out, pages = run(call, cls.backend)
        cls.outputs[cls.backend, call.case.name] = out.tobytes()
        return Result(call, out, pages, printed.getvalue())

    def test_equals_dense_attention(self, result: Result) -> None:
        assert result.call.error(result.out) < result.call.tolerance

    def test_nothing_races(self, result: Result) -> None:
        assert "RACE DETECTED" not in result.printed

    def test_padding_is_finite(self, result: Result) -> None:
        assert np.isfinite(result.out).all()

    def test_the_same_bits_on_repeat(self, repeated_case: str) -> None:
        call = self.call(next(case for case in CASES if case.name == repeated_case))
        first = self.outputs.get((self.backend, repeated_case)) or run(call, self.backend)[0].tobytes()
        assert run(call, self.backend)[0].tobytes() == first

    def test_only_the_new_kv_of_this_layer_is_written(self, result: Result) -> None:
        # NaN equal to NaN: nothing else may change, in any page of any layer, but for the trash page, and for positions
        # after the end of a row in a page that the row writes to: nobody reads those before they are written.
        call, size = result.call, result.call.case.page_size
        arrays = [
            [x.astype(np.float32) for x in jax.tree.leaves(held)] for held in (call.pages, call.written, result.pages)
        ]
        for before, expected, pages in zip(*arrays, strict=True):
            for row, pages_of_row in zip(call.case.rows, call.table, strict=True):
                if pages is arrays[2][0] and row.query_len and row.kv_len % size:
                    tail = (LAYER, pages_of_row[row.kv_len // size], slice(None), slice(row.kv_len % size, None))
                    expected[tail] = pages[tail] = 0
            np.testing.assert_array_equal(pages[:, 1:], expected[:, 1:])
            np.testing.assert_array_equal(np.delete(pages, LAYER, 0), np.delete(before, LAYER, 0))

    def test_bfloat16(self, bfloat16_case: str) -> None:
        call = self.call(next(case for case in CASES if case.name == bfloat16_case), jnp.bfloat16)
        out, pages = run(call, self.backend)
        assert out.dtype == pages.dtype == jnp.bfloat16
        assert call.error(out) < call.tolerance  # measured with XLA: 0.005; a bfloat16 has 8 bits

    @pytest.mark.parametrize(
        ("case", "size"),
        [(LONG_DECODE, DECODE.num_tokens), pytest.param(LONG_MIXED, MIXED.num_tokens, marks=pytest.mark.slow)],
        ids=str,
    )
    def test_parts_of_a_batch_one_behind_the_other(self, case: RaggedCase, size: int) -> None:
        call = self.call(case)
        pages, outs = call.pages, []
        for first in range(-size, case.num_tokens, size):  # the first part has no token
            tokens = slice(max(first, 0), max(first, 0) + size)
            part = {name: getattr(call, name)[tokens] for name in "qkv"}
            end = case.num_tokens if first < 0 else min(first + size, case.num_tokens)
            rows = part_of(call.rows, np.int32(first if first >= 0 else end), np.int32(end), num_tokens=size)
            out, pages = run(call, self.backend, pages=pages, rows=rows, **part)
            outs.append(out)
        assert call.error(np.concatenate(outs[1:])) < call.tolerance

    @pytest.mark.parametrize("case", [DECODE, MIXED], ids=str)
    def test_pages_that_left_the_window_may_hold_anything(self, case: RaggedCase) -> None:
        # As a cache does that frees them: the trash page stands for some, the others are somebody else's by now.
        call = self.call(case)
        table, pages = call.table.copy(), call.pages.copy()
        for row, of_row in zip(case.rows, table, strict=True):
            first_seen = max(row.kv_len - row.query_len - case.window + 1, 0) // case.page_size
            pages[:, of_row[:first_seen]] = np.nan
            of_row[: first_seen // 2] = 0
        assert np.isnan(pages[:, 0]).all() and (table[:, 0] == 0).any()
        out, _ = run(replace(call, table=table), self.backend, pages=pages)
        assert call.error(out) < call.tolerance

    @pytest.mark.parametrize("case", [DECODE, MIXED], ids=str)
    def test_a_row_of_nan_does_not_infect_others(self, case: RaggedCase) -> None:
        call = self.call(case)
        # The longest row: buffers that it fills are not filled again by shorter ones.
        sick = max(range(len(case.rows)), key=lambda row: case.rows[row].kv_len)
        pages = call.pages.copy()
        pages[LAYER, call.table[sick, : -(-case.rows[sick].kv_len // case.page_size)]] = np.nan
        tokens = slice(case.first_token(sick), case.first_token(sick) + case.rows[sick].query_len)
        out = run(call, self.backend, pages=pages)[0].copy()
        assert np.isnan(out[tokens]).all()
        out[tokens] = call.expected[tokens]
        assert call.error(out) < call.tolerance

    def test_reads_what_another_layer_has_written(self) -> None:
        call = self.call(DECODE)
        out, pages = run(call, self.backend, pages=call.written, k=None, v=None)
        assert call.error(out) < call.tolerance
        of_pages, of_written = (x[:, 1:].astype(np.float32) for x in (pages, call.written))  # NaN is equal to NaN
        np.testing.assert_array_equal(of_pages, of_written)

    def test_pages_struct_is_what_the_call_takes(self) -> None:
        call = make_call(DECODE, backend=BACKENDS[self.backend])
        size, dtype = DECODE.head_size, jnp.dtype(jnp.float32)
        struct = kv_pages_struct(LAYERS, call.pages.shape[1], DECODE.page_size, 2, size, dtype, BACKENDS[self.backend])
        assert (struct.shape, struct.dtype) == (call.pages.shape, call.pages.dtype)


class CompiledSuite(AttentionSuite):
    """The tests of a kernel that is compiled quickly.

    To a call, the layer and the window are data. Scans over layers with the other kernels are compiled by the real
    compilers in test_deviceless.py, and run, interpreted, within models in tests/engine/test_attention_backends.py.
    """

    def test_inside_a_scan_over_layers(self) -> None:
        case, call = MIXED, self.call(MIXED)
        windows = [NO_WINDOW, case.window, 7]

        @partial(jax.jit, donate_argnums=3)
        def scan(q: jax.Array, k: jax.Array, v: jax.Array, pages: jax.Array, rows: RaggedRows) -> Any:
            def layer_step(pages: jax.Array, xs: Any) -> Any:
                layer, window = xs
                out, pages = ragged_paged_attention(
                    q, k, v, pages, layer, rows, scale=case.scale, window=window, backend=BACKENDS[self.backend]
                )
                return pages, out

            return jax.lax.scan(layer_step, pages, (jnp.arange(LAYERS), jnp.asarray(windows, jnp.int32)))

        pages, outs = scan(call.q, call.k, call.v, jnp.asarray(call.pages), call.rows)
        assert call.error(outs[LAYER]) < call.tolerance
        for layer, window in enumerate(windows):
            out, alone = run(call, self.backend, layer=layer, window=window)
            np.testing.assert_allclose(outs[layer][call.real], out[call.real], rtol=call.tolerance, atol=call.tolerance)
            scanned, of_layer, before = (x[layer, 1:].astype(np.float32) for x in (pages, alone, call.pages))
            np.testing.assert_array_equal(scanned, of_layer)
            assert not np.array_equal(of_layer, before, equal_nan=True), "nothing was written"


# Several tiles of one prompt, in the program of another case: its row that decodes makes the page table as wide.
MQA = next(case for case in CASES if case.name == "mixed-mqa")
WHOLE = replace(MQA, name="prefill-whole", rows=(MQA.rows[1], RowCase(200, 200), *[EMPTY] * (len(MQA.rows) - 2)))


# Rows that decode read FP8 in "mixed-fp8", too, and the decode form has bytes in "decode-int8". Those of "mixed-slopes"
# or of `test_tpu` have slopes, and those of "mixed-int8-by-token" scales of tokens.
ALIKE = ("decode-fp8", "decode-slopes", "decode-fp8-by-token")


def interpreted(*dropped: str) -> Sequence[RaggedCase]:
    """CASES for a kernel that is interpreted, without those `dropped`: a program takes five seconds of the CPU."""
    cases = {case.name: case for case in (*CASES, *BY_TOKEN)}
    assert {*ALIKE, *dropped} < cases.keys()
    return [WHOLE if name == WHOLE.name else cases[name] for name in cases if name not in (*ALIKE, *dropped)]


class InterpretedSuite(AttentionSuite):
    """The tests of a kernel that is interpreted, of fewer programs than a kernel that is compiled quickly."""

    bfloat16_cases = ("mixed-any-order",)  # the decode form: in the file of what only this kernel has
    repeated_cases = ("decode-window", "mixed-int8")  # fewer tokens, but several rows and tiles
