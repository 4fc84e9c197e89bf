"""The kernels beside attention on a GPU: products of few bits, experts and states. Are they right, and how fast?

Each case is compared with float32 at the highest precision, or with plain XLA, and then timed: one program goes through
as many layers as no cache can hold, as a step does. Beside it stand the least bytes and a product of XLA's in 16 bits.
`benchmarks.first_light` runs these parts. Alone, they print one JSON object a line:

    python -m benchmarks.step_kernels products|experts|states [--cases REGEX]
"""

import argparse
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxvllm.bench.kernels.ceilings import Chain
from jaxvllm.bench.kernels.device import cache_bytes
from jaxvllm.bench.kernels.timing import time_calls
from jaxvllm.models.causal_conv import CausalConv
from jaxvllm.models.gated_delta import GatedDelta
from jaxvllm.models.gpu_states import GpuStates
from jaxvllm.models.mamba2 import SelectiveScan
from jaxvllm.models.recurrence import CHANNELS, RecurrentRule
from jaxvllm.models.state_memory import Columns, StateMemory
from jaxvllm.runtime.recipe import COMPILER_OPTIONS
from pallas_kernels.backend import Backend, multiplies_bf16
from pallas_kernels.chips import GpuChip
from pallas_kernels.grouped_matmul import cases as grouped_cases
from pallas_kernels.grouped_matmul import gpu as grouped
from pallas_kernels.quantized_matmul import cases as quantized_cases
from pallas_kernels.quantized_matmul import gpu as quantized
from pallas_kernels.quantized_matmul.gpu_tiles import choose_tiles
from pallas_kernels.ragged_paged_attention import RaggedRows

# What a part tells, a value after the other.
type Facts = Iterator[dict[str, Any]]
MOST_LAYERS = 64
HIGHEST = lax.Precision.HIGHEST


def dtype_here() -> jnp.dtype:
    """Returns the dtype of 16 bits in which this machine's device computes."""
    return jnp.dtype("bfloat16" if multiplies_bf16(jax.devices()[0]) else "float16")


def gpu_here() -> GpuChip:
    """Returns the chip of this machine. Raises SystemExit where it is no GPU with kernels."""
    chip = Backend.of_device("auto", jax.devices()[0], dtype_here()).chip
    if not isinstance(chip, GpuChip):
        raise SystemExit(f"{jax.devices()[0].device_kind} is no GPU with kernels")
    return chip


def layers_for(layer_bytes: int) -> int:
    """Returns how many layers are four times the cache."""
    return min(max(2, -(-4 * cache_bytes(jax.devices()[0]) // layer_bytes)), MOST_LAYERS)


def seconds_a_layer(layer: Callable[..., jax.Array], layers: int, *arrays: Any) -> float:
    """Times one layer of a program that calls `layer` with each number in turn, and these arrays."""

    def run(*arrays: Any) -> jax.Array:
        def one(total: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
            y = lax.optimization_barrier(layer(number, *arrays))  # type: ignore[no-untyped-call]
            return total + y.reshape(-1)[0].astype(jnp.float32), None

        total: jax.Array = lax.scan(one, jnp.float32(0), jnp.arange(layers, dtype=jnp.int32))[0]
        return total

    options = COMPILER_OPTIONS[jax.default_backend()]
    return time_calls(partial(jax.jit(run, compiler_options=options), *arrays), layers).median


def error_of(result: jax.Array, expected: jax.Array) -> float:
    """Returns the norm of the difference, of that of what was expected; NaN counts as infinite."""
    difference = result.astype(jnp.float32) - expected
    return float(jnp.nan_to_num(jnp.linalg.norm(difference) / jnp.linalg.norm(expected), nan=jnp.inf))


def told(case: Any, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns what `run` finds of a case, or its exception."""
    try:
        return {"what": str(case)} | run()
    except Exception as problem:
        return {"what": str(case), "problem": f"{type(problem).__name__}: {str(problem)[:600]}"}


def products(pattern: str = ".") -> Facts:
    """Multiplies rows by matrices of few bits, of sizes of models."""
    chip, dtype = gpu_here(), dtype_here()

    def of(case: quantized_cases.QuantizedCase) -> dict[str, Any]:
        code, layers = case.code, layers_for(case.num_bytes)
        tiles = choose_tiles(
            jax.ShapeDtypeStruct((case.num_rows, case.size_in), dtype),  # type: ignore[no-untyped-call]
            (case.size_out, case.size_in), code, case.group, case.scale_dtype, 1, chip,
        )  # fmt: skip
        if tiles is None:
            return {"problem": "left to XLA"}
        keys = jax.random.split(jax.random.key(0), 4)
        x = jax.random.normal(keys[0], (case.num_rows, case.size_in), dtype)
        codes = jax.random.bits(keys[1], (layers, case.size_out, case.size_in // code.per_byte), jnp.uint8)
        table = jnp.asarray(code.table, jnp.float32)
        if code.per_byte == 1:  # FP8 has codes that are no numbers
            codes = jnp.where(jnp.isfinite(table[codes]), codes, jnp.uint8(0))
        shape = layers, case.size_out, case.num_groups
        is_power = case.scale_dtype == "float8_e8m0fnu"
        if is_power:
            scales = jax.random.randint(keys[2], shape, 121, 128, jnp.uint8)
            exact = jnp.exp2(scales[1].astype(jnp.float32) - 127)
        else:
            scales = jax.random.uniform(keys[2], shape, jnp.float32, 0.5, 2).astype(case.scale_dtype)
            exact = scales[1].astype(jnp.float32)
        zeros = jax.random.randint(keys[3], shape, 0, 16, jnp.dtype(code.dtype)) if case.has_zeros else None
        multiply: Any = partial(
            quantized.quantized_matmul,
            code=code,
            scale_dtype=case.scale_dtype,
            dtype=dtype,
            tiles=tiles,
            chip=chip,
        )

        def layer(number: jax.Array, x: jax.Array, *matrices: Any) -> Any:
            return multiply(x, *matrices, None, number)

        @jax.jit
        def by_hand(x: jax.Array, codes: jax.Array, exact: jax.Array, zeros: jax.Array) -> tuple[jax.Array, jax.Array]:
            if code.per_byte == 2:
                codes = jnp.stack([codes & 15, codes >> 4], -1).reshape(case.size_out, -1)
            by_group = table[codes].reshape(case.size_out, case.num_groups, -1) - zeros[..., None]
            matrix = (by_group * exact[..., None]).reshape(case.size_out, case.size_in)
            return jnp.matmul(x.astype(jnp.float32), matrix.T, precision=HIGHEST), matrix.astype(dtype)

        minus = jnp.full(shape[1:], code.zero, jnp.float32) if zeros is None else zeros[1].astype(jnp.float32)
        expected, matrix = by_hand(x, codes[1], exact, minus)
        stored = lax.bitcast_convert_type(codes, jnp.dtype(code.dtype)), scales, zeros
        error = error_of(jax.jit(layer)(jnp.int32(1), x, *stored), expected)
        seconds = seconds_a_layer(layer, layers, x, *stored)
        count = layers_for(2 * matrix.size)
        plain = jnp.broadcast_to(matrix, (count, *matrix.shape)) + jnp.zeros((), dtype)
        in_16_bits = seconds_a_layer(lambda number, x, plain: x @ plain[number].T, count, x, plain)
        return {
            "error": error,
            "seconds": seconds,
            "least_bytes": case.num_bytes,
            "flops": 2 * case.num_rows * case.size_in * case.size_out,
            "seconds_of_xla_in_16_bits": in_16_bits,
            "tiles": str(tiles),
        }

    for case in quantized_cases.SERVING:
        if re.search(pattern, str(case)):
            yield told(case, partial(of, case))


def experts(pattern: str = ".") -> Facts:
    """Multiplies rows by the gated matrix of their expert, of sizes of models."""
    chip = gpu_here()

    def of(case: grouped_cases.GroupedCase) -> dict[str, Any]:
        count, num_rows = len(case.counts), sum(case.counts)
        used = sum(size > 0 for size in case.counts)
        layers = min(layers_for(used * 4 * case.size_in * case.size_out), 4)
        keys = jax.random.split(jax.random.key(0))
        x = jax.random.normal(keys[0], (num_rows, case.size_in), jnp.bfloat16)
        shape = (count, 2, case.size_out, case.size_in)
        one = jax.random.normal(keys[1], shape, jnp.bfloat16) * jnp.bfloat16(case.size_in**-0.5)
        w = jnp.concatenate([one] * layers)
        starts = jnp.asarray(case.starts)
        tiles = grouped.choose_tiles(x, w, count, "silu", chip)
        if tiles is None:
            return {"problem": "left to XLA"}

        def layer(number: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
            return grouped.grouped_matmul(x, w, starts, number * count, gate="silu", tiles=tiles, chip=chip)

        def by_group(x: jax.Array, one: jax.Array, group: jax.Array, y: jax.Array) -> jax.Array:
            is_own = (jnp.arange(num_rows) >= starts[group]) & (jnp.arange(num_rows) < starts[group + 1])
            gate, up = (
                jnp.matmul(x.astype(jnp.float32), one[group, half].astype(jnp.float32).T, precision=HIGHEST)
                for half in (0, 1)
            )
            return jnp.where(is_own[:, None], jax.nn.silu(gate) * up, y)

        @jax.jit
        def by_hand(x: jax.Array, one: jax.Array) -> jax.Array:
            zeros = jnp.zeros((num_rows, case.size_out))
            expected: jax.Array = lax.fori_loop(0, count, partial(by_group, x, one), zeros)
            return expected

        error = error_of(jax.jit(layer)(jnp.int32(1), x, w), by_hand(x, one))
        seconds = seconds_a_layer(layer, layers, x, w)
        return {
            "error": error,
            "seconds": seconds,
            "least_bytes": used * 4 * case.size_in * case.size_out + 2 * num_rows * (case.size_in + case.size_out),
            "flops": 4 * num_rows * case.size_in * case.size_out,
            "tiles": str(tiles),
        }

    for case in grouped_cases.SERVING:
        if re.search(pattern, str(case)):
            yield told(case, partial(of, case))


RULES = {
    "qwen3-next": StateMemory(16, RecurrentRule(CausalConv(512, 4), GatedDelta(2, 128, 128))),
    "nemotron-h": StateMemory(8, RecurrentRule(CausalConv(1280, 4), SelectiveScan(16, 64, 128))),
}
STEPS = ((1, 1), (64, 1), (1, 512), (1, 2048), (8, 256))  # rows, and tokens of each
STATE_PAGE, STATE_LAYERS, CONTEXT = 64, 4, 100


def states(pattern: str = ".") -> Facts:
    """Takes tokens into the states of one layer after the other, by kernels and by plain XLA."""
    chip = gpu_here()
    backend = Backend("gpu", chip)

    def of(memory: StateMemory, num_rows: int, each: int) -> dict[str, Any]:
        kernel, rng = GpuStates.of(memory, backend), np.random.default_rng(0)
        if kernel is None:
            return {"problem": "left to XLA"}
        num_tokens = num_rows if each == 1 else num_rows * each + STATE_PAGE
        columns = -(-(CONTEXT + each) // STATE_PAGE)
        table = jnp.asarray(1 + rng.permutation(num_rows * columns).reshape(num_rows, columns), jnp.int32)
        starts, lens = jnp.full(num_rows, CONTEXT, jnp.int32), jnp.full(num_rows, each, jnp.int32)
        struct = memory.pages(STATE_LAYERS, num_rows * columns + 1, STATE_PAGE, jnp.bfloat16, backend)
        rule, heads = memory.rule, memory.num_kv_heads
        assert isinstance(rule, RecurrentRule) and rule.conv is not None
        channels = rule.conv.channels
        matrices = rule.recurrence.parts[0][0]

        def normal(*shape: int) -> jax.Array:
            return jnp.asarray(rng.standard_normal(shape), jnp.float32)

        tokens = {CHANNELS: normal(num_tokens, heads, channels).astype(jnp.bfloat16)}
        weights = {"taps": normal(heads, 4, channels) / 2}
        if isinstance(rule.recurrence, GatedDelta):
            tokens |= {
                "g": -jnp.abs(normal(num_tokens, heads, matrices)),
                "beta": jax.nn.sigmoid(normal(num_tokens, heads, matrices)),
            }
        else:
            tokens |= {
                "g": -jnp.abs(normal(num_tokens, heads, matrices)),
                "dt": jnp.abs(normal(num_tokens, heads, matrices)),
            }
            weights |= {"skip": normal(heads, matrices)}
        pages = jax.random.normal(jax.random.key(0), struct.shape) * 0.1

        def layer(way: str, pages: Any, place: Any, weights: Any, tokens: Any) -> tuple[jax.Array, jax.Array]:
            rows = RaggedRows.build(table, starts, lens, num_tokens)
            if way == "XLA":
                return memory.advance(pages, place, Columns(rows, STATE_PAGE), weights, tokens)
            make_plan = kernel.token_plan if way == "tokens" else kernel.chunk_plan
            return kernel(pages, place, make_plan(rows, STATE_PAGE), weights, tokens)

        found: dict[str, Any] = {}
        expected = None
        for way in ("XLA", "tokens", *(["chunks"] if each > 16 and kernel.chunk_unit is not None else [])):
            read, got = jax.jit(partial(layer, way))(pages, jnp.int32(1), weights, tokens)
            read, got = read[: num_rows * each], got[1, 1:]
            if expected is None:
                expected = read, got
            else:
                found |= {
                    f"error of {way}": error_of(read, expected[0]),
                    f"error of pages by {way}": error_of(got, expected[1]),
                }

            def all_layers(pages: jax.Array, weights: Any, tokens: Any, way: str = way) -> jax.Array:
                def one(pages: jax.Array, place: jax.Array) -> tuple[jax.Array, None]:
                    read, pages = layer(way, pages, place, weights, tokens)
                    return lax.optimization_barrier((pages, read))[0], None  # type: ignore[no-untyped-call]

                return lax.scan(one, pages, jnp.arange(STATE_LAYERS, dtype=jnp.int32))[0]

            in_place = partial(jax.jit(all_layers, donate_argnums=0), weights=weights, tokens=tokens)
            found[f"seconds of {way}"] = time_calls(Chain(in_place, pages + 0), STATE_LAYERS).median
        state_bytes = memory.page_bytes(STATE_PAGE, jnp.bfloat16)
        return found | {"least_bytes": num_rows * (1 + max(1, each // STATE_PAGE)) * state_bytes}

    for name, memory in RULES.items():
        for num_rows, each in STEPS:
            case = f"{name}, {num_rows} rows of {each}"
            if re.search(pattern, case):
                yield told(case, partial(of, memory, num_rows, each))


PARTS: dict[str, Callable[[str], Facts]] = {"products": products, "experts": experts, "states": states}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--cases", default=".", metavar="REGEX")
    args = parser.parse_args()
    for fact in PARTS[args.part](args.cases):
        print(json.dumps(fact), flush=True)


if __name__ == "__main__":
    main()
