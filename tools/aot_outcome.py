"""The outcome of compiling one program for one chip: the line that a worker sends, and the row that is printed."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from tools.kernel_resources import KernelResources

# ok: the program compiled, and meets its limits of memory and of spilled registers. refused: a NotImplementedError,
# which names an alternative.
Status = Literal["ok", "refused", "failed"]
# attention, experts, quantized, states: only the kernels, over layers. step: the engine's step around them.
Kind = Literal["attention", "experts", "quantized", "states", "step"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# The kinds that a process compiles. That of the kernels tells their resources, for which compilers dump.
PROCESSES = (KINDS[:-1], KINDS[-1:])


@dataclass(frozen=True)
class Outcome:
    """The outcome of one program.

    `seconds` are tracing, lowering and compiling together, on this machine. `cpu_seconds` are those of all its cores,
    which other work on the machine changes less.
    """

    program: str
    status: Status
    seconds: float
    message: str = ""  # why it is not ok
    cpu_seconds: float = 0.0
    temp_bytes: int = 0  # beside arguments and results
    alias_bytes: int = 0  # of arguments that are updated in place
    vmem_array_bytes: int = 0  # of the largest array that a TPU's program keeps in VMEM, outside of kernels
    kernels: tuple[KernelResources, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "Outcome":
        fields = json.loads(line)
        fields["kernels"] = tuple(KernelResources(**kernel) for kernel in fields["kernels"])
        return cls(**fields)

    def row(self, chip: str) -> str:
        """Returns one line of the table."""
        memory = f"{self.temp_bytes / 2**20:9.1f}{self.alias_bytes / 2**20:9.1f}{self.vmem_array_bytes / 2**20:9.1f}"
        used = [self._most(lambda k: k.vmem_bytes, 2**10), self._most(lambda k: k.shared_memory_bytes, 2**10)]
        used += [self._most(lambda k: k.registers), self._most(lambda k: k.spill_bytes)]
        cells = f"{chip:<10}{self.program:<44}{self.status:>8}{self.seconds:8.1f}{self.cpu_seconds:8.1f}{memory}"
        return f"{cells}{''.join(f'{n:>9}' for n in used)}  {self.message}".rstrip()

    def _most(self, amount: Callable[[KernelResources], int | None], unit: int = 1) -> str:
        """Returns the largest of the kernels' amounts, or a dash where the compiler does not tell."""
        amounts = [value for kernel in self.kernels if (value := amount(kernel)) is not None]
        return f"{max(amounts) / unit:.0f}" if amounts else "-"


# The columns have the memory of the program, then the most that one of its kernels takes.
_COLUMNS = {
    "temps": "MiB",
    "in place": "MiB",
    "in VMEM": "MiB",
    "VMEM": "KiB",
    "shared": "KiB",
    "regis-": "ters",
    "spills": "bytes",
}
HEADER = (
    f"{'':<78}{''.join(f'{name:>9}' for name in _COLUMNS)}\n"
    f"{'chip':<10}{'program':<44}{'status':>8}{'s':>8}{'CPU s':>8}{''.join(f'{unit:>9}' for unit in _COLUMNS.values())}"
)
