"""`python -m jaxvllm.grammar.trial_process`: tries grammars, each in a child of its own, which may crash or be killed.

The native code that compiles a grammar cannot be stopped, may take any memory, and has ended processes. This process
has the vocabulary, no thread and no jax, so that it can fork, which takes 3 ms where a new process would take 100. It
ends when its standard input does, which its parent holds, and its children end with it.

Its input is JSON: first `TrialSettings`, which `SIZE_BYTES` bytes precede that tell their size, then a line for each
grammar: {"number": 1, "source": "..."}. Its output is a line for each grammar: {"number": 1, "end": "passed",
"num_bytes": 4096, "signal": 0}.
"""

import ctypes
import gc
import io
import json
import math
import os
import resource
import selectors
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from llguidance import LLTokenizer
from tokenizers import Tokenizer as Backend

from jaxvllm.grammar.matcher import STACK_BYTES, first_forced, first_mask, new_matcher, new_tokens
from jaxvllm.grammar.vocabulary import GrammarVocabulary

# This many grammars are tried at once, since one that compiles for seconds must not delay the others.
MAX_CHILDREN = 4
# What takes longer than is usual gives way to the engine, which may have work for every core: it gets a third of what
# the engine's threads get.
USUAL_SECONDS = 0.5
NICENESS = 5
# Limits are of computing, so that a busy machine refuses nothing. A child that gets too little of the machine ends
# after this many times its limit.
MAX_SLOWNESS = 3
# Between two looks at a child that is about to exceed its limit.
LOOK_SECONDS = 0.01
SIZE_BYTES = 8
# linux/prctl.h
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class TrialSettings:
    """The vocabulary for which grammars are tried, and what one trial may take."""

    tokenizer: str  # the text of its tokenizer.json
    vocab_size: int
    eos_token_ids: Sequence[int]
    seconds: float  # of computing
    crowded_seconds: float  # the same, while other grammars wait for a place
    num_bytes: int  # of memory beside that of the vocabulary


@dataclass
class _TrialChild:
    number: int
    pid: int
    began: float
    end: str = "died"  # unless it says something else, or is killed for a reason

    def seconds(self) -> float:
        """Returns for how long it has computed, or has been there, where the system does not tell the former."""
        elapsed = time.monotonic() - self.began
        try:
            with open(f"/proc/{self.pid}/stat") as stat:
                fields = stat.read().rpartition(")")[2].split()
        except OSError:
            return elapsed
        ticks = int(fields[11]) + int(fields[12])  # in user mode and in the kernel
        return max(ticks / os.sysconf("SC_CLK_TCK"), elapsed / MAX_SLOWNESS)


class TrialProcess:
    """Tries the grammars that arrive at one file descriptor, and writes to another how each trial ended."""

    def __init__(self, settings: TrialSettings, commands: int, results: int):
        self._settings = settings
        backend = Backend.from_str(settings.tokenizer)
        vocabulary = GrammarVocabulary(backend, settings.vocab_size, settings.eos_token_ids)
        self._tokens = new_tokens(vocabulary, settings.eos_token_ids)
        self._commands = commands
        self._results = results
        self._unread = b""  # the beginning of a line
        self._waiting: deque[tuple[int, str]] = deque()
        self._children: dict[int, _TrialChild] = {}  # by the descriptor on which each tells its result
        self._selector = selectors.DefaultSelector()
        self._selector.register(commands, selectors.EVENT_READ)

    def run(self) -> None:
        """Works until the commands end."""
        try:
            while True:
                for key, _ in self._selector.select(self._pause()):
                    if key.fd != self._commands:
                        self._finish(key.fd)
                    elif not self._read():
                        return
                self._end_slow()
                while self._waiting and len(self._children) < MAX_CHILDREN:
                    self._start(*self._waiting.popleft())
        finally:
            for child in self._children.values():
                os.kill(child.pid, signal.SIGKILL)

    def _read(self) -> bool:
        data = os.read(self._commands, 2**20)
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            asked = json.loads(line)
            self._waiting.append((asked["number"], asked["source"]))
        return bool(data)

    def _pause(self) -> float | None:
        """Returns the seconds in which no child can exceed its limit, or None if there is none."""
        limit = self._settings.crowded_seconds if self._waiting else self._settings.seconds
        left = [limit - child.seconds() for child in self._children.values() if child.end == "died"]
        return max(LOOK_SECONDS, min(left)) if left else None

    def _end_slow(self) -> None:
        """Kills what takes too long: while others wait, only as many as make room for them."""
        num_free = MAX_CHILDREN - len(self._children)
        for child in sorted(self._children.values(), key=lambda child: child.began):
            seconds = child.seconds()
            is_late = seconds >= self._settings.seconds
            is_in_the_way = num_free < len(self._waiting) and seconds >= self._settings.crowded_seconds
            if child.end == "died" and (is_late or is_in_the_way):
                child.end = "late" if is_late else "crowded"
                os.kill(child.pid, signal.SIGKILL)
            num_free += child.end != "died"

    def _start(self, number: int, source: str) -> None:
        told, tells = os.pipe()
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            self._try(source, tells)
        os.close(tells)
        self._children[told] = _TrialChild(number, pid, began)
        self._selector.register(told, selectors.EVENT_READ)

    def _finish(self, told: int) -> None:
        """Reports the result of a child, which has told it or ended."""
        child, data = self._children.pop(told), os.read(told, 64)
        self._selector.unregister(told)
        os.close(told)
        _, status = os.waitpid(child.pid, 0)
        end = "passed" if data else child.end
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        result = {"number": child.number, "end": end, "num_bytes": int(data or 0), "signal": number}
        os.write(self._results, json.dumps(result).encode() + b"\n")

    def _try(self, source: str, tells: int) -> None:
        """Tries a grammar in a child, and ends the child."""
        try:
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            seconds = math.ceil(self._settings.seconds) + 1  # where no parent is left to kill it
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            nothing = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(nothing, descriptor)
            num_bytes: list[int] = []
            thread = threading.Thread(
                target=lambda: num_bytes.append(_bytes_of(self._tokens, source, self._settings.num_bytes))
            )
            thread.start()
            thread.join(USUAL_SECONDS)
            if thread.is_alive() and sys.platform == "linux":
                os.setpriority(os.PRIO_PROCESS, thread.native_id or 0, NICENESS)
            thread.join()
            os.write(tells, str(num_bytes[0]).encode())
        finally:
            os._exit(1)


def _bytes_of(tokens: LLTokenizer, source: str, most: int) -> int:
    """Compiles a grammar and returns the bytes of memory that it takes. Ends the process if they are more than `most`.

    An error is not told: the engine meets the same one when it compiles this grammar.
    """
    _allow(most)
    before = _bytes_in_use()
    try:
        matcher = new_matcher(tokens, source)
        if not matcher.get_error():
            matcher.get_grammar_warnings()
            first_mask(matcher, tokens)
            first_forced(matcher)
            matcher.get_error()
    except MemoryError:
        os.abort()  # as Rust does
    except BaseException:  # a panic of llguidance is a BaseException
        return 0
    return max(_bytes_in_use() - before, 0)


def _allow(num_bytes: int) -> None:
    """Lets this process have so much more memory than it has."""
    if sys.platform != "linux":  # others do not tell the address space, or have no such limit
        return
    with open("/proc/self/statm") as statm:
        most = int(statm.read().split()[0]) * resource.getpagesize() + num_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def _bytes_in_use() -> int:
    """Returns the bytes that are allocated, or where the C library does not tell them, the most that were resident."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc 2.33
    if mallinfo is None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    mallinfo.restype = _Mallinfo
    told = mallinfo()
    return int(told.uordblks + told.hblkhd)


def _exactly(file: io.FileIO, size: int) -> bytearray:
    data = bytearray()
    while len(data) < size:
        if not (part := file.read(size - len(data))):
            sys.exit()  # the parent has ended
        data += part
    return data


def main() -> None:
    """Tries the grammars that the parent sends, until the parent ends or closes the pipe."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the parent decides what to do about them
        signal.signal(number, signal.SIG_IGN)
    with open(0, "rb", buffering=0, closefd=False) as commands:
        size = int.from_bytes(_exactly(commands, SIZE_BYTES))
        settings = TrialSettings(**json.loads(_exactly(commands, size)))
    threading.stack_size(STACK_BYTES)
    process = TrialProcess(settings, commands=0, results=1)
    gc.collect()
    gc.freeze()  # or a collection in a child would copy every page
    process.run()


if __name__ == "__main__":
    main()
