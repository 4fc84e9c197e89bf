"""tunix trains with our engine as its sampler: the reward rises, and actor and engine share their arrays."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".tunix" / "bin" / "python"


@pytest.mark.slow
def test_grpo_raises_the_reward() -> None:
    if not PYTHON.is_file():
        pytest.skip("needs the environment .tunix, a gigabyte: make .tunix/.stamp")
    environment = {name: value for name, value in os.environ.items() if name != "JAX_NUMPY_DTYPE_PROMOTION"}
    done = subprocess.run(
        [PYTHON, "-m", "tests.interop.tunix_run"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=environment | {"JAX_NUM_CPU_DEVICES": "1"},
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    rewards = found["rewards"]
    first, last = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    assert last > first + 0.15, rewards
    assert found["changed"] == found["aliased"] == found["arrays"] == found["params"]
    assert found["eos"] in found["ends"], "the end of a completion is one of its tokens"
    # tunix compiles with other options, and normalizes logits in another way.
    assert found["drift"] < 2e-5
