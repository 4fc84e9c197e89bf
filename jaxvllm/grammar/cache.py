"""`GrammarCache`: the grammars that were compiled or could not be, and the memory that they take."""

import ctypes
import logging
import threading
import weakref
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass

from jaxvllm.core.errors import OverloadedError
from jaxvllm.core.structured_outputs import StructuredOutputsParams
from jaxvllm.grammar.constraint import CompiledGrammar

logger = logging.getLogger(__name__)

# Texts that are kept. Most grammars take 0.1 to 0.6 MB each.
MAX_CACHED = 256
MAX_TEXT_BYTES = 2**24
# Memory of all grammars that are kept or used by requests.
MAX_BYTES = 2**28
# From so much freed memory on, the C library is told to return it to the system, which takes up to 10 ms.
TRIM_BYTES = 2**23


@dataclass
class _Entry:
    grammar: Future[CompiledGrammar]
    text_bytes: int
    num_bytes: int = 0  # memory of the grammar, if it was compiled


class GrammarCache:
    """Keeps grammars, and forgets what was used longest ago. Threads may share it.

    The memory of a grammar counts until no request uses it any more, whether it is kept or not.
    """

    def __init__(self, max_bytes: int = MAX_BYTES):
        self.max_bytes = max_bytes
        self._lock = threading.RLock()  # of all below; a grammar may be freed wherever objects are made
        self._entries: OrderedDict[StructuredOutputsParams, _Entry] = OrderedDict()
        self._text_bytes = 0
        self._num_bytes = 0
        self._untrimmed_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """The memory of the grammars that are kept or used."""
        return self._num_bytes

    @property
    def text_bytes(self) -> int:
        """The size of the texts that are kept."""
        return self._text_bytes

    def get_or_add(self, params: StructuredOutputsParams) -> tuple[Future[CompiledGrammar], bool]:
        """Returns the future of a grammar, and whether it is new, so that the caller has to compile it."""
        with self._lock:
            if (known := self._entries.get(params)) is not None:
                self._entries.move_to_end(params)
                return known.grammar, False
            new = _Entry(Future(), _size(params))
            self._entries[params] = new
            self._text_bytes += new.text_bytes
            while len(self._entries) > 1 and (len(self._entries) > MAX_CACHED or self._text_bytes > MAX_TEXT_BYTES):
                self._forget(next(iter(self._entries)))
            return new.grammar, True

    def forget(self, params: StructuredOutputsParams, grammar: Future[CompiledGrammar]) -> None:
        """Forgets a grammar, unless another has taken its place."""
        with self._lock:
            if (found := self._entries.get(params)) is not None and found.grammar is grammar:
                self._forget(params)

    def reserve(self, num_bytes: int) -> None:
        """Makes room for a grammar that takes `num_bytes`. Raises OverloadedError when requests use too many others."""
        with self._lock:
            for params in list(self._entries):  # not the entries, which would keep the grammars
                if self._entries[params].num_bytes and self._num_bytes + num_bytes > self.max_bytes:
                    self._forget(params)
            if self._num_bytes and self._num_bytes + num_bytes > self.max_bytes:
                raise OverloadedError(
                    f"structured_outputs: it takes {_mb(num_bytes)} MB of memory, and grammars of unfinished requests "
                    f"{_mb(self._num_bytes)} of {_mb(self.max_bytes)} MB: try again later, or make the grammar smaller"
                )
            self._num_bytes += num_bytes
        self._trim()

    def release(self, num_bytes: int) -> None:
        """Takes note that a grammar for which there was room does not exist."""
        with self._lock:
            self._num_bytes -= num_bytes
            self._untrimmed_bytes += num_bytes

    def store(
        self, params: StructuredOutputsParams, future: Future[CompiledGrammar], grammar: CompiledGrammar, num_bytes: int
    ) -> None:
        """Delivers a grammar that takes what was reserved for it. That is released when nothing has the grammar."""
        weakref.finalize(grammar, self.release, num_bytes).atexit = False
        with self._lock:
            if (found := self._entries.get(params)) is not None and found.grammar is future:
                found.num_bytes = num_bytes
        future.set_result(grammar)

    def _forget(self, params: StructuredOutputsParams) -> None:
        self._text_bytes -= self._entries.pop(params).text_bytes

    def _trim(self) -> None:
        """Returns freed memory to the system. Without it 100 of 186 MB stayed with the process."""
        if self._untrimmed_bytes >= TRIM_BYTES:
            self._untrimmed_bytes = 0
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
            if trim is not None:
                trim(0)


def _mb(num_bytes: int) -> int:
    return -(-num_bytes // 2**20)


def _size(params: StructuredOutputsParams) -> int:
    texts = (params.json, params.regex, params.grammar, params.structural_tag, *(params.choice or ()))
    return sum(len(text) for text in texts if text is not None)
