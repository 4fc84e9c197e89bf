"""Ragged paged attention of every backend against a dense float64 oracle, NaN in everything that no row owns."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention import NO_WINDOW, RaggedRows, kv_pages_struct, ragged_paged_attention
from pallas_kernels.ragged_paged_attention.cases import CASES, RaggedCase, RowCase
from tests.pallas_kernels.attention_call import BACKENDS, DTYPES, LAYER, LAYERS, Call, make_call

# A mutation must be this many times worse than what is allowed.
VISIBLE = {"reference": 100, "tpu": 100, "gpu": 5}


@cache
def attention(case: RaggedCase, name: str) -> Callable[..., Any]:
    """The jitted call of (q, k, v, pages, layer, rows, window=..., sinks=..., kv_scales=...)."""
    return jax.jit(
        partial(ragged_paged_attention, scale=case.scale, soft_cap=case.soft_cap, backend=BACKENDS[name]),
        static_argnames="window",
    )


def run(call: Call, name: str, **changes: Any) -> tuple[np.ndarray, np.ndarray]:
    """Output and pages of `call` by the backend `name`, some of its arguments changed."""
    arguments = {
        name: getattr(call, name) for name in ("q", "k", "v", "pages", "rows", "sinks", "kv_scales")
    } | {"layer": LAYER, "window": call.case.window} | changes  # fmt: skip
    positional = [arguments.pop(name) for name in ("q", "k", "v", "pages", "layer", "rows")]
    out, pages = attention(call.case, name)(*positional, **arguments)
    return np.asarray(out), np.asarray(pages)


@dataclass(frozen=True)
class Result:
    call: Call
    out: np.ndarray
    pages: np.ndarray
    again: np.ndarray


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> RaggedCase:
    return request.param


@pytest.fixture(scope="module", params=list(BACKENDS))
def result(request: pytest.FixtureRequest, case: RaggedCase) -> Result:
    """Each case computed once by each backend for all tests of this module."""
    name = request.param
    call = make_call(case, DTYPES[name], BACKENDS[name])
    out, pages = run(call, name)
    return Result(call, out, pages, run(call, name)[0])


def test_equals_dense_attention(result: Result) -> None:
    assert result.call.error(result.out) < result.call.tolerance


def test_padding_is_finite(result: Result) -> None:
    assert np.isfinite(result.out).all()


def test_the_same_bits_on_repeat(result: Result) -> None:
    assert result.out.tobytes() == result.again.tobytes()


def test_only_the_new_kv_of_this_layer_is_written(result: Result) -> None:
    # NaN equal to NaN: nothing else may change, in any page of any layer, but for the trash page, and for positions
    # behind the end of a row in a page that the row writes to: nobody reads those before they are written.
    call, size = result.call, result.call.case.page_size
    before, expected, pages = (x.astype(np.float32) for x in (call.pages, call.written, result.pages))
    for row, pages_of_row in zip(call.case.rows, call.table, strict=True):
        if row.query_len and row.kv_len % size:
            tail = (LAYER, pages_of_row[row.kv_len // size], slice(None), slice(row.kv_len % size, None))
            expected[tail] = pages[tail] = 0
    np.testing.assert_array_equal(pages[:, 1:], expected[:, 1:])
    np.testing.assert_array_equal(np.delete(pages, LAYER, 0), np.delete(before, LAYER, 0))


@pytest.mark.parametrize("backend", list(BACKENDS))
@pytest.mark.parametrize("name", ["decode-mqa", "mixed-any-order"])
def test_bfloat16(name: str, backend: str) -> None:
    call = make_call(next(case for case in CASES if case.name == name), jnp.bfloat16, BACKENDS[backend])
    out, pages = run(call, backend)
    assert out.dtype == pages.dtype == jnp.bfloat16
    assert call.error(out) < call.tolerance  # measured with XLA: 0.005; a bfloat16 has 8 bits


DECODE = RaggedCase("decode", 4, 2, 16, 16, 3, (RowCase(1, 300), RowCase(1, 40), RowCase(1, 90)), window=33)
MIXED = RaggedCase("mixed", 4, 2, 16, 16, 48, (RowCase(1, 300), RowCase(30, 40), RowCase(2, 90)), window=33)


def swap_k_and_v(call: Call) -> Call:
    return replace(call, k=call.v, v=call.k, pages=np.roll(call.pages, call.pages.shape[-1] // 2, -1))


def k_for_v(call: Call) -> Call:
    # JAX's own test of paged attention passes with this.
    pages, width = call.pages.copy(), call.pages.shape[-1] // 2
    pages[..., width:] = pages[..., :width]
    return replace(call, v=call.k, pages=pages)


def swap_pages_of_the_first_row(call: Call) -> Call:
    # Row 0 sees positions 267 to 299: the end of page 16, all of page 17. Two pages seen whole could be swapped.
    table = call.table.copy()
    table[0, [16, 17]] = table[0, [17, 16]]
    return replace(call, table=table)


@pytest.mark.parametrize("backend", list(BACKENDS))
@pytest.mark.parametrize("case", [DECODE, MIXED], ids=str)
def test_the_metric_sees_mutations(case: RaggedCase, backend: str) -> None:
    call = make_call(case, DTYPES[backend], BACKENDS[backend])
    window, rows = case.window, call.rows
    mutated = {
        "k and v swapped": run(swap_k_and_v(call), backend),
        "k read for v": run(k_for_v(call), backend),
        "last page dropped": run(call, backend, rows=replace(rows, kv_lens=rows.kv_lens - case.page_size)),
        "pages out of order": run(swap_pages_of_the_first_row(call), backend),
        "window one longer": run(call, backend, window=window + 1),
        "window one shorter": run(call, backend, window=window - 1),
        "wrong layer": run(call, backend, layer=LAYER + 1),
        "scale": run(call, backend, q=(call.q * 1.1).astype(call.q.dtype)),
    }
    assert call.error(run(call, backend)[0]) < call.tolerance
    errors = {name: call.error(out) for name, (out, _) in mutated.items()}
    assert min(errors.values()) > VISIBLE[backend] * call.tolerance, errors


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_inside_a_scan_over_layers(backend: str) -> None:
    windows = [NO_WINDOW, MIXED.window, 7]
    call = make_call(MIXED, DTYPES[backend], BACKENDS[backend])
    assert windows[LAYER] == MIXED.window

    @partial(jax.jit, donate_argnums=3)
    def scan(q: jax.Array, k: jax.Array, v: jax.Array, pages: jax.Array, rows: RaggedRows) -> Any:
        def layer_step(pages: jax.Array, xs: Any) -> Any:
            layer, window = xs
            out, pages = ragged_paged_attention(
                q, k, v, pages, layer, rows, scale=MIXED.scale, window=window, backend=BACKENDS[backend]
            )
            return pages, out

        return jax.lax.scan(layer_step, pages, (jnp.arange(LAYERS), jnp.asarray(windows, jnp.int32)))

    pages, outs = scan(call.q, call.k, call.v, jnp.asarray(call.pages), call.rows)
    assert call.error(outs[LAYER]) < call.tolerance
    for layer, window in enumerate(windows):
        out, alone = run(call, backend, layer=layer, window=window)
        np.testing.assert_allclose(outs[layer][call.real], out[call.real], rtol=call.tolerance, atol=call.tolerance)
        np.testing.assert_array_equal(pages[layer, 1:], alone[layer, 1:])


def test_which_token_belongs_to_which_row() -> None:
    table = jnp.zeros((4, 1), jnp.int32)
    starts, lengths = np.asarray([7, 0, 20, 0], np.int32), jnp.asarray([1, 0, 3, 0], jnp.int32)
    mixed = RaggedRows.build(table, starts, lengths, 6)
    assert not mixed.decode_only
    assert mixed.query_starts.tolist() == [0, 1, 1, 4, 4]
    assert mixed.query_lens().tolist() == [1, 0, 3, 0]
    assert mixed.kv_lens.tolist() == [8, 0, 23, 0]
    assert mixed.token_rows.tolist() == [0, 2, 2, 2, 3, 3]
    assert mixed.positions.tolist() == [7, 20, 21, 22, 0, 0]
    assert mixed.is_real().tolist() == [True] * 4 + [False] * 2
    decode = RaggedRows.build(table, starts, jnp.minimum(lengths, 1), 4)
    assert decode.decode_only
    assert decode.query_starts.tolist() == [0, 1, 2, 3, 4]
    assert decode.query_lens().tolist() == [1, 0, 1, 0]
    assert decode.positions.tolist() == [7, 0, 20, 0]
    assert decode.is_real().tolist() == [True, False, True, False]


@pytest.mark.parametrize("backend", list(BACKENDS))
def test_pages_struct_is_what_the_call_takes(backend: str) -> None:
    call = make_call(DECODE, backend=BACKENDS[backend])
    struct = kv_pages_struct(
        LAYERS, DECODE.num_pages, DECODE.page_size, 2, DECODE.head_size, jnp.dtype(jnp.float32), BACKENDS[backend]
    )
    assert (struct.shape, struct.dtype) == (call.pages.shape, call.pages.dtype)


def abstract_call(**changes: Any) -> Any:
    """The shapes that a call of MIXED returns, some arguments replaced by (shape, dtype)."""
    call = make_call(MIXED)
    names = ("q", "k", "v", "pages")
    specs = {name: (getattr(call, name).shape, jnp.float32) for name in names} | changes
    structs = {name: jax.ShapeDtypeStruct(*spec) for name, spec in specs.items()}
    positional = [structs.pop(name) for name in names]
    return jax.eval_shape(
        partial(ragged_paged_attention, scale=1.0, window=NO_WINDOW), *positional, LAYER, call.rows, **structs
    )


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"k": (48, 1, 16)}, "do not fit pages of 2 heads"),
        ({"v": (48, 2, 12)}, "do not fit pages of 2 heads"),
        ({"q": (48, 4, 12), "k": (48, 2, 12), "v": (48, 2, 12)}, "pages must be 24 wide"),
        ({"q": (48, 3, 16)}, "3 query heads are not a multiple of 2 KV heads"),
        ({"q": (47, 4, 16), "k": (47, 2, 16), "v": (47, 2, 16)}, "rows describe 48 tokens, q has 47"),
        ({"pages": (3, 9, 2, 2, 16, 32)}, r"pages must be \[layers, pages, KV heads"),
        ({"sinks": (2,)}, "one logit for each of 4 query heads"),
        ({"kv_scales": (2, 2)}, "kv_scales are for quantized pages"),
    ],
)
def test_shapes_that_do_not_agree_are_refused(shapes: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        abstract_call(**{name: (shape, jnp.float32) for name, shape in shapes.items()})


def test_a_page_table_of_other_rows_is_refused() -> None:
    call = make_call(MIXED)
    rows = replace(call.rows, page_table=call.rows.page_table[:-1])
    with pytest.raises(ValueError, match=r"a page table \(2, 20\) .* do not fit 3 rows"):
        run(call, "reference", rows=rows)


@pytest.mark.parametrize(
    ("dtypes", "message"),
    [
        ({"q": jnp.bfloat16}, "dtypes differ: q bfloat16, k float32"),
        ({"pages": jnp.bfloat16}, "pages must be of q's dtype float32 or one of int8, .* not bfloat16"),
    ],
)
def test_dtypes_that_differ_are_refused(dtypes: dict[str, Any], message: str) -> None:
    call = make_call(MIXED)
    with pytest.raises(ValueError, match=message):
        abstract_call(**{name: (getattr(call, name).shape, dtype) for name, dtype in dtypes.items()})


def test_scales_of_other_heads_are_refused() -> None:
    pages = (make_call(MIXED).pages.shape, jnp.int8)
    abstract_call(pages=pages, kv_scales=((2, 2), jnp.float32))
    with pytest.raises(ValueError, match=r"kv_scales must be \[2, 2\]"):
        abstract_call(pages=pages, kv_scales=((2, 4), jnp.float32))


@pytest.mark.parametrize("lengths", [(2, 1), (0, 1), (-1, 3)])
def test_a_row_that_cannot_be_is_refused(lengths: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="a row needs"):
        RowCase(*lengths)


def test_a_case_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="case small: 3 queries in 1 rows, 2 tokens"):
        RaggedCase("small", 4, 2, 16, 16, 2, (RowCase(3, 3),))


def test_the_cases_cover_what_they_promise() -> None:
    rows = [row for case in CASES for row in case.rows]
    assert len({case.name for case in CASES}) == len(CASES)
    assert {16, 32, 64, 128} <= {case.page_size for case in CASES}
    assert any(case.is_decode for case in CASES) and any(not case.is_decode for case in CASES)
    assert any(case.window < case.page_size or case.window < 64 for case in CASES)
    assert any(row.kv_len == 256 for row in rows) and any(row.kv_len > 1024 for row in rows)
    for form in (True, False):
        alike = [case for case in CASES if case.is_decode is form]
        assert any(case.sinks for case in alike)
        assert {"int8", "float8_e4m3fn"} <= {case.kv_dtype for case in alike}
