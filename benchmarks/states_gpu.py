"""Counts what one layer with states takes of a GPU: in plain XLA, and with our kernels token by token and by chunks.

Nothing runs: the programs are compiled for a GPU that is not here, in the environment .aot. A loop over rows counts as
often as the step has rows, or runs of a prompt, and a condition as its branch with more kernels. The host waits for a
number of each turn of a loop and of each condition, which is counted, too. The bytes of a fusion are those of its
operands and results, but a slice of pages has only those that it reads or writes. The least bytes are each state read
and written once, and the tokens.

What a row's next token waits for is counted in the loop that takes tokens in, by instructions of PTX of one warp and by
the time of matrix units, per token. It prints tables and writes benchmarks/results/states-gpu-DATE-COMMIT.json.

    .aot/bin/python -m benchmarks.states_gpu [CHIP]
"""

import argparse
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.result_files import machine, write_record
from jaxvllm.models.causal_conv import CausalConv
from jaxvllm.models.gated_delta import GatedDelta
from jaxvllm.models.gpu_states import GpuStates, GpuStatesPlan
from jaxvllm.models.recurrence import CHANNELS, RecurrentRule
from jaxvllm.models.state_memory import Columns, StateMemory
from jaxvllm.planner.hlo import HloInstruction, array_bytes, parse_hlo
from pallas_kernels.backend import Backend
from pallas_kernels.chips import GpuChip, chip_named
from pallas_kernels.deviceless import compile_only_devices
from pallas_kernels.linear_attention.gpu import FEW_TOKENS, plan_states
from pallas_kernels.linear_attention.gpu.factors import CHUNK
from pallas_kernels.ragged_paged_attention import RaggedRows
from sharding.mesh import MeshShape
from sharding.placement import make_mesh

# Qwen3-Next: 16 key heads with two value heads each, of 128 by 128.
DELTA = GatedDelta(values_per_key=2, key_size=128, value_size=128)
MEMORY = StateMemory(16, RecurrentRule(CausalConv(DELTA.channels, 4), DELTA))
PAGE_SIZE, NUM_PAGES, LAYERS = 64, 512, 2
PAGE_BYTES = MEMORY.page_bytes(PAGE_SIZE, jnp.bfloat16)
PAGES_BYTES = LAYERS * NUM_PAGES * PAGE_BYTES
type Way = Literal["XLA", "tokens", "chunks"]
# What XLA:GPU makes no kernel of.
FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id"}


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

    @property
    def state_bytes(self) -> int:
        """The bytes of states: each row's is read once, and one is written for each page of its tokens."""
        return PAGE_BYTES * (self.rows + self.turns)

    @property
    def least_bytes(self) -> int:
        """The bytes of states, of channels and gates, and of what is read."""
        token = MEMORY.num_kv_heads * (DELTA.channels * 2 + DELTA.values_per_key * (DELTA.value_size + 2) * 4)
        return self.state_bytes + self.rows * self.tokens * token


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
                turn = self._of_computation(body) + self._of_computation(condition) + Counted(host_waits=1)
                return turn.times(self.step.turns)
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
            sizes = [size for size in map(array_bytes, arrays) if size < PAGES_BYTES]
            return Counted(kernels=1, num_bytes=sum(sizes) + self.step.state_bytes)
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


def compile_step(step: StateStep, backend: Backend, mesh: Any, way: Way) -> jax.stages.Compiled:
    """Compiles a layer of a step, which updates its pages in place."""
    everywhere = NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]
    num_tokens = step.rows * step.tokens if step.tokens == 1 else step.rows * step.tokens + PAGE_SIZE

    def on_device(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)  # type: ignore[no-untyped-call]

    def run(pages: Any, place: Any, table: Any, starts: Any, lens: Any, weights: Any, tokens: Any) -> Any:
        rows = RaggedRows.build(table, starts, lens, num_tokens)
        if way == "XLA":
            return MEMORY.advance(pages, place, Columns(rows, PAGE_SIZE), weights, tokens)
        kernel = GpuStates.of(MEMORY, backend)
        assert kernel is not None
        by_tokens = GpuStatesPlan(rows, plan_states(rows, PAGE_SIZE), None)
        plan = by_tokens if way == "tokens" else kernel.plan(rows, PAGE_SIZE)
        return kernel(pages, place, plan, weights, tokens)

    K, r = MEMORY.num_kv_heads, DELTA.values_per_key
    pages = MEMORY.pages(LAYERS, NUM_PAGES, PAGE_SIZE, jnp.bfloat16, backend)
    i32 = jnp.int32
    table, of_rows = on_device(step.rows, 64, dtype=i32), on_device(step.rows, dtype=i32)
    weights = {"taps": on_device(K, 4, DELTA.channels)}
    gates = on_device(num_tokens, K, r)
    tokens = {CHANNELS: on_device(num_tokens, K, DELTA.channels, dtype=jnp.bfloat16), "g": gates, "beta": gates}
    arguments = on_device(*pages.shape), on_device(dtype=i32), table, of_rows, of_rows, weights, tokens
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), jax.default_device(mesh.devices.flat[0]):
        return jax.jit(run, donate_argnums=0).lower(*arguments).compile({"xla_gpu_enable_triton_gemm": False})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chip", nargs="?", default="h200")
    name = parser.parse_args().chip
    about, chip = machine(), chip_named(name)
    if not isinstance(chip, GpuChip):
        parser.error(f"{name} is no GPU")
    mesh = make_mesh(MeshShape(1, 1), compile_only_devices(chip, 1))
    backend = Backend.of_chip(chip)
    results, paths = [], {}
    print(f"{'step':<16}{'':>8}{'kernels':>10}{'waits':>8}{'MB':>10}{'least MB':>10}{'ratio':>7}{'temps MB':>10}")
    for step in STEPS:
        ways: tuple[Way, ...] = ("XLA", "tokens", "chunks") if step.tokens > FEW_TOKENS else ("XLA", "tokens")
        for way in ways:
            with TemporaryDirectory() as directory:
                os.environ.update(MOSAIC_GPU_DUMP_TO=directory, MOSAIC_GPU_DUMP_PTX="1")
                compiled = compile_step(step, backend, mesh, way)
                for file in Path(directory).glob(f"take_{way}*.ptx"):
                    if step.tokens > 1:
                        paths[way] = TokenPath.read(file.read_text(), way, chip)
            hlo, memory = compiled.as_text(), compiled.memory_analysis()
            assert hlo is not None and memory is not None
            counted = Counter(hlo, step, way).count()
            ratio, temps = counted.num_bytes / step.least_bytes, memory.temp_size_in_bytes
            print(
                f"{step!s:<16}{way:>8}{counted.kernels:>10}{counted.host_waits:>8}{counted.num_bytes / 1e6:>10.1f}"
                f"{step.least_bytes / 1e6:>10.1f}{ratio:>7.2f}{temps / 1e6:>10.1f}",
                flush=True,
            )
            of_step = asdict(step) | {"way": way, "least_bytes": step.least_bytes, "temp_bytes": temps}
            results.append(of_step | asdict(counted))
    for way, path in paths.items():
        print(f"{way}: {path.instructions:.1f} instructions and {path.matrix_cycles:.1f} matrix cycles for a token")
    of_tokens = {way: asdict(path) for way, path in paths.items()}
    print(write_record("states-gpu", about, {"chip": name, "steps": results, "token_paths": of_tokens}))


if __name__ == "__main__":
    main()
