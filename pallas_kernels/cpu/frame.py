"""XLA's call frame: where a handler finds its arguments and results. The layout is that of xla/ffi/api/c_api.h, 0.4."""

from dataclasses import dataclass

from pallas_kernels.cpu.emit import Emitter
from pallas_kernels.cpu.values import Value

_WORD = 8
# Words of a frame, and of what it points to.
_EXTENSION, _API, _CONTEXT, _STAGE, _ARGUMENTS, _RESULTS = 1, 2, 3, 4, 9, 14
_DATA, _DIMENSIONS = 3, 5
_EXECUTES = 3  # the stage in which a handler computes
_METADATA = 1  # the type of the extension that asks for metadata
API_VERSION = (0, 4)
# The places of functions in the table of XLA's functions that a frame points to.
SCHEDULE, NUM_THREADS = 17, 18


@dataclass(frozen=True)
class Buffer:
    """An array of the caller."""

    emitter: Emitter
    address: Value

    @property
    def data(self) -> Value:
        """The address of its first element."""
        return self.emitter.load_int(self.address + _DATA * _WORD)

    def size(self, dimension: int) -> Value:
        """Returns how long that dimension is."""
        return self.emitter.load_int(self.emitter.load_int(self.address + _DIMENSIONS * _WORD) + dimension * _WORD)


@dataclass(frozen=True)
class Frame:
    """One call of a handler."""

    emitter: Emitter
    address: Value

    def word(self, number: int) -> Value:
        return self.emitter.load_int(self.address + number * _WORD)

    def argument(self, number: int | Value) -> Buffer:
        number = number if isinstance(number, Value) else self.emitter.integer(number)
        return Buffer(self.emitter, self.emitter.load_int(self.word(_ARGUMENTS) + number * _WORD))

    def result(self, number: int) -> Buffer:
        return Buffer(self.emitter, self.emitter.load_int(self.word(_RESULTS) + number * _WORD))

    @property
    def context(self) -> Value:
        return self.word(_CONTEXT)

    def function(self, number: int) -> Value:
        """Returns the address of one of XLA's functions."""
        return self.emitter.load_int(self.word(_API) + number * _WORD)

    @property
    def executes(self) -> Value:
        """Whether the handler shall compute now."""
        return (self.word(_STAGE) & 0xFFFFFFFF).equals(_EXECUTES) & self._metadata_extension.equals(0)

    def answer_metadata(self) -> None:
        """Says which version of the frame the handler knows, where XLA asks."""
        e, extension = self.emitter, self._metadata_extension
        major, minor = API_VERSION
        with e.when(extension > 0):
            metadata = e.load_int(extension + 3 * _WORD)
            e.store_int(metadata + 3 * _WORD, major | minor << 32)
            traits = metadata + 4 * _WORD
            e.store_int(traits, (e.load_int(traits) >> 32) << 32)

    @property
    def _metadata_extension(self) -> Value:
        """The address of the extension with which XLA asks for metadata, or 0."""
        e, extension = self.emitter, self.word(_EXTENSION)
        found = e.variable(e.integer(0))
        with e.when(extension > 0):
            with e.when((e.load_int(extension + _WORD) & 0xFFFFFFFF).equals(_METADATA)):
                found.set(extension)
        return found.get()
