"""The values that a kernel computes with: Python's operators on them emit instructions.

Values are 64-bit integers (addresses too), float32, or vectors of these.
"""

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llvmlite import ir

if TYPE_CHECKING:
    from pallas_kernels.cpu.emit import Emitter

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32 = ir.FloatType()

type Number = "Value | int | float"


@dataclass(frozen=True)
class Value:
    """A value that the kernel will have. Python's operators on it emit instructions; integers are signed."""

    emitter: "Emitter"
    ir: Any

    @property
    def _element(self) -> Any:
        return self.ir.type.element if isinstance(self.ir.type, ir.VectorType) else self.ir.type

    def _like(self, number: Number) -> Any:
        return number.ir if isinstance(number, Value) else ir.Constant(self.ir.type, elements(number, self.ir.type))

    def _binary(self, name: str, other: Number) -> "Value":
        name = f"f{name}" if self._element == F32 else name
        return Value(self.emitter, getattr(self.emitter.builder, name)(self.ir, self._like(other)))

    def _compare(self, sign: str, other: Number) -> "Value":
        builder = self.emitter.builder
        compare = builder.fcmp_ordered if self._element == F32 else builder.icmp_signed
        return Value(self.emitter, compare(sign, self.ir, self._like(other)))

    def __add__(self, other: Number) -> "Value":
        return self._binary("add", other)

    def __sub__(self, other: Number) -> "Value":
        return self._binary("sub", other)

    def __mul__(self, other: Number) -> "Value":
        return self._binary("mul", other)

    def __truediv__(self, other: Number) -> "Value":
        return self._binary("div", other)

    def __floordiv__(self, other: Number) -> "Value":
        """Divides integers that are not negative."""
        return self._binary("udiv", other)

    def __mod__(self, other: Number) -> "Value":
        """Returns the rest of dividing integers that are not negative."""
        return self._binary("urem", other)

    def __and__(self, other: Number) -> "Value":
        return self._binary("and_", other)

    def __or__(self, other: Number) -> "Value":
        return self._binary("or_", other)

    def __xor__(self, other: Number) -> "Value":
        return self._binary("xor", other)

    def __lshift__(self, bits: Number) -> "Value":
        return self._binary("shl", bits)

    def __rshift__(self, bits: Number) -> "Value":
        """Moves bits to the right and fills up with zeros."""
        return self._binary("lshr", bits)

    def __lt__(self, other: Number) -> "Value":
        return self._compare("<", other)

    def __le__(self, other: Number) -> "Value":
        return self._compare("<=", other)

    def __gt__(self, other: Number) -> "Value":
        return self._compare(">", other)

    def __ge__(self, other: Number) -> "Value":
        return self._compare(">=", other)

    def equals(self, other: Number) -> "Value":
        """Compares; `==` stays Python's own."""
        return self._compare("==", other)


@dataclass(frozen=True)
class Variable:
    """A place for a value that changes. LLVM keeps it in a register where it can."""

    emitter: "Emitter"
    address: Any

    def get(self) -> Value:
        return Value(self.emitter, self.emitter.builder.load(self.address))

    def set(self, value: Value) -> None:
        self.emitter.builder.store(value.ir, self.address)


def elements(number: float, kind: Any) -> Any:
    """Returns `number` as llvmlite wants a constant of that type."""
    if isinstance(kind, ir.VectorType):
        return [elements(number, kind.element)] * kind.count
    if kind == F32:
        return struct.unpack("f", struct.pack("f", number))[0]
    return int(number)
