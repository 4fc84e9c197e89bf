"""What devices tell each other in a compiled program: read from the text of its optimized HLO."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast"]

# `%name (parameters) -> result {` opens a computation, `}` closes it.
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
# `%name = shape opcode(operands), attributes`: the opcode is the first word after the shape that a parenthesis follows.
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
# Attributes that name one computation, or several in braces.
_CALLED = re.compile(r"\b(?:calls|to_apply|called_computations)=(\{[^}]*\}|[%\w.-]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations|true_computation|false_computation)=(\{[^}]*\}|[%\w.-]+)")
_NAME = re.compile(r"[\w.-]+")
_BODY = re.compile(r"\bcondition=%?([\w.-]+), body=%?([\w.-]+)")


class UnreadableHlo(ValueError):
    """The text of a program is not as the compilers that we know write it."""


@dataclass(frozen=True, order=True)
class Collective:
    """Collectives of one kind and size that one run of the program meets."""

    kind: Kind
    count: int  # a run
    num_bytes: int  # of the result on each device, each time
    conditional: bool  # only when a branch is taken: in a step, when a row samples or wants log-probabilities

    def bytes_sent(self, ring: int) -> float:
        """Bytes that each of the `ring` devices, or chips, that form a ring sends at least in a run.

        N of them pass N - 1 of N equal parts on, an all-reduce twice: once to add up and once to tell. (An all-to-all
        sends as much, and what goes further than to a neighbour takes the ring for longer: that is not counted.)
        """
        share = (ring - 1) / ring
        match self.kind:
            case "all-reduce":
                each = 2 * share * self.num_bytes
            case "reduce-scatter":
                each = (ring - 1) * self.num_bytes
            case "collective-permute" | "collective-broadcast":
                each = self.num_bytes
            case "all-gather" | "all-to-all":
                each = share * self.num_bytes
        return self.count * each


@dataclass(frozen=True)
class _Instruction:
    name: str
    shape: str
    opcode: str
    rest: str  # operands and attributes


def read_collectives(hlo: str) -> tuple[Collective, ...]:
    """The collectives of one run of the program whose optimized HLO is `hlo` (`Compiled.as_text()`), larger first.

    Bodies of loops count as often as they run; a pair of start and done is one; so is what a fusion or an asynchronous
    call wraps. UnreadableHlo: a loop with collectives whose length the text does not tell.
    """
    computations, entry = _parse(hlo)
    found: Counter[tuple[Kind, int, bool]] = Counter()
    for kind, num_bytes, conditional, times in _walk(computations, entry, False):
        found[kind, num_bytes, conditional] += times
    collectives = (Collective(kind, times, size, conditional) for (kind, size, conditional), times in found.items())
    return tuple(sorted(collectives, key=lambda c: (c.conditional, -c.count * c.num_bytes, c.kind)))


def _parse(hlo: str) -> tuple[dict[str, list[_Instruction]], str]:
    """The instructions of each computation, and the name of the one that runs."""
    computations: dict[str, list[_Instruction]] = {}
    entry, current = "", None
    for line in hlo.splitlines():
        if match := _COMPUTATION.match(line):
            current = computations.setdefault(match[2], [])
            entry = match[2] if match[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (match := _INSTRUCTION.match(line)):
            current.append(_Instruction(*match.groups()))
    if not entry:
        raise UnreadableHlo("this is no HLO text: it has no ENTRY computation")
    return computations, entry


def _walk(
    computations: dict[str, list[_Instruction]], name: str, conditional: bool
) -> Iterator[tuple[Kind, int, bool, int]]:
    """(kind, bytes, conditional, times) of each collective in a computation and in all that it calls."""
    for instruction in computations.get(name, ()):
        # The result of a pair is whole at its done; its start has the operands too.
        opcode = instruction.opcode.removesuffix("-done")
        if opcode in get_args(Kind):
            yield opcode, array_bytes(instruction.shape), conditional, 1  # type: ignore[misc]
        elif instruction.opcode == "while":
            match = _BODY.search(instruction.rest)
            assert match is not None, instruction
            inside = list(_walk(computations, match[2], conditional))
            trips = _trip_count(instruction, computations[match[1]]) if inside else 0
            for kind, num_bytes, branch, times in inside:
                yield kind, num_bytes, branch, times * trips
        elif instruction.opcode == "conditional":
            for called in _names(_BRANCHES, instruction):
                yield from _walk(computations, called, True)
        elif not instruction.opcode.endswith(("-done", "-update")):  # those name again what their start calls
            for called in _names(_CALLED, instruction):
                yield from _walk(computations, called, conditional)


def _names(attribute: re.Pattern[str], instruction: _Instruction) -> Iterator[str]:
    for names in attribute.findall(instruction.rest):
        yield from _NAME.findall(names)


def _trip_count(loop: _Instruction, condition: list[_Instruction]) -> int:
    """How often a loop from 0 runs: XLA:CPU and XLA:GPU say so, for a TPU the condition compares with a constant."""
    if known := _TRIP_COUNT.search(loop.rest):
        return int(known[1])
    constants = {i.name: int(i.rest.split(")")[0]) for i in condition if i.opcode == "constant" and "s32[]" in i.shape}
    for instruction in condition:
        if instruction.opcode == "compare" and "direction=LT" in instruction.rest:
            limits = [constants[name] for name in re.findall(r"%([\w.-]+)", instruction.rest) if name in constants]
            if len(limits) == 1:
                return limits[0]
    raise UnreadableHlo(f"the loop {loop.name} has collectives, and the program does not tell how often it runs")


def array_bytes(shape: str) -> int:
    """Bytes of an array as HLO text describes it, or of all in a tuple; 4-bit types are two to the byte."""
    return sum(
        math.prod(int(side) for side in sides.split(",") if side) * _num_bits(dtype) // 8
        for dtype, sides in _ARRAY.findall(shape)
    )


def _num_bits(dtype: str) -> int:
    """pred: 8; else the number behind the letters: s32, bf16, f8e4m3fn."""
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return int(digits[1]) if digits else 8
