"""tunix trains with our engine as its sampler: rewards rise, and its own models compute what the engine computes."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".tunix" / "bin" / "python"


def told_by(module: str, num_devices: int) -> Any:
    """What a program in tunix's environment prints as JSON in its last line."""
    if not PYTHON.is_file():
        pytest.skip("needs the environment .tunix, a gigabyte: make .tunix/.stamp")
    environment = {name: value for name, value in os.environ.items() if name != "JAX_NUMPY_DTYPE_PROMOTION"}
    done = subprocess.run(
        [PYTHON, "-m", module],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=environment | {"JAX_NUM_CPU_DEVICES": str(num_devices)},
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_grpo_raises_the_reward() -> None:
    found = told_by("tests.interop.tunix_run", 1)
    rewards = found["rewards"]
    first, last = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    assert last > first + 0.15, rewards
    assert found["changed"] == found["aliased"] == found["arrays"] == found["params"]
    assert found["eos"] in found["ends"], "the end of a completion is one of its tokens"
    # tunix compiles with other options, and normalizes logits in another way.
    assert found["drift"] < 2e-5


@pytest.mark.slow
def test_models_of_tunix_compute_what_the_engine_computes() -> None:
    found = told_by("tests.interop.tunix_models_run", 2)
    assert len(found["drift"]) == 8
    for name, of_updates in found["drift"].items():
        assert max(of_updates) < 1e-4, (name, of_updates)  # as in tests/models/test_families.py
    # Matrices of an engine that rounds are its own, and still those of the model.
    assert 1e-4 < max(found["rounded"]) < 0.5
    errors = found["errors"]
    assert errors["lora"].startswith("the parameter layers.0.attn.q_proj.w_lora_a of tunix's Llama3 is not mapped")
    assert errors["size"].startswith("the parameter layers.0.mlp.down_proj.kernel of tunix's model has shape (48, 128)")
    assert errors["family"].startswith("tunix's Qwen3 is not mapped to an engine of LlamaForCausalLM: mapped are")
    assert errors["rope"].startswith("layer 5 of tunix's Gemma3 rotates with a base of 1e+06, whatever its config")
