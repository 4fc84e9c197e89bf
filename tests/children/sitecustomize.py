"""Python imports this first in each process that a test starts: engines in processes of their own compile quickly.

`tests/conftest.py` names this directory in PYTHONPATH. The programs of the demo model then take 4.3 seconds of the CPU
and not 9.5, and its steps hardly longer. Each program is compiled, or loaded, in the first step that runs in it.
Tests that name another PYTHONPATH, such as those of notebooks and of the README, have engines that are compiled as
users have them.
"""

import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class QuickEngineProcess:
    """Finds the module with which the process of an engine begins its work, and lets it begin only then.

    No earlier, because the process must be able to end with its parent before it imports jax.
    """

    begins_with: str

    @classmethod
    def find_spec(cls, name: str, *where: Any) -> ModuleSpec | None:
        """Implements `importlib.abc.MetaPathFinder`."""
        if name != cls.begins_with:
            return None
        spec = PathFinder.find_spec(name, *where)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def load_and_quicken(module: ModuleType) -> None:
            from tests.quick import earlier_emitters, programs_on_demand, quick_compilation

            load(module)
            cls.for_ever = [quick_compilation(), earlier_emitters(), programs_on_demand()]
            for context in cls.for_ever:
                context.__enter__()

        spec.loader.exec_module = load_and_quicken  # type: ignore[method-assign]
        return spec


def begins_with(words: list[str]) -> str | None:
    """Returns the module with which an engine's process begins its work, by the command line, or None for others."""
    if words[1:3] == ["-m", "jaxvllm.bench.offline.startup"]:
        return "jaxvllm.engine.llm"
    # A process for each part, with engines in some.
    if words[1:3] == ["-m", "benchmarks.first_light"]:
        return "benchmarks.result_files"
    # The second is an actor of Ray's, which may be an engine.
    if words[1:3] == ["-m", "jaxvllm.worker"] or any(word.endswith("/default_worker.py") for word in words):
        return "jaxvllm.worker.command_loop"
    return None


if found := begins_with(sys.orig_argv):
    QuickEngineProcess.begins_with = found
    sys.meta_path.insert(0, QuickEngineProcess)
