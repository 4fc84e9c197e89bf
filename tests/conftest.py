"""What every test gets: the CPU backend, strict promotion, and a way to count compilations."""

import ctypes
import gc
import os
import sys

# By environment, before anything imports jax: host-only tests then never pay for that import, and the
# processes that tests start are as strict as the tests.
# With JAXVLLM_TEST_GPU in the environment, the tests of the kernels for GPUs run on the one that is here.
os.environ["JAX_PLATFORMS"] = "cuda" if "JAXVLLM_TEST_GPU" in os.environ else "cpu"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
# Interpreted kernels wait for each other on threads of XLA's: as many as there are cores can all be waiting.
os.environ["NPROC"] = "16"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"  # for meshes; everything else runs on the first
# The processes that tests start would each compile our 450 modules: 0.4 s of the CPU.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests import rewriting, run_cache

# Engines in processes of their own compile quickly: see there.
CHILDREN = str(Path(__file__).parent / "children")
if CHILDREN not in os.environ.get("PYTHONPATH", ""):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (CHILDREN, os.environ.get("PYTHONPATH"))))

# A shared two-core machine is slow at times: that is no failure. CI tries the same examples every time, so
# that a change is never blamed for what another day's luck would have found; here they are fresh.
hypothesis.settings.register_profile("here", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") == "true" else "here")

# One event for each program handed to XLA, eager operations included, also when the persistent cache
# then answers: for a request on its way both are stalls.
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


# Linux lets a process have 65,530 mappings, and beyond that XLA crashes where it loads a program. Each program is three
# of them, and jax remembers those of all tests: there were 45,000 after two thirds of the suite in one of two workers.
MOST_MAPPINGS = 20_000
# One worker had 8 GB at the end, of 24 that the machine has.
MOST_RESIDENT = 3 * 2**30
SELF = Path("/proc/self")
# Tracing makes many objects that live for long. Python's own 700 had it look for cycles for 6% of the CPU.
NEW_OBJECTS = 10_000


def pytest_configure(config: pytest.Config) -> None:
    run_cache.begin(config)
    gc.set_threshold(NEW_OBJECTS)
    rewriting.rewrite_share(config)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests import waiting_apart

    return waiting_apart.scheduler(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first. After all others, the last of them had one core while the other one waited."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Modules and tests live until the end, so that no search for cycles has to look at them."""
    gc.collect()
    gc.freeze()


_CPU_SECONDS = pytest.StashKey[float]()


def _cpu_seconds() -> float:
    """Returns those of this process, and of the processes that it started and that have ended."""
    return sum(os.times()[:4])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_CPU_SECONDS] = _cpu_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Notes in the JUnit report what a test took of the CPU: `tools/slowest_tests.py` reads it."""
    try:
        return (yield)
    finally:
        item.user_properties.append(("cpu_seconds", round(_cpu_seconds() - item.stash[_CPU_SECONDS], 2)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says how long a run took beside its budget, where there is a report of it: too long is no failure."""
    if config.option.xmlpath:
        from tools.slowest_tests import Run

        terminalreporter.write_line(Run.read(Path(config.option.xmlpath)).summary)


@pytest.fixture(autouse=True, scope="module")
def small_process() -> Iterator[None]:
    """After a module, forgets programs that jax has compiled, and gives back memory, where either is much."""
    yield
    if "jax" not in sys.modules or not SELF.exists():
        return
    num_mappings = (SELF / "maps").read_bytes().count(b"\n")
    resident = int((SELF / "statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    if num_mappings > MOST_MAPPINGS or resident > MOST_RESIDENT:
        import jax

        jax.clear_caches()
        gc.unfreeze()  # what was alive when a command had its imports, and is not any more
        gc.collect()
        gc.freeze()
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(scope="module")
def quick_programs() -> Iterator[None]:
    """For modules that ask for it: nothing there depends on how quick a step of an engine is."""
    from tests.quick import quick_engines

    with quick_engines():
        yield


@pytest.fixture(scope="module")
def interpreted_kernels() -> Iterator[None]:
    """For modules that ask for it, because they interpret kernels."""
    from tests.interpreters import quick_callbacks

    with quick_callbacks():
        yield


@dataclass
class Compilations:
    """The programs compiled while its `compilations()` block was open."""

    names: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.names)


@contextmanager
def count_compilations() -> Iterator[Compilations]:
    """Counts every compilation inside the block, in any thread of this process."""
    from jax import monitoring

    seen = Compilations()

    def listen(event: str, seconds: float, **details: Any) -> None:
        if event == COMPILE_EVENT:
            seen.names.append(str(details.get("fun_name", "?")))

    monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def compilations() -> Callable[[], AbstractContextManager[Compilations]]:
    """`with compilations() as seen: ...` then `assert seen.count == 0, seen.names`."""
    return count_compilations
