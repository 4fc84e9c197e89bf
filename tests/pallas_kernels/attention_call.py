"""One call of ragged paged attention: its arguments, NaN in everything no row owns, and what must come out."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.backend import INTERPRETED_TPU, REFERENCE, Backend
from pallas_kernels.chips import chip_named
from pallas_kernels.cpu.host import host_chip
from pallas_kernels.ragged_paged_attention import RaggedRows, ScaledPages
from pallas_kernels.ragged_paged_attention.cases import RaggedCase
from pallas_kernels.ragged_paged_attention.layout import RowLayout, scale_shape
from tests.pallas_kernels.cpu_chips import WITH_AMX, narrower
from tests.pallas_kernels.gpu_here import INTERPRETED

LAYERS, LAYER = 3, 1
# The table's columns and the pool's tokens are multiples of these: what little one case has more than another of the
# same heads, tokens and rows does not make it another program. What is added is NaN and nobody's.
TABLE_PAGES, POOL_TOKENS = 32, 1024
BACKENDS = {
    "reference": REFERENCE,
    "tpu": Backend("tpu", chip_named(INTERPRETED_TPU), interpret=True),
    "gpu": Backend.of_device("interpret-gpu" if INTERPRETED else "gpu", jax.devices()[0], jnp.dtype(jnp.float16)),
    "cpu": Backend("cpu", host_chip()),
    # Vectors of other CPUs.
    "cpu-8": Backend("cpu", narrower(8)),
    "cpu-4": Backend("cpu", narrower(4)),
    "cpu-amx": Backend("cpu", WITH_AMX),
}
# Matrix units of GPUs and tiles of CPUs take 16 bits. Errors measured: 6.2e-7 with XLA on CPU in float32.
DTYPES = dict.fromkeys(BACKENDS, np.float32) | {"gpu": np.float16, "cpu-amx": ml_dtypes.bfloat16}
TOLERANCES = {np.dtype(np.float32): 1e-5, np.dtype(np.float16): 3e-3, np.dtype(ml_dtypes.bfloat16): 0.02}


# One program instead of twenty small ones.
build_rows = jax.jit(RaggedRows.build, static_argnames="num_tokens")


@dataclass(frozen=True)
class Call:
    """The arguments of one call, by which each row has computed its whole context, and what must come out."""

    case: RaggedCase
    q: np.ndarray  # [T, H, D]
    k: np.ndarray  # [T, K, D]
    v: np.ndarray | None  # [T, K, D]; None: the end of k
    pages: Any  # [L, P, K, S, W], with scales where tokens have some: LAYER lacks this step's KV
    written: Any  # the same with it
    table: np.ndarray  # [R, max_pages]
    sinks: np.ndarray | None  # f32[H]
    slopes: np.ndarray | None  # f32[H]
    kv_scales: np.ndarray | None  # f32[2, K]
    expected: np.ndarray  # f64[T, H, D], or [T, H, size of a latent]
    real: np.ndarray  # bool[T]

    @property
    def rows(self) -> RaggedRows:
        starts = np.asarray([row.kv_len - row.query_len for row in self.case.rows], np.int32)
        lengths = np.asarray([row.query_len for row in self.case.rows], np.int32)
        return build_rows(self.table, starts, lengths, self.case.num_tokens)

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.q.dtype]

    def error(self, out: Any) -> float:
        """The worst relative error of a token's head; NaN counts as infinite."""
        out = np.asarray(out, np.float64)
        assert out.shape == self.expected.shape
        difference = np.linalg.norm(out - self.expected, axis=-1)[self.real]
        worst = (difference / np.linalg.norm(self.expected, axis=-1)[self.real]).max()
        return float(np.nan_to_num(worst, nan=np.inf))


def dense(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    case: RaggedCase,
    sinks: np.ndarray | None,
    slopes: np.ndarray | None,
) -> np.ndarray:
    """f64[t, H, D] for the last t positions of a context of s: q [t, H, D], k and v [s, K, D]."""
    group = case.num_heads // case.num_kv_heads
    k, v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    logits = np.einsum("thd,shd->hts", q.astype(np.float64), k) * case.scale
    if case.soft_cap is not None:
        logits = case.soft_cap * np.tanh(logits / case.soft_cap)
    at, query = np.arange(len(k)), np.arange(len(k) - len(q), len(k))[:, None]
    if slopes is not None:
        logits = logits - slopes.astype(np.float64)[:, None, None] * (query - at)
    logits = np.where((at <= query) & (at > query - case.window), logits, -np.inf)
    weights = np.exp(logits)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks.astype(np.float64))[:, None, None]
    return np.einsum("hts,shd->thd", weights / total, v)


def round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def make_call(
    case: RaggedCase,
    dtype: Any = np.float32,
    backend: Backend = REFERENCE,
    seed: int = 0,
    *,
    first_wins: bool = False,
) -> Call:
    """A call of random numbers. With `first_wins` a row's first token has a weight near 1 and a value near 0, and each
    of the others a weight of 1e-5."""
    rng = np.random.default_rng(seed)
    T, H, K, D, S = case.num_tokens, case.num_heads, case.num_kv_heads, case.head_size, case.page_size
    layout = RowLayout.of(D, case.latent_size, backend)
    value = slice(None) if case.latent_size is None else slice(D - case.latent_size, None)
    dtype = np.dtype(dtype)
    stored = np.dtype(jnp.dtype(case.kv_dtype or dtype))
    held = stored if case.quantization is None else case.quantization.held_in(backend)
    by_head = case.kv_dtype is not None and not case.by_token
    scales = rng.uniform(0.01, 0.03, (2, K)).astype(np.float32) if by_head else None
    if scales is not None and case.latent_size is not None:
        scales[1] = scales[0]  # a value is stored in its key
    # int8 has no NaN; it has one value that is never stored.
    poison = -128 if stored == np.int8 else np.nan

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(dtype)

    def store(kv: np.ndarray, scales: np.ndarray | None) -> np.ndarray:
        """What the pages hold of kv [2, s, K, D], with scales that fit [2, s, K, 1]."""
        if scales is None:
            return kv
        scaled = kv.astype(np.float32) * (1 / scales)
        return (np.clip(np.round(scaled), -127, 127) if stored == np.int8 else scaled).astype(stored)

    num_pages = round_up(case.num_pages, POOL_TOKENS // S)
    free = rng.permutation(np.arange(1, num_pages)).tolist()
    unowned = free.pop()
    pages = np.full((LAYERS, num_pages, K, S, layout.width), poison, stored).view(held)
    written = pages.copy()
    of_head = scale_shape(S, layout.num_scales, backend)
    scales_before = np.full((LAYERS, num_pages, K, math.prod(of_head)), np.nan, np.float32)
    scales_after = scales_before.copy()
    table = np.full((len(case.rows), round_up(case.max_pages, TABLE_PAGES)), unowned, np.int32)
    sinks = rng.standard_normal(H).astype(np.float32) + 1 if case.sinks else None
    slopes = rng.uniform(0.003, 0.3, H).astype(np.float32) if case.slopes else None
    # Queries of padding are finite, as a model's are. Their keys and values are written to the trash page: NaN.
    q, k, v = normal(T, H, D), np.full((T, K, D), np.nan, dtype), np.full((T, K, D), np.nan, dtype)
    q = np.abs(q) if first_wins else q
    expected, real = np.zeros((T, H, case.latent_size or D)), np.zeros(T, np.bool_)
    for index, row in enumerate(case.rows):
        mine = np.asarray([free.pop() for _ in range(-(-row.kv_len // S))], np.int32)
        table[index, : len(mine)] = mine
        positions = np.arange(row.kv_len)
        for layer in range(LAYERS):
            context = normal(2, row.kv_len, K, D)
            if first_wins:
                context = np.stack([context[0] * dtype.type(0.1), np.abs(context[1])])
                context[0, :1], context[1, :1] = 15.2 / D**0.5, context[1, :1] * dtype.type(1e-3)
            if case.latent_size is not None:
                context[1] = context[0]
            own = None if scales is None else scales[:, None, :, None]
            if case.by_token:
                largest = 127 if stored == np.int8 else float(jnp.finfo(stored).max)
                own = np.abs(context.astype(np.float32)).max(-1, keepdims=True) * np.float32(1 / largest)
            kept = store(context, own)
            slab = np.zeros((row.kv_len, K, layout.width), stored)
            if case.latent_size is None:
                slab[..., :D], slab[..., layout.width - layout.value_size :][..., :D] = kept
            else:
                slab[..., layout.width - D :] = kept[0]
            old = row.kv_len if layer != LAYER else row.kv_len - row.query_len
            for target, end in ((written, row.kv_len), (pages, old)):
                target[layer, mine[positions[:end] // S], :, positions[:end] % S] = slab[:end].view(held)
            if case.by_token:
                of_tokens = own[: layout.num_scales, ..., 0].transpose(1, 2, 0)  # [s, K, N]
                for target, end in ((scales_after, row.kv_len), (scales_before, old)):
                    for number in range(layout.num_scales):
                        offsets = positions[:end] % S + number * S
                        target[layer, mine[positions[:end] // S], :, offsets] = of_tokens[:end, :, number]
            if layer == LAYER and row.query_len:
                tokens = slice(case.first_token(index), case.first_token(index) + row.query_len)
                k[tokens], v[tokens] = context[:, row.kv_len - row.query_len :]
                seen = kept.astype(np.float64) * (1 if own is None else own)
                expected[tokens] = dense(q[tokens], seen[0], seen[1][..., value], case, sinks, slopes)
                real[tokens] = True
    assert len(free) == num_pages - case.num_pages
    v = v if case.latent_size is None else None
    before, after = pages, written
    if case.by_token:
        scales_before, scales_after = (x.reshape(*x.shape[:3], *of_head) for x in (scales_before, scales_after))
        before, after = ScaledPages(pages, scales_before), ScaledPages(written, scales_after)
    return Call(case, q, k, v, before, after, table, sinks, slopes, scales, expected, real)
