"""Tells how long libtpu expects the states of one layer to take for a step, beside the bytes that they must move.

Nothing runs: programs are compiled for TPUs that are not here, in the environment .aot. The text of a compiled program
has an estimate of cycles for each operation of XLA. Loops over rows and runs count as often as the step has them, and
inner loops as often as their condition tells. A custom call has no estimate and counts nothing. The compiler reports
how many bundles of instructions a visit of a kernel takes, one a cycle. While they compute, the next state is fetched,
so a kernel takes its bundles or its bytes, whichever is more. Bytes take what the same compiler expects of a copy of as
many: each state read and written once, tokens read, and results written. Programs are compiled for 64 rows with a token
each and for a prompt of 512 tokens in pages of 64. Other steps follow from the length of their loops. It prints a table
and writes benchmarks/results/states-estimate-DATE-COMMIT.json after each chip.

    JAX_PLATFORMS=cpu .aot/bin/python -m benchmarks.states_estimate [CHIP ..]
"""

import argparse
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from benchmarks.result_files import ROOT, machine, write_record
from jaxvllm.models.causal_conv import CausalConv
from jaxvllm.models.gated_delta import GatedDelta
from jaxvllm.models.kimi_delta import ChannelDelta
from jaxvllm.models.mamba import ChannelScan
from jaxvllm.models.mamba2 import SelectiveScan
from jaxvllm.models.recurrence import CHANNELS, RecurrentRule
from jaxvllm.models.short_conv import WindowAlone
from jaxvllm.models.state_memory import Columns, StateMemory
from jaxvllm.models.tpu_states import TpuStates
from jaxvllm.planner.hlo import parse_hlo
from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.chips import TpuChip, chip_named
from pallas_kernels.deviceless import compile_only_devices
from pallas_kernels.linear_attention.visits import TILE
from pallas_kernels.ragged_paged_attention import RaggedRows
from sharding.mesh import MeshShape
from sharding.placement import make_mesh, place

CHIPS = ("v5e", "v6e", "v7x")
PAGE_SIZE = 64  # as many tokens as XLA takes in together at most
COPIED = 2**28  # bytes of the copy, of which a chip keeps nothing in VMEM

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_LOOP = re.compile(r"\bcondition=%?([\w.-]+), body=%?([\w.-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_NAME = re.compile(r"[\w.-]+")
_BUNDLE = re.compile(r"^ *0x[0-9a-f]+ .*?: (>*) ?\{", re.MULTILINE)  # an angle for each loop around it


@dataclass(frozen=True)
class ProgramCost:
    """The cycles of a program: `once`, and `each` for each turn of the loops whose length the rows decide."""

    once: int = 0
    each: int = 0

    def __add__(self, other: "ProgramCost") -> "ProgramCost":
        return ProgramCost(self.once + other.once, self.each + other.each)


def cost_of(hlo: str) -> ProgramCost:
    """Returns what the compiler expects of the program with this text."""
    computations, entry = parse_hlo(hlo)

    def walk(name: str) -> ProgramCost:
        total = ProgramCost()
        for one in computations[name]:
            if one.opcode == "while" and (loop := _LOOP.search(one.rest)):
                inside = walk(loop[2])
                lengths = [
                    int(i.rest.split(")")[0])
                    for i in computations[loop[1]]
                    if i.opcode == "constant" and i.shape.startswith("s32[]")
                ]
                if lengths:
                    total += ProgramCost(inside.once * lengths[0], inside.each * lengths[0])
                else:
                    total += ProgramCost(0, inside.once)
            elif one.opcode == "conditional" and (branches := _BRANCHES.search(one.rest)):
                total += max(map(walk, _NAME.findall(branches[1])), key=lambda cost: cost.once)
            elif cycles := _CYCLES.search(one.rest):
                total += ProgramCost(int(cycles[1]))
        return total

    return walk(entry)


@dataclass(frozen=True)
class StateLayer:
    """The states of one layer of a model: heads (or groups), their rule, and what weights and tokens have for it."""

    model: str
    num_heads: int
    rule: RecurrentRule
    weights: Mapping[str, tuple[int, ...]]
    token: Mapping[str, tuple[int, ...]]
    num_channels: int  # of a head
    num_read: int  # numbers that are read of a head

    @property
    def memory(self) -> StateMemory:
        return StateMemory(self.num_heads, self.rule)


def layers() -> Iterator[StateLayer]:
    delta, channels = GatedDelta(2, 128, 128), ChannelDelta(128)
    taps = {"taps": (4, delta.channels)}
    rule = RecurrentRule(CausalConv(delta.channels, 4), delta)
    yield StateLayer("Qwen3-Next", 16, rule, taps, {"g": (2,), "beta": (2,)}, delta.channels, 2 * 128)
    taps = {"taps": (4, channels.channels)}
    rule = RecurrentRule(CausalConv(channels.channels, 4), channels)
    yield StateLayer("Kimi Linear", 32, rule, taps, {"g": (128,), "beta": ()}, channels.channels, 128)
    for model, num_groups, scan in (
        ("Nemotron-H", 8, SelectiveScan(16, 64, 128)),
        ("Granite 4", 1, SelectiveScan(128, 64, 128)),
        ("Falcon-H1", 2, SelectiveScan(16, 128, 256)),
    ):
        biased = {"taps": (4, scan.channels), "bias": (scan.channels,), "skip": (scan.num_heads,)}
        rule, gates = RecurrentRule(CausalConv(scan.channels, 4, has_bias=True), scan), (scan.num_heads,)
        yield StateLayer(model, num_groups, rule, biased, {"g": gates, "dt": gates}, scan.channels, scan.values)
    # The channels of Jamba are in 8 blocks of 1,024, and those of LFM2 in 8 of 256. Both have memories of windows.
    weights, token = {"pace": (16, 1024), "skip": (1024,)}, {"dt": (1024,), "b": (16,), "c": (16,)}
    yield StateLayer("Jamba", 8, RecurrentRule(None, ChannelScan(1024, 16)), weights, token, 1024, 1024)
    rule, biased = (
        RecurrentRule(CausalConv(1024, 4, has_bias=True), WindowAlone()),
        {"taps": (4, 1024), "bias": (1024,)},
    )
    yield StateLayer("Jamba's window", 8, rule, biased, {}, 1024, 1024)
    rule = RecurrentRule(CausalConv(256, 3, has_activation=False), WindowAlone())
    yield StateLayer("LFM2's window", 8, rule, {"taps": (3, 256)}, {}, 256, 256)


@dataclass(frozen=True)
class StateStep:
    """Rows that each compute so many tokens."""

    num_rows: int
    tokens_of_row: int

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.tokens_of_row

    @property
    def turns(self) -> int:
        """States take in tokens so often, where those of a row in one tile count once."""
        return self.num_rows * -(-self.tokens_of_row // TILE)

    def __str__(self) -> str:
        return f"{self.num_rows} rows" if self.tokens_of_row == 1 else f"prompt of {self.tokens_of_row}"


# What is compiled, and the steps whose cost follows from it.
STEPS = {
    StateStep(64, 1): (StateStep(16, 1), StateStep(64, 1), StateStep(256, 1)),
    StateStep(1, 512): (StateStep(1, 512), StateStep(1, 2048)),
}


def least_bytes(layer: StateLayer, step: StateStep) -> int:
    """Returns the bytes that a step must move: states read and written once, tokens read, and results written."""
    state = 4 * layer.num_heads * sum(prod(part) for part in layer.rule.parts)
    token = layer.num_heads * (2 * layer.num_channels + 4 * sum(map(prod, layer.token.values())) + 2 * layer.num_read)
    return 2 * step.num_rows * state + step.num_tokens * token


def compiled(layer: StateLayer, step: StateStep, backend: Backend, mesh: Mesh) -> str:
    """Returns the text of the program by which one layer's states take in a step."""
    memory, everywhere = layer.memory, place(mesh)(())
    states = TpuStates.of(memory, backend)

    def on_device(shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)  # type: ignore[no-untyped-call]

    def run(
        pages: jax.Array,
        page_table: jax.Array,
        starts: jax.Array,
        lengths: jax.Array,
        layer_place: jax.Array,
        weights: Mapping[str, jax.Array],
        tokens: Mapping[str, jax.Array],
    ) -> tuple[jax.Array, jax.Array]:
        rows = RaggedRows.build(page_table, starts, lengths, step.num_tokens)
        if states is None:
            read, pages = memory.advance(pages, layer_place, Columns(rows, PAGE_SIZE), weights, tokens)
        else:
            read, pages = states(pages, layer_place, states.plan(rows, PAGE_SIZE), weights, tokens)
        return read.astype(jnp.bfloat16), pages

    T, K = step.num_tokens, layer.num_heads
    pages = memory.pages(2, 2 * step.num_rows + 64, PAGE_SIZE, jnp.bfloat16, backend)
    tokens = {name: on_device((T, K, *shape)) for name, shape in layer.token.items()}
    tokens[CHANNELS] = on_device((T, K, layer.num_channels), jnp.bfloat16)
    weights = {name: on_device((K, *shape)) for name, shape in layer.weights.items()}
    table = on_device((step.num_rows, 4096 // PAGE_SIZE), jnp.int32)
    rows, number = on_device((step.num_rows,), jnp.int32), on_device((), jnp.int32)
    arguments = on_device(pages.shape), table, rows, rows, number, weights, tokens
    text = jax.jit(run, donate_argnums=0).lower(*arguments).compile().as_text()
    assert text is not None
    return text


def cycles_per_byte(mesh: Mesh) -> float:
    """Returns what the compiler expects of a byte that is read, or written."""
    shape, everywhere = (COPIED // 512, 128), place(mesh)(())
    array = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=everywhere)  # type: ignore[no-untyped-call]
    text = jax.jit(lambda x: x + 1).lower(array).compile().as_text()
    assert text is not None
    return cost_of(text).once / (2 * COPIED)


@contextmanager
def bundle_dumps() -> Iterator[Path]:
    """Makes libtpu write the bundles of kernels that are compiled within to a folder, from the first topology on."""
    with tempfile.TemporaryDirectory() as dumps:
        # libtpu reads this when it is loaded, which the first topology causes.
        passes = "--xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=.*final_bundles.*"
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={dumps} {passes}"
        yield Path(dumps)


def tpu_named(name: str) -> TpuChip:
    """Returns the TPU of that name."""
    chip = chip_named(name)
    assert isinstance(chip, TpuChip), f"{name} is no TPU"
    return chip


def bundles_of(dumps: Path, kernel: str) -> int:
    """Returns the bundles of one visit of a kernel, of the only program whose dumps are there.

    A loop within a visit goes over the tokens of a tile, of which there are as many as it has at most.
    """
    [listing] = [path for path in dumps.iterdir() if kernel in path.name and path.name.endswith("01-final_bundles.txt")]
    depths = [len(depth) for depth in _BUNDLE.findall(listing.read_text())]
    return sum(TILE if depth > 1 else 1 for depth in depths)


@dataclass(frozen=True)
class StateEstimate:
    """The cycles of a step by XLA and by the kernel, if there is one, and those of its bytes."""

    chip: str
    model: str
    step: str
    bytes: int
    roofline: float
    xla: int
    kernel: int | None
    bundles: int | None  # of the kernel, for all heads of one visit

    def row(self) -> str:
        kernel = "-" if self.kernel is None else f"{self.kernel / self.roofline:.1f}"
        roofline, xla = f"{self.roofline / 1000:,.0f}", f"{self.xla / self.roofline:.1f}"
        return f"| {' | '.join((self.chip, self.model, self.step, roofline, xla, kernel))} |"


def estimates(chip: TpuChip, dumps: Path) -> Iterator[StateEstimate]:
    mesh = make_mesh(MeshShape(1, 1), compile_only_devices(chip, 1))
    per_byte, backend = cycles_per_byte(mesh), Backend.of_chip(chip)
    for layer in layers():
        for program, steps in STEPS.items():
            plain, own, bundles = cost_of(compiled(layer, program, REFERENCE, mesh)), None, None
            states = TpuStates.of(layer.memory, backend)
            if states is not None:
                for path in dumps.iterdir():
                    path.unlink()
                own = cost_of(compiled(layer, program, backend, mesh))
                is_single = program.tokens_of_row == 1
                bundles = bundles_of(dumps, "_single" if is_single else "_chunk")
                bundles *= layer.num_heads // (states.blocks.single if is_single else states.blocks.chunk)
            for step in steps:
                num_bytes = least_bytes(layer, step)
                roofline, kernel = num_bytes * per_byte, None
                if own is not None and bundles is not None:
                    kernel = own.once + max(bundles * step.turns, int(roofline))
                xla = plain.once + plain.each * step.turns
                yield StateEstimate(chip.name, layer.model, str(step), num_bytes, roofline, xla, kernel, bundles)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chips", nargs="*", default=CHIPS)
    chips, about, found = parser.parse_args().chips, machine(), []
    print("| chip | states of | step | bytes, thousand cycles | XLA, times that | kernel, times that |")
    print("|---|---|---|---|---|---|")
    with bundle_dumps() as dumps:
        for name in chips:
            for estimate in estimates(tpu_named(name), dumps):
                found.append(estimate)
                print(estimate.row(), flush=True)
            record = {"versions": {"libtpu": version("libtpu")}, "estimates": [asdict(estimate) for estimate in found]}
            path = write_record("states-estimate", about, record)
            print(f"written to {path.relative_to(ROOT)}", flush=True)


if __name__ == "__main__":
    main()
