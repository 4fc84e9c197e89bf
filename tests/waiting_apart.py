"""How files of tests are divided among processes: those that mostly wait have a process of their own.

Tests with Ray's cluster, with a browser, with servers that are killed and with peers that are silent wait for seven
minutes longer than they compute. In one of the processes that compute, they leave a core idle meanwhile. Tests of
servers and of engines in processes of their own wait for these processes, and share them: so whole directories are
together. With the former alone the process ended after 12 of 28 minutes, and then a fifth of two cores was idle.
"""

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

# Files, and directories of files.
WAITING = (
    "tests/test_ray.py",
    "tests/worker/",
    "tests/server/",
    "tests/router/",
    "tests/faults/",
    "tests/interop/",
    "tests/kv_transfer/test_peers.py",
    "tests/grammar/test_public_schemas.py",
    "tests/benchmarks/test_first_light.py",
    "tests/bench/test_ladder_rungs.py",
    "tests/bench/test_bench.py",
    "tests/bench/test_offline.py",
    "tests/engine/test_disaggregation.py",
)


class WaitingApart(LoadFileScheduling):
    """Gives `WAITING` to the last of three or more processes, and all other files to the others."""

    def _assign_work_unit(self, node: Any) -> None:
        if len(self.nodes) > 2:
            is_last = node is self.nodes[-1]
            mine = [scope for scope in self.workqueue if scope.startswith(WAITING) == is_last]
            if mine:
                self.workqueue.move_to_end(mine[0], last=False)
            elif is_last:
                node.shutdown()
                return
        super()._assign_work_unit(node)


def scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Returns the scheduler for `--dist loadfile`, and None, which is xdist's own, for any other."""
    return WaitingApart(config, log) if config.getvalue("dist") == "loadfile" else None
