"""What kernels for CPUs are written with: vector functions, loops on all threads, and code for other machines."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.chips import CpuChip
from pallas_kernels.cpu.emit import Emitter
from pallas_kernels.cpu.frame import Frame
from pallas_kernels.cpu.handlers import Handler
from pallas_kernels.cpu.host import check_features, host_chip
from pallas_kernels.cpu.machine_code import compile_handler
from pallas_kernels.cpu.pool import parallel_loop, parallel_runs
from pallas_kernels.cpu.values import Value
from pallas_kernels.cpu.vectors import exp, exp2, sums, tanh
from pallas_kernels.grouped_matmul.cpu import counting_sort, largest_of_rows
from pallas_kernels.packed_matmul.kernel import grouped_packed_matmul
from pallas_kernels.packed_matmul.packing import pack_words
from pallas_kernels.ragged_paged_attention.cpu.kernel import attention
from pallas_kernels.small_matmul.kernel import matmul
from tests.pallas_kernels.cpu_chips import CPU_CHIPS

LANES = sorted(CPU_CHIPS)
AVX2 = "+avx,+avx2,+fma"


def elementwise(e: Emitter, frame: Frame, function: Callable[[Emitter, Value], Value]) -> None:
    x, y = frame.argument(0), frame.result(0)
    with e.loop(0, x.size(0), e.lanes) as i:
        e.store(y.data + i * 4, function(e, e.load(x.data + i * 4)))


def exponential(e: Emitter, frame: Frame) -> None:
    elementwise(e, frame, lambda e, x: exp(x))


def power_of_two(e: Emitter, frame: Frame) -> None:
    elementwise(e, frame, lambda e, x: exp2(x))


def hyperbolic(e: Emitter, frame: Frame) -> None:
    elementwise(e, frame, lambda e, x: tanh(x))


def run(emit: Callable[..., None], x: np.ndarray, lanes: int, dtype: Any = np.float32, shape: Any = None) -> np.ndarray:
    handler = Handler(emit, (), CPU_CHIPS[lanes])
    out = jax.ShapeDtypeStruct(x.shape if shape is None else shape, dtype)
    return np.asarray(jax.jit(lambda x: handler(out, x))(x))


@pytest.mark.parametrize("lanes", LANES)
def test_exp(lanes: int) -> None:
    x = np.concatenate([np.linspace(-87, 88, 4096 - 16), [-1e30, -np.inf, -88, 0.0] * 4]).astype(np.float32)
    result, expected = run(exponential, x, lanes), np.exp(np.maximum(x, -87).astype(np.float64))
    assert (np.abs(result - expected) / expected).max() < 3e-7
    assert np.isnan(run(exponential, np.full(16, np.nan, np.float32), lanes)).all()


@pytest.mark.parametrize("lanes", LANES)
def test_exp2(lanes: int) -> None:
    x = np.linspace(-126, 127, 4096, dtype=np.float32)
    assert np.abs(run(power_of_two, x, lanes) / np.exp2(x.astype(np.float64)) - 1).max() < 3e-7
    others = np.asarray([-1e30, -np.inf, -127, 0, np.nan] * 16, np.float32)
    np.testing.assert_array_equal(run(power_of_two, others, lanes), [0, 0, 0, 1, np.nan] * 16)


@pytest.mark.parametrize("lanes", LANES)
def test_tanh(lanes: int) -> None:
    x = np.concatenate([np.linspace(-20, 20, 4096 - 16), [-1e30, 1e30, -1e-9, 0.0] * 4]).astype(np.float32)
    assert np.abs(run(hyperbolic, x, lanes) - np.tanh(x.astype(np.float64))).max() < 3e-7


def rounding(e: Emitter, frame: Frame) -> None:
    x, y = frame.argument(0), frame.result(0)
    with e.loop(0, x.size(0), e.lanes) as i:
        e.store(y.data + i * 2, e.load(x.data + i * 4), "bfloat16")


@pytest.mark.parametrize("lanes", LANES)
def test_bfloat16_is_rounded_as_everywhere(lanes: int) -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 1 << 16, np.uint32)
    ties = (bits[:4096] & 0xFFFF0000) | 0x8000
    x = np.concatenate([bits, ties, np.asarray([0x7F800001, 0xFF800000, 0x7F7FFFFF, 1] * 4, np.uint32)])
    with np.errstate(invalid="ignore", over="ignore"):
        values = x.view(np.float32)
        expected = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    result = run(rounding, values, lanes, ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(result, expected)


def loading(dtype: str) -> Callable[[Emitter, Frame], None]:
    def load(e: Emitter, frame: Frame) -> None:
        x, y = frame.argument(0), frame.result(0)
        with e.loop(0, x.size(0), e.lanes) as i:
            e.store(y.data + i * 4, e.load(x.data + i, dtype))

    load.__name__ = f"load_{dtype}"
    return load


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("lanes", LANES)
def test_every_code_of_eight_bits(lanes: int, dtype: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    result = run(loading(dtype), codes, lanes)
    np.testing.assert_array_equal(result, codes.view(jnp.dtype(dtype)).astype(np.float32))


def summing(e: Emitter, frame: Frame) -> None:
    """Sums of 1, 2, 4 .. vectors: result [n, lanes] has those of the first 2**n."""
    x, y = frame.argument(0), frame.result(0)
    rows = [e.load(x.data + i * e.lanes * 4) for i in range(e.lanes)]
    for n in range(e.lanes.bit_length()):
        e.store(y.data + n * e.lanes * 4, sums(rows[: 2**n]))


@pytest.mark.parametrize("lanes", LANES)
def test_a_sum_has_the_same_bits_among_others(lanes: int) -> None:
    x = np.random.default_rng(0).standard_normal((lanes, lanes)).astype(np.float32)
    result = run(summing, x, lanes, shape=(lanes.bit_length(), lanes))
    np.testing.assert_allclose(result[-1], x.sum(axis=1), rtol=1e-5, atol=1e-5)
    for n, some in enumerate(result):
        np.testing.assert_array_equal(some[: 2**n], result[-1, : 2**n])


def counting(e: Emitter, frame: Frame, loop: str) -> None:
    """Adds one to each element on all threads. The argument's size is that of the result."""

    def add(t: Emitter, item: Value, captured: Any) -> None:
        source, target = captured
        t.store_int(target + item * 8, t.load_int(source + item * 8) + 1 + item)

    source, target = frame.argument(0), frame.result(0)
    loops = {"items": parallel_loop, "runs": parallel_runs}
    loops[loop](e, frame, source.size(0), (source.data, target.data), add)


@pytest.mark.parametrize("loop", ["items", "runs"])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 1000])
def test_each_item_is_done_once_before_the_call_ends(count: int, loop: str) -> None:
    x = np.arange(2 * count, dtype=np.int32)  # pairs of words, which the kernel takes for 64 bits
    handler = Handler(counting, (loop,), host_chip())
    call = jax.jit(lambda x: handler(jax.ShapeDtypeStruct((count, 2), jnp.int32), x.reshape(count, 2)))
    for _ in range(20):
        result = np.asarray(call(x)).copy().view(np.int64).reshape(-1)
        np.testing.assert_array_equal(result, x.view(np.int64) + 1 + np.arange(count))


@pytest.mark.parametrize("loop", ["items", "runs"])
def test_many_threads_call_at_once(loop: str) -> None:
    x = np.arange(200, dtype=np.int32)
    handler = Handler(counting, (loop,), host_chip())

    @jax.jit
    def chain(x: jax.Array) -> jax.Array:
        for _ in range(10):
            x = handler(jax.ShapeDtypeStruct((100, 2), jnp.int32), x.reshape(100, 2))
        return x

    expected = x.view(np.int64) + 10 * (1 + np.arange(100))
    with ThreadPoolExecutor(8) as threads:
        for result in threads.map(lambda _: np.asarray(chain(x)).copy(), range(64)):
            np.testing.assert_array_equal(result.view(np.int64).reshape(-1), expected)


def compiled(kernel: Callable[..., None], options: tuple[str, ...], chip: CpuChip) -> bytes:
    return compile_handler("handler", lambda e, frame: kernel(e, frame, *options), chip)


@pytest.mark.parametrize(
    ("triple", "name", "features", "machine"),
    [
        ("x86_64-unknown-linux-gnu", "haswell", AVX2, 62),
        ("x86_64-unknown-linux-gnu", "skylake-avx512", f"{AVX2},+avx512f,+avx512bw,+avx512vl", 62),
        ("x86_64-unknown-linux-gnu", "znver4", f"{AVX2},+avx512f,+avx512bw,+avx512vl,+avx512bf16", 62),
        ("aarch64-unknown-linux-gnu", "neoverse-n1", "+neon", 183),
    ],
)
def test_the_kernels_compile_for_machines_that_are_not_here(
    triple: str, name: str, features: str, machine: int
) -> None:
    chip = CpuChip(name=name, triple=triple, features=features)
    check_features(chip)
    kernels: list[tuple[Callable[..., None], tuple[str, ...]]] = [
        (largest_of_rows, ()),
        (counting_sort, ()),
        (pack_words, ("float32",)),
    ]
    for dtype in ("float32", "bfloat16"):
        kernels += [
            (attention, (dtype, dtype, "by-head")),
            (attention, (dtype, "float8_e4m3fn", "by-token")),
            (matmul, (dtype, "float32", dtype)),
            (matmul, (dtype, "float32", "int8")),
            (grouped_packed_matmul, (dtype, dtype, "silu")),
        ]
    for kernel, options in kernels:
        code = compiled(kernel, options, chip)
        assert code[:4] == b"\x7fELF" and int.from_bytes(code[18:20], "little") == machine


def test_machines_without_kernels_are_named() -> None:
    with pytest.raises(NotImplementedError, match="need AVX2 and FMA, which core2 lacks: use the backend reference"):
        check_features(CpuChip(name="core2", triple="x86_64-unknown-linux-gnu", features="+sse2"))
    with pytest.raises(NotImplementedError, match="not riscv64-unknown-linux-gnu"):
        check_features(replace(host_chip(), triple="riscv64-unknown-linux-gnu"))


def test_without_llvmlite_attention_runs_on_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    from pallas_kernels.backend import REFERENCE, Backend

    monkeypatch.setattr("pallas_kernels.cpu.host.find_spec", lambda module: None)
    host_chip.cache_clear()
    try:
        assert Backend.of_device("auto", jax.devices()[0], np.dtype(np.float32)) == REFERENCE
        with pytest.raises(NotImplementedError, match="pip install .*llvmlite>="):
            Backend.of_device("cpu", jax.devices()[0], np.dtype(np.float32))
    finally:
        host_chip.cache_clear()
