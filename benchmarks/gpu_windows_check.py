"""Checks and times the GPU's kernels for the first Mamba and for short convolutions, within half a minute.

It prints one JSON object a line, as it goes: first what each kernel's error against float64 is, then its time, and then
that of plain XLA, while there is time. Programs of plain XLA are compiled beside that, by other threads. A time is that
of a layer within one program: a scan takes a step's tokens into the states of eight layers, once and again, with pages
in place. The least bytes are those of states, tokens and results, each moved once.

    python -m benchmarks.gpu_windows_check [--seconds 30] [--tiny]

`--tiny` interprets the kernels on a CPU, with few channels, to prove this program.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxvllm.models.causal_conv import CausalConv
from jaxvllm.models.mamba import PACE, ChannelScan
from jaxvllm.models.recurrence import CHANNELS, SKIP, RecurrentRule
from jaxvllm.models.short_conv import WindowAlone
from jaxvllm.models.state_kernel import state_kernel
from jaxvllm.models.state_memory import Columns, StateMemory
from pallas_kernels.backend import Backend
from pallas_kernels.chips import GpuChip
from pallas_kernels.ragged_paged_attention import RaggedRows

PAGE_SIZE = 64
# The layers that are compared, and those that are timed: the pages of 64 rows of Jamba are 537 MB, beyond any L2 cache.
CHECKED_LAYERS, TIMED_LAYERS = 2, 8
TOLERANCE = 1e-5  # of 1 and a number together, as in the tests of these kernels


@dataclass(frozen=True)
class LayerSizes:
    """A layer with `num_blocks` blocks of C channels: a state [S, C] of Mamba, or a convolution."""

    name: str
    num_blocks: int
    kept: ChannelScan | CausalConv

    @property
    def memory(self) -> StateMemory:
        if isinstance(self.kept, ChannelScan):
            return StateMemory(self.num_blocks, RecurrentRule(None, self.kept))
        return StateMemory(self.num_blocks, RecurrentRule(self.kept, WindowAlone()))

    @property
    def state(self) -> tuple[int, int]:
        return self.memory.rule.parts[0]  # type: ignore[return-value]

    @property
    def token_bytes(self) -> int:
        """The bytes of a token that are read, and those of its result."""
        size, channels = self.state
        of_scan = 4 * channels * self.num_blocks + 2 * 4 * size if isinstance(self.kept, ChannelScan) else 0
        return (2 + 4) * channels * self.num_blocks + of_scan

    @property
    def weight_numbers(self) -> int:
        size, channels = self.state
        return (size + 1 if isinstance(self.kept, ChannelScan) else size + 2) * channels * self.num_blocks

    def weights(self, make: Callable[..., Any], num_layers: int) -> dict[str, Any]:
        """Returns its weights, of which `make` makes each from its shape, and those above 0 by the second argument."""
        (size, channels), (L, K) = self.state, (num_layers, self.num_blocks)
        if isinstance(self.kept, ChannelScan):
            return {PACE: -make((L, K, size, channels), True), SKIP: make((L, K, channels), False)}
        bias = {"bias": make((L, K, channels), False)} if self.kept.has_bias else {}
        return {"taps": make((L, K, size + 1, channels), False), **bias}

    def tokens(self, make: Callable[..., Any], count: int) -> dict[str, Any]:
        """Returns tokens, of which `make` makes all in the same way."""
        (size, channels), K = self.state, self.num_blocks
        x = jnp.asarray(make((count, K, channels), False), jnp.bfloat16)
        if not isinstance(self.kept, ChannelScan):
            return {CHANNELS: x}
        shared = {name: jnp.repeat(make((count, 1, size), False), K, axis=1) for name in ("b", "c")}
        return {CHANNELS: x, "dt": 0.1 * make((count, K, channels), True), **shared}

    def by_hand(self, state: np.ndarray, token: Mapping[str, np.ndarray], weights: Mapping[str, Any]) -> Any:
        """Lets states f64[K, S, C] take in a token, and returns what is read, f64[K, C]."""
        x = token[CHANNELS]
        if isinstance(self.kept, ChannelScan):
            state *= np.exp(token["dt"][:, None] * weights[PACE])
            state += (token["dt"] * x)[:, None] * token["b"][..., None]
            return np.sum(state * token["c"][..., None], axis=1) + weights[SKIP] * x
        seen = np.concatenate([state, x[:, None]], axis=1)
        state[:] = seen[:, 1:]
        mixed = np.sum(seen * weights["taps"], axis=1) + weights.get("bias", 0)
        return mixed / (1 + np.exp(-mixed)) if self.kept.has_activation else mixed


@dataclass(frozen=True)
class StepRows:
    """A step: the position of each row's first token, and the number of its tokens."""

    name: str
    rows: tuple[tuple[int, int], ...]
    num_tokens: int

    @property
    def columns(self) -> int:
        return max(-(-(start + count) // PAGE_SIZE) for start, count in self.rows)

    def table(self) -> np.ndarray:
        return 1 + np.arange(len(self.rows) * self.columns, dtype=np.int32).reshape(-1, self.columns)

    def ragged(self, table: jax.Array) -> RaggedRows:
        starts, counts = (jnp.asarray(numbers, jnp.int32) for numbers in zip(*self.rows, strict=True))
        return RaggedRows.build(table, starts, counts, self.num_tokens)

    def least_bytes(self, layer: LayerSizes) -> int:
        """Returns the bytes of states: one read for each row that goes on, and one written for each of its columns."""
        numbers = int(np.prod(layer.state)) * layer.num_blocks
        read = sum(start > 0 and count > 0 for start, count in self.rows)
        written = sum((start + count - 1) // PAGE_SIZE - start // PAGE_SIZE + 1 for start, count in self.rows if count)
        tokens = sum(count for _, count in self.rows)
        return 4 * numbers * (read + written) + layer.token_bytes * tokens + 4 * layer.weight_numbers


MODELS = (
    LayerSizes("jamba", 8, ChannelScan(1024, 16)),
    LayerSizes("jamba-window", 8, CausalConv(1024, 4, has_bias=True)),
    LayerSizes("lfm2-window", 8, CausalConv(256, 3, has_activation=False)),
)
TINY_MODELS = (
    LayerSizes("jamba", 1, ChannelScan(64, 16)),
    LayerSizes("lfm2-window", 1, CausalConv(128, 3, has_bias=True)),
)
# A row that begins and one that goes on, both over several pages, and rows with one token, of which one ends a page.
CHECKED = (
    StepRows("mixed", ((0, 130), (9, 1), (30, 101), (0, 1), (63, 3)), 256),
    StepRows("decode", ((5, 1), (0, 1), (63, 1), (64, 1), (200, 1)), 5),
)
TIMED = (
    StepRows("1 row", ((100, 1),), 1),
    StepRows("64 rows", ((100, 1),) * 64, 64),
    StepRows("prompt of 2048", ((0, 2048),), 2048),
    StepRows("64 rows and a prompt of 448", ((100, 1),) * 64 + ((0, 448),), 576),
)
TINY_TIMED = (StepRows("2 rows", ((70, 1),) * 2, 2),)


def build(
    layer: LayerSizes, step: StepRows, backend: Backend | None, num_layers: int, calls: int
) -> Callable[..., Any]:
    """Returns a step of `calls` layers, one after the other, by our kernel, or for no backend by plain XLA."""

    def run(pages: jax.Array, table: jax.Array, weights: Any, tokens: Any) -> Any:
        rows = step.ragged(table)
        kernel = None if backend is None else state_kernel(layer.memory, backend)
        assert (kernel is None) == (backend is None)
        plan = None if kernel is None else kernel.plan(rows, PAGE_SIZE)

        def one(carry: tuple[jax.Array, jax.Array], number: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
            pages, place = carry[0], number % num_layers
            own = jax.tree.map(lambda x: x[place], weights)
            if kernel is None:
                read, pages = layer.memory.advance(pages, place, Columns(rows, PAGE_SIZE), own, tokens)
            else:
                read, pages = kernel(pages, place, plan, own, tokens)
            return (pages, read), None

        empty = jnp.zeros(tokens[CHANNELS].shape, jnp.float32)
        return jax.lax.scan(one, (pages, empty), jnp.arange(calls, dtype=jnp.int32))[0]

    return run


def inputs(
    layer: LayerSizes, step: StepRows, backend: Backend, make: Callable[..., Any], num_layers: int
) -> tuple[Any, np.ndarray, dict[str, Any], dict[str, Any]]:
    """Returns the pages, the page table, the weights of all layers, and the tokens."""
    table = step.table()
    pages = layer.memory.pages(num_layers, int(table.max()) + 1, PAGE_SIZE, jnp.bfloat16, backend)
    return make(pages.shape, False), table, layer.weights(make, num_layers), layer.tokens(make, step.num_tokens)


def check(layer: LayerSizes, step: StepRows, backend: Backend) -> dict[str, Any]:
    """Compares a step of the layers, and the pages after it, with float64. Free pages are NaN."""
    random = np.random.default_rng(0)

    def make(shape: tuple[int, ...], is_positive: bool) -> np.ndarray:
        of = random.standard_normal(shape, np.float32)
        return np.abs(of) if is_positive else of

    pages, table, weights, tokens = inputs(layer, step, backend, make, CHECKED_LAYERS)
    used, (size, channels) = int(np.prod(layer.state)), layer.state
    kept = {table[row, (start - 1) // PAGE_SIZE] for row, (start, _) in enumerate(step.rows) if start}
    pages[:, [page for page in range(pages.shape[1]) if page not in kept]] = np.nan
    run = jax.jit(build(layer, step, backend, CHECKED_LAYERS, CHECKED_LAYERS))
    (got, read), (again, _) = (jax.device_get(run(pages, table, weights, tokens)) for _ in range(2))
    place, rows = CHECKED_LAYERS - 1, step.ragged(jnp.asarray(table))
    own = {name: np.asarray(of[place], np.float64) for name, of in weights.items()}
    wide = {name: np.asarray(jnp.asarray(of, jnp.float32), np.float64) for name, of in tokens.items()}
    worst, written = 0.0, set()

    def compare(found: np.ndarray, expected: np.ndarray) -> None:
        nonlocal worst
        error = np.abs(found - expected) / (1 + np.abs(expected))
        worst = max(worst, float(np.max(np.where(np.isnan(error), np.inf, error))))

    def numbers(pages: np.ndarray, page: int) -> np.ndarray:
        of_page: np.ndarray = pages[place, page].reshape(layer.num_blocks, -1)[:, :used].reshape(-1, size, channels)
        return of_page

    for row, (start, count) in enumerate(step.rows):
        state = np.zeros((layer.num_blocks, size, channels))
        if start:
            state[:] = numbers(pages, table[row, (start - 1) // PAGE_SIZE])
        for position in range(start, start + count):
            token = int(rows.query_starts[row]) + position - start
            expected = layer.by_hand(state, {name: of[token] for name, of in wide.items()}, own)
            compare(read[token], expected)
            if (position + 1) % PAGE_SIZE == 0 or position == start + count - 1:
                page = int(table[row, position // PAGE_SIZE])
                written.add(page)
                compare(numbers(got, page), state)
    others = [page for page in range(pages.shape[1]) if page not in written]
    untouched = np.array_equal(got[:, others], pages[:, others], equal_nan=True)
    is_repeated = np.array_equal(got, again, equal_nan=True)
    ok = worst <= TOLERANCE and untouched and is_repeated
    return {"check": layer.name, "step": step.name, "ok": ok, "error": worst} | {
        "others_untouched": untouched,
        "same_bits_again": is_repeated,
    }


def compile_timed(layer: LayerSizes, step: StepRows, backend: Backend, by_kernel: bool, calls: int) -> Any:
    """Returns the compiled program of so many calls."""
    given = jax.eval_shape(partial(constants, layer, step, backend))
    run = jax.jit(build(layer, step, backend if by_kernel else None, TIMED_LAYERS, calls), donate_argnums=0)
    return run.lower(*given).compile()


def constants(layer: LayerSizes, step: StepRows, backend: Backend) -> Any:
    """Returns what a timed step is given: what numbers are does not change how long they take."""
    return jax.tree.map(
        jnp.asarray, inputs(layer, step, backend, lambda shape, _: jnp.full(shape, 0.1, jnp.float32), TIMED_LAYERS)
    )


def measure(
    layer: LayerSizes, step: StepRows, backend: Backend, way: str, calls: int, compiled: jax.stages.Compiled
) -> dict[str, Any]:
    pages, *others = constants(layer, step, backend)
    times = []
    for _ in range(4):  # the first one warms up
        begin = time.perf_counter()
        pages, read = compiled(pages, *others)
        read.block_until_ready()
        times.append((time.perf_counter() - begin) / calls)
    memory = compiled.memory_analysis()
    assert memory is not None
    return {
        "time": layer.name,
        "step": step.name,
        "way": way,
        "microseconds_a_layer": [round(1e6 * value, 2) for value in sorted(times[1:])],
        "least_megabytes": round(step.least_bytes(layer) / 1e6, 2),
        "temporaries_megabytes": round(memory.temp_size_in_bytes / 1e6, 2),
    }


def main() -> None:
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30, help="begins nothing new after so many")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    device = jax.devices()[0]
    kind: Any = "interpret-gpu" if arguments.tiny else "gpu"
    backend = Backend.of_device(kind, device, np.dtype(jnp.bfloat16))
    bandwidth = backend.chip.hbm_bandwidth if isinstance(backend.chip, GpuChip) else 0.0
    models, timed = (TINY_MODELS, TINY_TIMED) if arguments.tiny else (MODELS, TIMED)

    def tell(make: Callable[[], dict[str, Any]], **what: Any) -> None:
        seconds = time.perf_counter() - began
        if seconds > arguments.seconds:
            found = {"left_out": "no time", **what}
        else:
            try:
                found = make()
            except Exception as error:  # what fails hides nothing of what comes after it
                found = {"failed": f"{type(error).__name__}: {error}"[:500], **what}
        if "microseconds_a_layer" in found and bandwidth:
            floor = found["least_megabytes"] / bandwidth * 1e12
            found |= {"floor_microseconds": round(floor, 2)}
        print(json.dumps(found | {"at_second": round(time.perf_counter() - began, 1)}), flush=True)

    print(
        json.dumps({"device": device.device_kind, "jax": jax.__version__, "chip": getattr(backend.chip, "name", None)}),
        flush=True,
    )
    every = [(layer, step) for step in timed for layer in models]

    def calls_of(step: StepRows, way: str) -> int:
        # In plain XLA 64 rows are hundreds of kernels a layer, and a prompt thousands.
        return TIMED_LAYERS * (1 if arguments.tiny or (way == "XLA" and step.num_tokens > 1) else 16)

    with ThreadPoolExecutor(4) as pool:
        baselines: list[Future[Any]] = [
            pool.submit(partial(compile_timed, layer, step, backend, False, calls_of(step, "XLA")))
            for layer, step in every
        ]
        for layer in models:
            for step in CHECKED:
                tell(partial(check, layer, step, backend), check=layer.name, step=step.name)
        for layer, step in every:

            def ours(layer: LayerSizes = layer, step: StepRows = step) -> dict[str, Any]:
                calls = calls_of(step, "kernel")
                return measure(layer, step, backend, "kernel", calls, compile_timed(layer, step, backend, True, calls))

            tell(ours, time=layer.name, step=step.name, way="kernel")
        for (layer, step), baseline in zip(every, baselines, strict=True):

            def theirs(
                layer: LayerSizes = layer, step: StepRows = step, baseline: Future[Any] = baseline
            ) -> dict[str, Any]:
                left = max(0.0, arguments.seconds - (time.perf_counter() - began))
                return measure(layer, step, backend, "XLA", calls_of(step, "XLA"), baseline.result(left))

            tell(theirs, time=layer.name, step=step.name, way="XLA")
        pool.shutdown(wait=False, cancel_futures=True)


if __name__ == "__main__":
    main()
