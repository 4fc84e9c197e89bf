"""Ragged paged attention against a dense float64 oracle, with NaN in everything that no row owns."""

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

LAYERS, LAYER = 3, 1
TOLERANCE = 1e-5  # measured: at most 6.2e-7 with XLA on CPU
# Every mutation must be this much worse than what is allowed.
VISIBLE = 100 * TOLERANCE


@dataclass(frozen=True)
class Call:
    """The arguments of one call, the whole context of each row behind it, and what must come out."""

    case: RaggedCase
    q: np.ndarray  # [T, H, D]
    k: np.ndarray  # [T, K, D]
    v: np.ndarray  # [T, K, D]
    pages: np.ndarray  # [L, P, 2, K, S, D]: LAYER lacks this step's KV
    written: np.ndarray  # the same with it
    table: np.ndarray  # [R, max_pages]
    expected: np.ndarray  # f64[T, H, D]
    real: np.ndarray  # bool[T]

    @property
    def rows(self) -> RaggedRows:
        starts = np.asarray([row.kv_len - row.query_len for row in self.case.rows], np.int32)
        lengths = np.asarray([row.query_len for row in self.case.rows], np.int32)
        return RaggedRows.build(jnp.asarray(self.table), starts, jnp.asarray(lengths), self.case.num_tokens)

    def error(self, out: Any) -> float:
        """The worst relative error of a token's head; NaN counts as infinite."""
        out = np.asarray(out, np.float64)
        assert out.shape == self.expected.shape
        difference = np.linalg.norm(out - self.expected, axis=-1)[self.real]
        worst = (difference / np.linalg.norm(self.expected, axis=-1)[self.real]).max()
        return float(np.nan_to_num(worst, nan=np.inf))


def dense(q: np.ndarray, k: np.ndarray, v: np.ndarray, case: RaggedCase) -> np.ndarray:
    """f64[t, H, D] for the last t positions of a context of s: q [t, H, D], k and v [s, K, D]."""
    group = case.num_heads // case.num_kv_heads
    k, v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    logits = np.einsum("thd,shd->hts", q.astype(np.float64), k) * case.scale
    if case.soft_cap is not None:
        logits = case.soft_cap * np.tanh(logits / case.soft_cap)
    at, query = np.arange(len(k)), np.arange(len(k) - len(q), len(k))[:, None]
    logits = np.where((at <= query) & (at > query - case.window), logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("hts,shd->thd", weights / weights.sum(-1, keepdims=True), v)


def make_call(case: RaggedCase, dtype: Any = np.float32, seed: int = 0) -> Call:
    rng = np.random.default_rng(seed)
    T, H, K, D, S = case.num_tokens, case.num_heads, case.num_kv_heads, case.head_size, case.page_size

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(dtype)

    free = rng.permutation(np.arange(1, case.num_pages)).tolist()
    unowned = free.pop()
    pages = np.full((LAYERS, case.num_pages, 2, K, S, D), np.nan, dtype)
    written = pages.copy()
    table = np.full((len(case.rows), case.max_pages), unowned, np.int32)
    # Queries of padding are finite, as a model's are. Their keys and values are written to the trash page: NaN.
    q, k, v = normal(T, H, D), np.full((T, K, D), np.nan, dtype), np.full((T, K, D), np.nan, dtype)
    expected, real = np.zeros((T, H, D)), np.zeros(T, np.bool_)
    for index, row in enumerate(case.rows):
        mine = [free.pop() for _ in range(-(-row.kv_len // S))]
        table[index, : len(mine)] = mine
        for layer in range(LAYERS):
            context = normal(2, row.kv_len, K, D)
            for position in range(row.kv_len):
                at = (layer, mine[position // S], slice(None), slice(None), position % S)
                written[at] = context[:, position]
                if layer != LAYER or position < row.kv_len - row.query_len:
                    pages[at] = context[:, position]
            if layer == LAYER and row.query_len:
                tokens = slice(case.first_token(index), case.first_token(index) + row.query_len)
                k[tokens], v[tokens] = context[:, row.kv_len - row.query_len :]
                expected[tokens] = dense(q[tokens], *context, case)
                real[tokens] = True
    assert not free
    return Call(case, q, k, v, pages, written, table, expected, real)


def attention(case: RaggedCase) -> Callable[..., Any]:
    """The jitted call of (q, k, v, pages, rows), layer and window known to the compiler."""
    options = {"scale": case.scale, "soft_cap": case.soft_cap, "window": case.window}
    return jax.jit(lambda q, k, v, pages, rows: ragged_paged_attention(q, k, v, pages, LAYER, rows, **options))


@cache
def traced_attention(case: RaggedCase) -> Callable[..., Any]:
    """The jitted call of (q, k, v, pages, layer, rows, window=...)."""
    return jax.jit(partial(ragged_paged_attention, scale=case.scale, soft_cap=case.soft_cap))


@dataclass(frozen=True)
class Result:
    call: Call
    out: np.ndarray
    pages: np.ndarray
    again: np.ndarray


@pytest.fixture(scope="module", params=CASES, ids=str)
def result(request: pytest.FixtureRequest) -> Result:
    """Each case computed once for all tests of this module."""
    call = make_call(request.param)
    run = attention(call.case)
    arguments = (call.q, call.k, call.v, call.pages, call.rows)
    out, pages = jax.tree.map(np.asarray, run(*arguments))
    return Result(call, out, pages, np.asarray(run(*arguments)[0]))


def test_equals_dense_attention(result: Result) -> None:
    assert result.call.error(result.out) < TOLERANCE


def test_padding_is_finite(result: Result) -> None:
    assert np.isfinite(result.out).all()


def test_the_same_bits_on_repeat(result: Result) -> None:
    assert result.out.tobytes() == result.again.tobytes()


def test_only_the_new_kv_of_this_layer_is_written(result: Result) -> None:
    # All but the trash page, NaN equal to NaN: nothing else may change, in any page of any layer.
    np.testing.assert_array_equal(result.pages[:, 1:], result.call.written[:, 1:])
    np.testing.assert_array_equal(np.delete(result.pages, LAYER, 0), np.delete(result.call.pages, LAYER, 0))


@pytest.mark.parametrize("name", ["decode-mqa", "mixed-any-order"])
def test_bfloat16(name: str) -> None:
    call = make_call(next(case for case in CASES if case.name == name), jnp.bfloat16)
    out, pages = attention(call.case)(call.q, call.k, call.v, call.pages, call.rows)
    assert out.dtype == pages.dtype == jnp.bfloat16
    assert call.error(out) < 0.02  # measured: 0.005; a bfloat16 has 8 bits


DECODE = RaggedCase("decode", 4, 2, 16, 16, 3, (RowCase(1, 300), RowCase(1, 40), RowCase(1, 90)), window=33)
MIXED = RaggedCase("mixed", 4, 2, 16, 16, 48, (RowCase(1, 300), RowCase(30, 40), RowCase(2, 90)), window=33)


def swap_k_and_v(call: Call) -> Call:
    return replace(call, k=call.v, v=call.k, pages=call.pages[:, :, ::-1])


def k_for_v(call: Call) -> Call:
    # JAX's own test of paged attention passes with this.
    pages = call.pages.copy()
    pages[:, :, 1] = pages[:, :, 0]
    return replace(call, v=call.k, pages=pages)


def swap_pages_of_the_first_row(call: Call) -> Call:
    # Row 0 sees positions 267 to 299: the end of page 16, all of page 17. Two pages seen whole could be swapped.
    table = call.table.copy()
    table[0, [16, 17]] = table[0, [17, 16]]
    return replace(call, table=table)


@pytest.mark.parametrize("case", [DECODE, MIXED], ids=str)
def test_the_metric_sees_mutations(case: RaggedCase) -> None:
    call = make_call(case)
    dropped = replace(call.rows, kv_lens=call.rows.kv_lens - case.page_size)
    swapped, repeated, disordered = (make(call) for make in (swap_k_and_v, k_for_v, swap_pages_of_the_first_row))
    q, k, v, pages, rows, window = call.q, call.k, call.v, call.pages, call.rows, case.window
    run = traced_attention(case)
    outs = {
        "none": run(q, k, v, pages, LAYER, rows, window=window),
        "k and v swapped": run(q, swapped.k, swapped.v, swapped.pages, LAYER, rows, window=window),
        "k read for v": run(q, repeated.k, repeated.v, repeated.pages, LAYER, rows, window=window),
        "last page dropped": run(q, k, v, pages, LAYER, dropped, window=window),
        "pages out of order": run(q, k, v, pages, LAYER, disordered.rows, window=window),
        "window one longer": run(q, k, v, pages, LAYER, rows, window=window + 1),
        "window one shorter": run(q, k, v, pages, LAYER, rows, window=window - 1),
        "wrong layer": run(q, k, v, pages, LAYER + 1, rows, window=window),
        "scale": run(q * np.float32(1.01), k, v, pages, LAYER, rows, window=window),
    }
    errors = {name: call.error(out) for name, (out, _) in outs.items()}
    assert errors.pop("none") < TOLERANCE
    assert min(errors.values()) > VISIBLE, errors


def test_inside_a_scan_over_layers() -> None:
    windows = [NO_WINDOW, MIXED.window, 7]
    call = make_call(MIXED)
    assert windows[LAYER] == MIXED.window

    @partial(jax.jit, donate_argnums=3)
    def run(q: jax.Array, k: jax.Array, v: jax.Array, pages: jax.Array, rows: RaggedRows) -> Any:
        def layer_step(pages: jax.Array, xs: Any) -> Any:
            layer, window = xs
            out, pages = ragged_paged_attention(
                q, k, v, pages, layer, rows, scale=MIXED.scale, soft_cap=None, window=window
            )
            return pages, out

        return jax.lax.scan(layer_step, pages, (jnp.arange(LAYERS), jnp.asarray(windows, jnp.int32)))

    pages, outs = run(call.q, call.k, call.v, jnp.asarray(call.pages), call.rows)
    assert call.error(outs[LAYER]) < TOLERANCE
    for layer, window in enumerate(windows):
        out, alone = traced_attention(MIXED)(call.q, call.k, call.v, call.pages, layer, call.rows, window=window)
        np.testing.assert_allclose(outs[layer], out, rtol=1e-5, atol=1e-6)
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


def test_pages_struct_is_what_the_call_takes() -> None:
    call = make_call(DECODE)
    struct = kv_pages_struct(LAYERS, DECODE.num_pages, DECODE.page_size, 2, DECODE.head_size, jnp.dtype(jnp.float32))
    assert (struct.shape, struct.dtype) == (call.pages.shape, call.pages.dtype)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": (48, 1, 16)}, "do not fit pages of 2 heads of size 16"),
        ({"v": (48, 2, 12)}, "do not fit pages of 2 heads of size 16"),
        ({"q": (48, 4, 12), "k": (48, 2, 12), "v": (48, 2, 12)}, "do not fit pages of 2 heads of size 16"),
        ({"q": (48, 3, 16)}, "3 query heads are not a multiple of 2 KV heads"),
        ({"q": (47, 4, 16), "k": (47, 2, 16), "v": (47, 2, 16)}, "rows describe 48 tokens, q has 47"),
        ({"pages": (3, 9, 3, 2, 16, 16)}, "pages must hold keys and values"),
    ],
)
def test_shapes_that_do_not_agree_are_refused(change: dict[str, tuple[int, ...]], message: str) -> None:
    call = make_call(MIXED)
    shapes = {"q": call.q.shape, "k": call.k.shape, "v": call.v.shape, "pages": call.pages.shape} | change
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(
            attention(MIXED), *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes.values()), call.rows
        )


def test_dtypes_that_differ_are_refused() -> None:
    call = make_call(MIXED)
    with pytest.raises(ValueError, match="dtypes differ: q bfloat16, k float32"):
        attention(MIXED)(call.q.astype(jnp.bfloat16), call.k, call.v, call.pages, call.rows)


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
