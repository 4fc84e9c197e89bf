"""Contenders in this process that read pages: our kernels, their XLA reference, and a gather with plain attention."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxvllm.bench.kernels.contender import MAX_ERROR, LayerOutcome, relative_error
from jaxvllm.bench.kernels.inputs import Inputs, layers_of, random_pages
from jaxvllm.bench.kernels.timing import TooSlow, time_calls
from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.ragged_paged_attention import KVPages, RaggedRows, codes_of, plan_rows, ragged_paged_attention
from pallas_kernels.ragged_paged_attention.cases import RaggedCase, RowCase

# A contender that is slower than this over all layers runs fewer of them. One that is slower over a single layer is
# left out, because a device is lent only for minutes.
CALL_SECONDS = 0.5
LAYER_SECONDS = 20.0
COMPARED_TOKENS = 256


class AttendLayer(Protocol):
    """Runs one layer: returns attention over the pages with this step's KV in them, and those pages."""

    def __call__(
        self, inputs: Inputs, kv_pages: KVPages, layer: jax.Array | int, rows: RaggedRows
    ) -> tuple[jax.Array, KVPages]: ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class OurAttention:
    """`ragged_paged_attention` with one backend, as an `AttendLayer`."""

    backend: Backend

    def __call__(
        self, inputs: Inputs, kv_pages: KVPages, layer: jax.Array | int, rows: RaggedRows
    ) -> tuple[jax.Array, KVPages]:
        case = inputs.case
        return ragged_paged_attention(
            inputs.q, inputs.k, inputs.v, kv_pages, layer, rows, scale=case.scale, soft_cap=case.soft_cap,
            window=case.window, sinks=inputs.sinks, slopes=inputs.slopes, kv_scales=inputs.kv_scales, plan=inputs.plan,
            backend=self.backend, latent_size=case.latent_size, quantization=case.quantization,
        )  # fmt: skip


@dataclass(frozen=True)
class PagedContender:
    """Checks `attend` on a small case, then times it layer after layer on a case of full size."""

    name: str
    attend: AttendLayer
    backend: Backend  # whose layout the pages have
    device: jax.Device

    def versions(self) -> Mapping[str, str]:
        return {}

    def error(self, case: RaggedCase, dtype: jnp.dtype) -> float:
        """Returns the largest relative error of a token's head, on a small case of the same kind."""
        return _error(self.attend, self.backend, small(case), dtype)

    def run(self, case: RaggedCase, dtype: jnp.dtype) -> LayerOutcome:
        error = self.error(case, dtype)
        if not error <= MAX_ERROR[dtype]:
            return LayerOutcome.without(f"error {error:.1e} is above {MAX_ERROR[dtype]:.0e}: not timed", error)
        inputs = Inputs.random(case, dtype)
        layers = layers_of(case, dtype, self.device)
        state = _LoopArrays(
            random_pages(case, dtype, layers, self.backend),
            jnp.zeros((*inputs.q.shape[:-1], case.value_size), inputs.q.dtype),
        )
        pages_bytes, iterations = sum(x.nbytes for x in jax.tree.leaves(state.kv_pages)), layers
        while True:
            start = time.perf_counter()
            call = _LayerLoop.compile(self.attend, self.backend, state, inputs, iterations)
            compile_seconds = time.perf_counter() - start
            try:
                timing = time_calls(call, iterations, CALL_SECONDS if iterations > 1 else LAYER_SECONDS)
                break
            except TooSlow as slow:
                state = call.state
                if iterations == 1:
                    return LayerOutcome.without(f"one layer takes {slow.seconds:.0f} s: not repeated", error)
                iterations = max(1, int(iterations * CALL_SECONDS / slow.seconds))
        step = -(-case.num_tokens // COMPARED_TOKENS)
        return LayerOutcome(
            timing,
            error,
            outputs=np.asarray(call.state.out[::step].astype(jnp.float32)),
            details={
                "layers": layers,
                "layers_a_call": iterations,
                "compile_seconds": compile_seconds,
                "pages_bytes": pages_bytes,
                "temporary_bytes": call.temporary_bytes,
            },
        )


# Large cases of one kind have the same small case, and all contenders have the same expected values.
@cache
def _error(attend: AttendLayer, backend: Backend, case: RaggedCase, dtype: jnp.dtype) -> float:
    """Returns the error of `attend` against the reference in float32 on the same values."""
    inputs = Inputs.random(case, dtype)
    out = _attend_once(attend, inputs, random_pages(case, dtype, 1, backend))
    real = np.asarray(inputs.rows().is_real())
    return relative_error(out[real], _expected(case, dtype)[real])


@cache
def _expected(case: RaggedCase, dtype: jnp.dtype) -> np.ndarray:
    pages = random_pages(case, dtype, 1, REFERENCE)
    if case.kv_dtype is None:
        pages = codes_of(pages).astype(jnp.float32)
    # GPUs and TPUs multiply float32 with fewer bits by default.
    with jax.default_matmul_precision("highest"):
        return _attend_once(OurAttention(REFERENCE), Inputs.random(case, dtype).in_float32(), pages)


def _attend_once(attend: AttendLayer, inputs: Inputs, kv_pages: KVPages) -> np.ndarray:
    call = jax.jit(lambda inputs, kv_pages: attend(inputs, kv_pages, 0, inputs.rows())[0])
    return np.asarray(call(inputs, kv_pages).astype(jnp.float32))


def small(case: RaggedCase) -> RaggedCase:
    """Returns a case of the same kind that any device can compute in float32 at once, with contexts of all lengths."""
    rows = []
    for index, row in enumerate(case.rows[:8]):
        query_len = min(row.query_len, 450 - 50 * index)
        whole = row.query_len == row.kv_len
        rows.append(RowCase(query_len, query_len if whole else min(row.kv_len, 1000 - 97 * index)))
    queries = sum(row.query_len for row in rows)
    num_tokens = len(rows) if case.is_decode else max(1 + len(rows), queries)
    return replace(case, name="small", rows=tuple(rows), num_tokens=num_tokens)


@dataclass(frozen=True)
class _LoopArrays:
    """The arrays that one call passes to the next."""

    kv_pages: KVPages  # [L, P, K, S, 2 D]
    out: jax.Array  # f[T, H, D]


class _LayerLoop:
    """One dispatch: attention in one layer after the other, with the first layer last.

    As in an engine's step, each layer's arguments are made from the output of the layer before, so it waits for that.
    State is donated, so the pages are updated in place.
    """

    def __init__(self, compiled: jax.stages.Compiled, state: _LoopArrays, inputs: Inputs) -> None:
        self.compiled, self.state, self.inputs = compiled, state, inputs
        memory = compiled.memory_analysis()
        self.temporary_bytes = int(memory.temp_size_in_bytes) if memory else 0

    @classmethod
    def compile(
        cls, attend: AttendLayer, backend: Backend, state: _LoopArrays, inputs: Inputs, iterations: int
    ) -> "_LayerLoop":
        def run(kv_pages: KVPages, out: jax.Array, inputs: Inputs) -> tuple[KVPages, jax.Array]:
            rows = inputs.rows()
            layers = codes_of(kv_pages).shape[0]
            case, dtype = inputs.case, inputs.q.dtype
            plan = plan_rows(
                rows, kv_pages, num_heads=case.num_heads, dtype=dtype, backend=backend, latent_size=case.latent_size
            )

            def layer(index: jax.Array, carry: tuple[KVPages, jax.Array]) -> tuple[KVPages, jax.Array]:
                kv_pages, out = carry
                # This costs nothing and makes the arguments depend on the last output.
                q, k, v, _ = lax.optimization_barrier((inputs.q, inputs.k, inputs.v, out))  # type: ignore[no-untyped-call]
                number = lax.rem(iterations - 1 - index, layers)
                out, kv_pages = attend(replace(inputs, q=q, k=k, v=v, plan=plan), kv_pages, number, rows)
                return kv_pages, out

            last: tuple[KVPages, jax.Array] = lax.fori_loop(0, iterations, layer, (kv_pages, out))
            return last

        lowered = jax.jit(run, donate_argnums=(0, 1)).lower(state.kv_pages, state.out, inputs)
        return cls(lowered.compile(), state, inputs)

    def __call__(self) -> jax.Array:
        self.state = _LoopArrays(*self.compiled(self.state.kv_pages, self.state.out, self.inputs))
        return self.state.out
