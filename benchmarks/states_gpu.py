"""Counts what one layer with states takes of a GPU: in plain XLA, and with our kernels token by token and by chunks.

Nothing runs: the programs are compiled for a GPU that is not here, in the environment .aot. A loop over rows counts as
often as the step has rows, or runs of a prompt, and a condition as its branch with more kernels. The host waits for a
number of each turn of such a loop and of each condition, which is counted, too. A loop over the tokens of a run has as
many turns as its text tells, and no wait. The bytes of a fusion are those of its
operands and results, but a slice of pages has only those that it reads or writes. The least bytes are each state read
and written once, and the tokens.

What a row's next token of the delta rule waits for is counted in the loop that takes tokens in, by instructions of PTX
of one warp and by the time of matrix units, per token. It prints tables and writes
benchmarks/results/states-gpu-DATE-COMMIT.json.

    .aot/bin/python -m benchmarks.states_gpu [--layers NAME ..] [CHIP]
"""

import argparse
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.result_files import machine, write_record
from jaxvllm.models.causal_conv import CausalConv
from jaxvllm.models.gated_delta import GatedDelta
from jaxvllm.models.gpu_states import GpuStates
from jaxvllm.models.mamba import PACE, ChannelScan
from jaxvllm.models.recurrence import CHANNELS, SKIP, RecurrentRule
from jaxvllm.models.short_conv import WindowAlone
from jaxvllm.models.state_kernel import state_kernel
from jaxvllm.models.state_memory import Columns, StateMemory
from jaxvllm.planner.hlo import HloInstruction, array_bytes, parse_hlo
from pallas_kernels.backend import Backend
from pallas_kernels.chips import GpuChip, chip_named
from pallas_kernels.deviceless import compile_only_devices, lowering_for
from pallas_kernels.linear_attention.gpu import FEW_TOKENS
from pallas_kernels.linear_attention.gpu.factors import CHUNK
from pallas_kernels.ragged_paged_attention import RaggedRows
from sharding.mesh import MeshShape
from sharding.placement import make_mesh

PAGE_SIZE, NUM_PAGES, LAYERS = 64, 512, 2
type Way = Literal["XLA", "tokens", "chunks"]
# What XLA:GPU makes no kernel of.
FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id"}


@dataclass(frozen=True)
class CountedLayer:
    """A layer whose states have such a memory, and the shapes of what its rule needs, for each head or for all.

    tokens: of a token, beside its channels, which are bfloat16
    shared: of a token, the same for all heads
    num_read: the numbers that are read for a token, f32, for each head
    """

    memory: StateMemory
    channels: int
    goes_by_chunks: bool
    weights: Mapping[str, tuple[int, ...]]
    tokens: Mapping[str, tuple[int, ...]]
    shared: Mapping[str, tuple[int, ...]]
    num_read: int

    @property
    def state_bytes(self) -> int:
        """The bytes of the states of all heads, without what fills their pages up."""
        return 4 * self.memory.num_kv_heads * sum(map(prod, self.memory.rule.parts))

    @property
    def token_bytes(self) -> int:
        """The bytes of a token, and of what is read for it."""
        of_head = 2 * self.channels + 4 * (sum(map(prod, self.tokens.values())) + self.num_read)
        return self.memory.num_kv_heads * of_head + 4 * sum(map(prod, self.shared.values()))

    @property
    def pages_bytes(self) -> int:
        return LAYERS * NUM_PAGES * self.memory.page_bytes(PAGE_SIZE, jnp.bfloat16)


def _window_layer(num_blocks: int, conv: CausalConv) -> CountedLayer:
    weights = {"taps": (conv.size, conv.channels)} | ({"bias": (conv.channels,)} if conv.has_bias else {})
    memory = StateMemory(num_blocks, RecurrentRule(conv, WindowAlone()))
    return CountedLayer(memory, conv.channels, False, weights, {}, {}, conv.channels)


# Qwen3-Next has 16 key heads with two value heads each, of 128 by 128.
_DELTA = GatedDelta(values_per_key=2, key_size=128, value_size=128)
COUNTED = {
    "qwen3-next": CountedLayer(
        StateMemory(16, RecurrentRule(CausalConv(_DELTA.channels, 4), _DELTA)),
        _DELTA.channels,
        True,
        {"taps": (4, _DELTA.channels)},
        {"g": (2,), "beta": (2,)},
        {},
        2 * 128,
    ),
    "jamba": CountedLayer(
        StateMemory(8, RecurrentRule(None, ChannelScan(1024, 16))),
        1024,
        False,
        {PACE: (16, 1024), SKIP: (1024,)},
        {"dt": (1024,)},
        {"b": (16,), "c": (16,)},
        1024,
    ),
    "jamba-window": _window_layer(8, CausalConv(1024, 4, has_bias=True)),
    "lfm2-window": _window_layer(8, CausalConv(256, 3, has_activation=False)),
}


@dataclass(frozen=True)
class StateStep:
    """A step of rows with `tokens` tokens each."""

    rows: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.rows} rows of {self.tokens}"

    @property
    def turns(self) -> int:
        """The turns of XLA's loop over rows and runs of a prompt."""
        return self.rows * -(-self.tokens // PAGE_SIZE)

    def bytes_of_states(self, layer: CountedLayer) -> int:
        """Returns the bytes of states: each row's is read once, and one is written for each page of its tokens."""
        return layer.state_bytes * (self.rows + self.turns)

    def least_bytes(self, layer: CountedLayer) -> int:
        """Returns the bytes of states, of tokens, and of what is read."""
        return self.bytes_of_states(layer) + self.rows * self.tokens * layer.token_bytes


STEPS = (StateStep(16, 1), StateStep(64, 1), StateStep(256, 1), StateStep(1, 512), StateStep(1, 2048))


@dataclass(frozen=True)
class Counted:
    """The kernels of one run of a program, the waits of the host, and the bytes that kernels read and write."""

    kernels: int = 0
    host_waits: int = 0
    num_bytes: int = 0

    def __add__(self, other: "Counted") -> "Counted":
        return Counted(
            self.kernels + other.kernels, self.host_waits + other.host_waits, self.num_bytes + other.num_bytes
        )

    def times(self, count: int) -> "Counted":
        return Counted(self.kernels * count, self.host_waits * count, self.num_bytes * count)


@dataclass(frozen=True)
class Counter:
    """Counts what the text of a program tells of one run of a step."""

    hlo: str
    layer: CountedLayer
    step: StateStep
    way: Way

    @cached_property
    def computations(self) -> dict[str, list[HloInstruction]]:
        return parse_hlo(self.hlo)[0]

    def count(self) -> Counted:
        return self._of_computation(parse_hlo(self.hlo)[1])

    def _of_computation(self, name: str) -> Counted:
        shapes = {instruction.name: instruction.shape for instruction in self.computations[name]}
        return sum((self._of(instruction, shapes) for instruction in self.computations[name]), Counted())

    def _of(self, instruction: HloInstruction, shapes: dict[str, str]) -> Counted:
        match instruction.opcode:
            case opcode if opcode in FREE or opcode.endswith(("-done", "-update")):
                return Counted()
            case "while":
                body, condition = (_named(instruction, attribute) for attribute in ("body", "condition"))
                turn = self._of_computation(body) + self._of_computation(condition)
                if known := re.search(r'known_trip_count":\{"n":"(\d+)"', instruction.rest):
                    return turn.times(int(known[1]))
                return (turn + Counted(host_waits=1)).times(self.step.turns)
            case "conditional":
                branches = re.search(r"branch_computations=\{([^}]*)\}", instruction.rest)
                names = re.findall(r"[\w.-]+", branches[1]) if branches else []
                names += [
                    _named(instruction, f"{way}_computation")
                    for way in ("true", "false")
                    if f"{way}_computation=" in instruction.rest
                ]
                longest = max(map(self._of_computation, names), key=lambda counted: counted.kernels)
                return longest + Counted(host_waits=1)
            case "call":
                return self._of_computation(_named(instruction, "to_apply"))
            case "fusion":
                return Counted(kernels=1, num_bytes=self._bytes_of_fusion(instruction, shapes))
        if self.way == "chunks" and "take_tokens" in instruction.rest:  # for it this step has no rows
            return Counted(kernels=1)
        if "mosaic_gpu" in instruction.rest:  # ours, in whose pages it touches only the states of its rows
            arrays = [*(shapes[name] for name in _operands(instruction)), *_arrays(instruction.shape)]
            sizes = [size for size in map(array_bytes, arrays) if size < self.layer.pages_bytes]
            return Counted(kernels=1, num_bytes=sum(sizes) + self.step.bytes_of_states(self.layer))
        operands = sum(array_bytes(shapes[name]) for name in _operands(instruction))
        return Counted(kernels=1, num_bytes=operands + array_bytes(instruction.shape))

    def _bytes_of_fusion(self, fusion: HloInstruction, shapes: dict[str, str]) -> int:
        inside = self.computations[_named(fusion, "calls")]
        own = {instruction.name: instruction for instruction in inside}
        given = dict(zip(_parameters(inside), _operands(fusion), strict=True))
        users: dict[str, list[HloInstruction]] = {}
        for instruction in inside:
            for name in _operands(instruction):
                users.setdefault(name, []).append(instruction)
        read = sum(self._bytes_read(name, shapes[operand], users) for name, operand in given.items())
        return read + sum(_bytes_written(root, own) for root in _roots(inside[-1], own))

    def _bytes_read(self, name: str, shape: str, users: dict[str, list[HloInstruction]]) -> int:
        """Returns the bytes that are read of a parameter: of one that is sliced or updated, only those."""
        parts = 0
        for user in users.get(name, []):
            if user.opcode == "bitcast":
                parts += self._bytes_read(user.name, shape, users)
            elif user.opcode in ("dynamic-slice", "gather", "slice"):
                parts += array_bytes(user.shape)
            elif not (user.opcode == "dynamic-update-slice" and _operands(user)[0] == name):
                return array_bytes(shape)
        return min(parts, array_bytes(shape))


def _bytes_written(root: HloInstruction, own: dict[str, HloInstruction]) -> int:
    while root.opcode == "bitcast":
        root = own[_operands(root)[0]]
    if root.opcode == "dynamic-update-slice":
        return array_bytes(own[_operands(root)[1]].shape)
    return array_bytes(root.shape)


def _roots(root: HloInstruction, own: dict[str, HloInstruction]) -> Iterator[HloInstruction]:
    if root.opcode == "tuple":
        yield from (own[name] for name in _operands(root))
    else:
        yield root


def _parameters(inside: list[HloInstruction]) -> list[str]:
    numbered = {int(i.rest.split(")")[0]): i.name for i in inside if i.opcode == "parameter"}
    return [numbered[number] for number in sorted(numbered)]


def _operands(instruction: HloInstruction) -> list[str]:
    return re.findall(r"%([\w.-]+)", instruction.rest.split(")")[0])


def _arrays(shape: str) -> list[str]:
    """Returns the arrays of a tuple, or the one that is none."""
    return re.findall(r"\w+\[[\d,]*\]", shape)


def _named(instruction: HloInstruction, attribute: str) -> str:
    found = re.search(rf"\b{attribute}=%?([\w.-]+)", instruction.rest)
    assert found is not None, instruction
    return found[1]


@dataclass(frozen=True)
class TokenPath:
    """The work of one warp, and of its multiprocessor's matrix units, before a row's next token can be taken in."""

    instructions: float  # of PTX, for each token; moves between registers are not counted
    matrix_cycles: float  # for each token, at the full rate of the chip

    @classmethod
    def read(cls, ptx: str, way: Way, chip: GpuChip) -> "TokenPath":
        """Counts in the innermost loop that adds up, which takes in a token or a chunk."""
        mark, tokens = ("wgmma.mma_async", CHUNK) if way == "chunks" else ("shfl.sync", 1)
        lines = ptx.splitlines()
        labels = {line[:-1]: number for number, line in enumerate(lines) if re.fullmatch(r"\$L\w+:", line)}
        branches = ((number, re.search(r"\bbra[.\w]*\s+(\$L\w+);", line)) for number, line in enumerate(lines))
        loops = [(labels[branch[1]], end) for end, branch in branches if branch and labels[branch[1]] < end]
        bodies = (lines[begin:end] for begin, end in loops)
        body = min((body for body in bodies if any(mark in line for line in body)), key=len)
        products = [int(found[1]) for line in body if (found := re.search(r"wgmma\.\S+\.m64n(\d+)k16\.", line))]
        rate = chip.bf16_flops / 2 / chip.num_sms / (chip.clock_ghz * 1e9)  # multiplications in a cycle
        instructions = sum(bool(re.match(r"\s+(@!?%p\d+\s+)?(?!mov)[a-z][\w.:]*\s.*;$", line)) for line in body)
        return cls((instructions + len(products)) / tokens, sum(64 * 16 * n for n in products) / rate / tokens)


def compile_step(layer: CountedLayer, step: StateStep, backend: Backend, mesh: Any, way: Way) -> jax.stages.Compiled:
    """Compiles a layer of a step, which updates its pages in place."""
    everywhere = NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]
    num_tokens = step.rows * step.tokens if step.tokens == 1 else step.rows * step.tokens + PAGE_SIZE
    memory, K = layer.memory, layer.memory.num_kv_heads

    def on_device(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)  # type: ignore[no-untyped-call]

    def run(pages: Any, place: Any, table: Any, starts: Any, lens: Any, weights: Any, tokens: Any, shared: Any) -> Any:
        rows = RaggedRows.build(table, starts, lens, num_tokens)
        tokens |= {name: jnp.broadcast_to(x[:, None], (len(x), K, *x.shape[1:])) for name, x in shared.items()}
        if way == "XLA":
            return memory.advance(pages, place, Columns(rows, PAGE_SIZE), weights, tokens)
        kernel = state_kernel(memory, backend)
        assert kernel is not None
        make_plan = kernel.plan
        if isinstance(kernel, GpuStates):
            make_plan = kernel.chunk_plan if way == "chunks" else kernel.token_plan
        return kernel(pages, place, make_plan(rows, PAGE_SIZE), weights, tokens)

    i32 = jnp.int32
    pages = memory.pages(LAYERS, NUM_PAGES, PAGE_SIZE, jnp.bfloat16, backend)
    table, of_rows = on_device(step.rows, 64, dtype=i32), on_device(step.rows, dtype=i32)
    weights = {name: on_device(K, *shape) for name, shape in layer.weights.items()}
    tokens = {name: on_device(num_tokens, K, *shape) for name, shape in layer.tokens.items()}
    tokens[CHANNELS] = on_device(num_tokens, K, layer.channels, dtype=jnp.bfloat16)
    shared = {name: on_device(num_tokens, *shape) for name, shape in layer.shared.items()}
    arguments = on_device(*pages.shape), on_device(dtype=i32), table, of_rows, of_rows, weights, tokens, shared
    with lowering_for(mesh):
        return jax.jit(run, donate_argnums=0).lower(*arguments).compile({"xla_gpu_enable_triton_gemm": False})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chip", nargs="?", default="h200")
    parser.add_argument("--layers", nargs="+", choices=COUNTED, default=list(COUNTED), help="those that are counted")
    arguments = parser.parse_args()
    about, chip = machine(), chip_named(arguments.chip)
    if not isinstance(chip, GpuChip):
        parser.error(f"{arguments.chip} is no GPU")
    mesh = make_mesh(MeshShape(1, 1), compile_only_devices(chip, 1))
    backend = Backend.of_chip(chip)
    results, paths = [], {}
    for name in arguments.layers:
        layer = COUNTED[name]
        print(f"{name:<16}{'':>8}{'kernels':>10}{'waits':>8}{'MB':>10}{'least MB':>10}{'ratio':>7}{'temps MB':>10}")
        for step in STEPS:
            by_chunks = step.tokens > FEW_TOKENS and layer.goes_by_chunks
            ways: tuple[Way, ...] = ("XLA", "tokens", "chunks") if by_chunks else ("XLA", "tokens")
            for way in ways:
                with TemporaryDirectory() as directory:
                    os.environ.update(MOSAIC_GPU_DUMP_TO=directory, MOSAIC_GPU_DUMP_PTX="1")
                    compiled = compile_step(layer, step, backend, mesh, way)
                    for file in Path(directory).glob(f"take_{way}*.ptx"):
                        if step.tokens > 1:
                            paths[way] = TokenPath.read(file.read_text(), way, chip)
                hlo, memory = compiled.as_text(), compiled.memory_analysis()
                assert hlo is not None and memory is not None
                counted = Counter(hlo, layer, step, way).count()
                least, temps = step.least_bytes(layer), memory.temp_size_in_bytes
                print(
                    f"{step!s:<16}{way:>8}{counted.kernels:>10}{counted.host_waits:>8}{counted.num_bytes / 1e6:>10.1f}"
                    f"{least / 1e6:>10.1f}{counted.num_bytes / least:>7.2f}{temps / 1e6:>10.1f}",
                    flush=True,
                )
                of_step = asdict(step) | {"layer": name, "way": way, "least_bytes": least, "temp_bytes": temps}
                results.append(of_step | asdict(counted))
    for way, path in paths.items():
        print(f"{way}: {path.instructions:.1f} instructions and {path.matrix_cycles:.1f} matrix cycles for a token")
    of_tokens = {way: asdict(path) for way, path in paths.items()}
    print(write_record("states-gpu", about, {"chip": arguments.chip, "steps": results, "token_paths": of_tokens}))


if __name__ == "__main__":
    main()
