"""Reads the optimized HLO text of a compiled program: its instructions, its collectives, and arrays in a TPU's VMEM."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from sharding.rules import MODEL

Kind = Literal[
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
]
# Takes the place of a mesh axis for what all devices of all replicas send each other.
ALL_DEVICES = "all"

# `%name (parameters) -> result {` opens a computation, and `}` closes it.
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
# `%name = shape opcode(operands), attributes`: the opcode is the first word after the shape that a parenthesis follows.
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
# Attributes that name one computation, or several in braces.
_CALLED = re.compile(r"\b(?:calls|to_apply|called_computations)=(\{[^}]*\}|[%\w.-]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations|true_computation|false_computation)=(\{[^}]*\}|[%\w.-]+)")
_OPERAND = re.compile(r"%([\w.-]+)")
_NAME = re.compile(r"[\w.-]+")
# The mesh axes over which devices take part: `replica_groups=mesh['data'=2,'stage'=1,'model'=4] {'model'}`.
_OVER = re.compile(r"\breplica_groups=mesh\[[^\]]*\] \{'(\w+)'\}")
_BODY = re.compile(r"\bcondition=%?([\w.-]+), body=%?([\w.-]+)")


# `bf16[8,128]{1,0:T(8,128)(2,1)S(1)}`: the array, then its layout, whose memory space 1 is VMEM.
_IN_VMEM = re.compile(r"\b(\w+\[[\d,]*\])\{[^}]*S\(1\)")


class UnreadableHlo(ValueError):
    """The text of a program differs from the text that the known compilers write."""


@dataclass(frozen=True, order=True)
class Collective:
    """The collectives of one kind and size, over one axis of the mesh, in one run of the program."""

    kind: Kind
    count: int  # a run
    num_bytes: int  # of the result on each device, each time; of a ragged all-to-all what it sends at most by design
    conditional: bool  # only when a branch is taken: in a step, when a row samples or wants log-probabilities
    over: str = MODEL  # the axis; what does not say is over that of a replica's devices

    def bytes_sent(self, ring: int) -> float:
        """Returns the least bytes that each of the `ring` devices, or chips, in a ring sends in a run.

        Each of N passes on N - 1 of N equal parts; in an all-reduce twice, to add up and to distribute the sum. (An
        all-to-all sends as much. Parts for a distant device use the ring for longer, which is not counted.)
        """
        share = (ring - 1) / ring
        match self.kind:
            case "all-reduce":
                each = 2 * share * self.num_bytes
            case "reduce-scatter":
                each = (ring - 1) * self.num_bytes
            case "collective-permute" | "collective-broadcast":
                each = self.num_bytes
            case "all-gather" | "all-to-all" | "ragged-all-to-all":
                each = share * self.num_bytes
        return self.count * each


@dataclass(frozen=True)
class HloInstruction:
    """An instruction of a computation, as the text of a program writes it."""

    name: str
    shape: str
    opcode: str
    rest: str  # operands and attributes


def read_collectives(hlo: str) -> tuple[Collective, ...]:
    """Returns the collectives of one run of the program with the optimized HLO `hlo` (`Compiled.as_text()`).

    Larger ones come first. The body of a loop counts as often as it runs. A pair of start and done counts once, and so
    does a collective inside a fusion or an asynchronous call. Raises UnreadableHlo for a loop with collectives whose
    length the text does not tell.
    """
    computations, entry = parse_hlo(hlo)
    found: Counter[tuple[Kind, int, bool, str]] = Counter()
    for kind, num_bytes, conditional, over, times in _walk(computations, entry, False):
        found[kind, num_bytes, conditional, over] += times
    collectives = (
        Collective(kind, times, num_bytes, conditional, over)
        for (kind, num_bytes, conditional, over), times in found.items()
    )
    return tuple(sorted(collectives, key=lambda c: (c.conditional, -c.count * c.num_bytes, c.kind)))


def largest_vmem_array(hlo: str) -> tuple[int, str]:
    """Returns the bytes of the largest single array in VMEM, and its type; 0 and "" when there is none.

    The sizes of temporaries count HBM alone, so they leave out copies of weights or pages that XLA makes in VMEM: a
    scan over layers whose `ragged_dot` copies 64 MiB of experts in each reports 0.15 MiB of temporaries on v5e.
    Memory that a Pallas kernel allocates for itself is no such array. On a GPU, memory space 1 means something else.
    """
    return max(((array_bytes(array), array) for array in set(_IN_VMEM.findall(hlo))), default=(0, ""))


def parse_hlo(hlo: str) -> tuple[dict[str, list[HloInstruction]], str]:
    """Returns the instructions of each computation, and the name of the entry computation."""
    computations: dict[str, list[HloInstruction]] = {}
    entry, current = "", None
    for line in hlo.splitlines():
        if match := _COMPUTATION.match(line):
            current = computations.setdefault(match[2], [])
            entry = match[2] if match[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (match := _INSTRUCTION.match(line)):
            current.append(HloInstruction(*match.groups()))
    if not entry:
        raise UnreadableHlo("this is no HLO text: it has no ENTRY computation")
    return computations, entry


def _walk(
    computations: dict[str, list[HloInstruction]], name: str, conditional: bool
) -> Iterator[tuple[Kind, int, bool, str, int]]:
    """Yields (kind, bytes, conditional, axis, times) of each collective in a computation and in those that it calls."""
    one_of: list[list[tuple[Kind, int, bool, str, int]]] = []
    named = {instruction.name: instruction for instruction in computations.get(name, ())}
    for instruction in computations.get(name, ()):
        # Of a pair, the done has only the result; the start has the operands too, and which devices take part.
        opcode = instruction.opcode.removesuffix("-done")
        if opcode in get_args(Kind):
            start = instruction if opcode == instruction.opcode else named[_operand(instruction)]
            over, num_bytes = _OVER.search(start.rest), array_bytes(instruction.shape)
            axis = over[1] if over else MODEL
            if opcode == "ragged-all-to-all":
                # What is sent has room for the case that all rows go to one device, or the result has. That is not what
                # a device sends, and the text does not tell sizes that are known only while the program runs.
                axis, num_bytes = ALL_DEVICES, min(num_bytes, array_bytes(named[_operand(start)].shape))
            yield opcode, num_bytes, conditional, axis, 1  # type: ignore[misc]
        elif instruction.opcode == "while":
            match = _BODY.search(instruction.rest)
            assert match is not None, instruction
            inside = list(_walk(computations, match[2], conditional))
            if inside and _turns_once_at_most(computations[match[1]]):
                one_of.append(inside)
                continue
            trips = _trip_count(instruction, computations[match[1]]) if inside else 0
            for kind, num_bytes, branch, axis, times in inside:
                yield kind, num_bytes, branch, axis, times * trips
        elif instruction.opcode == "conditional":
            for called in _names(_BRANCHES, instruction):
                yield from _walk(computations, called, True)
        elif not instruction.opcode.endswith(("-done", "-update")):  # those name again what their start calls
            for called in _names(_CALLED, instruction):
                yield from _walk(computations, called, conditional)
    # Where stages differ, the loops of `run_if` follow each other, and a device takes a turn in that of its stage.
    yield from max(one_of, key=lambda found: sum(num_bytes * times for _, num_bytes, _, _, times in found), default=())


def _operand(instruction: HloInstruction) -> str:
    """Returns the name of the first operand."""
    match = _OPERAND.search(instruction.rest)
    assert match is not None, instruction
    return match[1]


def _names(attribute: re.Pattern[str], instruction: HloInstruction) -> Iterator[str]:
    for names in attribute.findall(instruction.rest):
        yield from _NAME.findall(names)


def _turns_once_at_most(condition: list[HloInstruction]) -> bool:
    """Returns whether a loop goes on by a value that its body makes, as that of `run_if` does, and counts nothing."""
    return all(instruction.opcode in ("parameter", "get-tuple-element", "copy") for instruction in condition)


def _trip_count(loop: HloInstruction, condition: list[HloInstruction]) -> int:
    """Returns how often a loop from 0 runs.

    XLA:CPU and XLA:GPU state it. For a TPU, the condition of the loop compares with a constant.
    """
    if known := _TRIP_COUNT.search(loop.rest):
        return int(known[1])
    constants = {i.name: int(i.rest.split(")")[0]) for i in condition if i.opcode == "constant" and "s32[]" in i.shape}
    for instruction in condition:
        if instruction.opcode == "compare" and "direction=LT" in instruction.rest:
            limits = [constants[name] for name in _OPERAND.findall(instruction.rest) if name in constants]
            if len(limits) == 1:
                return limits[0]
    raise UnreadableHlo(f"the loop {loop.name} has collectives, and the program does not tell how often it runs")


def array_bytes(shape: str) -> int:
    """Returns the bytes of an array in HLO text, or of all arrays of a tuple. Two elements of 4 bits share a byte."""
    return sum(
        math.prod(int(side) for side in sides.split(",") if side) * _num_bits(dtype) // 8
        for dtype, sides in _ARRAY.findall(shape)
    )


def _num_bits(dtype: str) -> int:
    """Returns the bits of an element: 8 for pred, else the number after the letters, as in s32, bf16 and f8e4m3fn."""
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return int(digits[1]) if digits else 8
