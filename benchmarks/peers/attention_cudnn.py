"""cuDNN's fused attention through JAX, on contiguous KV and on pages of its own.

`jax.nn.dot_product_attention` has no pages. Each row's keys and values lie together here, which is the easier
problem, and nothing is written. cuDNN's paged form has a wrapper in JAX that is not public. Its pages hold keys and
values apart, and all of them belong to some row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.kernels.dense import DenseBatch
from jaxvllm.bench.kernels.contender import MAX_ERROR, LayerOutcome, relative_error
from jaxvllm.bench.kernels.inputs import layers_of
from jaxvllm.bench.kernels.timing import time_calls
from pallas_kernels.ragged_paged_attention.cases import RaggedCase

# Each layer has its own arrays here and the loop over layers is unrolled, so that no slice of a stack is copied.
MAX_LAYERS = 16

# (q, keys, values) of one layer -> output [B, N, H, D]
type DenseAttend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class CudnnContiguous:
    """`jax.nn.dot_product_attention(implementation="cudnn")`."""

    device: jax.Device
    name: str = "cuDNN, contiguous KV"

    def versions(self) -> Mapping[str, str]:
        return _versions()

    def run(self, case: RaggedCase, dtype: jnp.dtype) -> LayerOutcome:
        _require(self.device, dtype)
        dense = DenseBatch.of(case)

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return jax.nn.dot_product_attention(
                q, k, v, scale=case.scale, is_causal=dense.is_causal, implementation="cudnn"
            )

        shape = (dense.batch, dense.kv_len, case.num_kv_heads, case.head_size)
        return _measure(attend, shape, shape, case, dtype, self.device)


@dataclass(frozen=True)
class CudnnPaged:
    """cuDNN's paged attention, through `jax._src`: it may be gone in the next release."""

    device: jax.Device
    name: str = "cuDNN, paged"

    def versions(self) -> Mapping[str, str]:
        return _versions()

    def run(self, case: RaggedCase, dtype: jnp.dtype) -> LayerOutcome:
        _require(self.device, dtype)
        dense = DenseBatch.of(case)
        try:
            from jax._src.cudnn.fused_attention_stablehlo import MaskType, paged_attention
        except ImportError as error:
            raise NotImplementedError(f"this jax has no wrapper of it: {error}") from error
        row_pages = -(-dense.kv_len // case.page_size)
        num_pages = dense.batch * row_pages
        order = np.random.default_rng(5).permutation(num_pages).reshape(dense.batch, 1, row_pages, 1)
        table = jnp.asarray(order, jnp.int32)

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            out: jax.Array | list[jax.Array] = paged_attention(
                q, k, v,
                q_seqlen=jnp.full(dense.batch, dense.query_len, jnp.int32),
                kv_seqlen=jnp.full(dense.batch, dense.kv_len, jnp.int32),
                page_table_k=table,
                page_table_v=table,
                scale=case.scale,
                mask_type=MaskType.PADDING_CAUSAL if dense.is_causal else MaskType.PADDING,
            )  # fmt: skip
            return out[0] if isinstance(out, list) else out

        pages = (num_pages, case.page_size, case.num_kv_heads, case.head_size)
        contiguous = (dense.batch, row_pages * case.page_size, case.num_kv_heads, case.head_size)
        return _measure(attend, pages, contiguous, case, dtype, self.device, table)


def _require(device: jax.Device, dtype: jnp.dtype) -> None:
    if device.platform != "gpu":
        raise NotImplementedError("no NVIDIA GPU here")
    if dtype.itemsize != 2:
        raise NotImplementedError(f"takes bfloat16 and float16, not {dtype}")


def _versions() -> Mapping[str, str]:
    try:
        from jax._src.cudnn.fused_attention_stablehlo import check_cudnn_version

        return {"cudnn": str(check_cudnn_version())}  # type: ignore[no-untyped-call]
    except (ImportError, RuntimeError, AttributeError):
        return {}


def _measure(
    attend: DenseAttend,
    stored: tuple[int, ...],
    contiguous: tuple[int, ...],
    case: RaggedCase,
    dtype: jnp.dtype,
    device: jax.Device,
    table: jax.Array | None = None,
) -> LayerOutcome:
    """Measures attention over keys and values that lie as `stored`; `contiguous` has those of every row."""
    dense = DenseBatch.of(case)
    layers = min(layers_of(case, dtype, device), MAX_LAYERS)
    keys = iter(jax.random.split(jax.random.key(6), 1 + 2 * layers))
    q = jax.random.normal(next(keys), (dense.batch, dense.query_len, case.num_heads, case.head_size), dtype)
    kv = [tuple(jax.random.normal(next(keys), stored, dtype) for _ in range(2)) for _ in range(layers)]

    @jax.jit
    def run(q: jax.Array, kv: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
        out = attend(q, *kv[0])
        for k, v in kv[1:]:
            # A layer waits for the one before it.
            q, _ = lax.optimization_barrier((q, out))  # type: ignore[no-untyped-call]
            out = attend(q, k, v)
        return out

    error = _error(run(q, kv), q, kv[-1], contiguous, case, table)
    if not error <= MAX_ERROR[dtype]:
        return LayerOutcome.without(f"error {error:.1e}: not timed", error)
    return LayerOutcome(time_calls(lambda: run(q, kv), layers), error, details={"layers": layers})


def _error(
    out: jax.Array,
    q: jax.Array,
    kv: tuple[jax.Array, ...],
    contiguous: tuple[int, ...],
    case: RaggedCase,
    table: jax.Array | None,
) -> float:
    """Returns the error of the last queries of the first row against float64."""
    dense = DenseBatch.of(case)
    group = case.num_heads // case.num_kv_heads

    def first_row(pages: jax.Array) -> np.ndarray:
        row = pages[0] if table is None else pages[table[0, 0, :, 0]].reshape(contiguous[1:])
        return np.repeat(np.asarray(row[: dense.kv_len].astype(jnp.float32), np.float64), group, axis=1)

    k, v = (first_row(x) for x in kv)
    last = np.asarray(q[0, -1].astype(jnp.float32), np.float64)  # [H, D]; sees everything, causal or not
    logits = np.einsum("hd,shd->hs", last, k) * case.scale
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    expected = np.einsum("hs,shd->hd", weights / weights.sum(axis=-1, keepdims=True), v)
    return relative_error(np.asarray(out[0, -1].astype(jnp.float32))[None], expected[None])
