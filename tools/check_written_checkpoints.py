"""Checks that transformers loads what `EngineModule.save` writes, and computes the same logits with it.

    make .oracle/.stamp && python -m tools.check_written_checkpoints [NAME ...]

Each tiny model of tests/fixtures is read and written again: with the names of the tensors that it was read from, and
with the newest names of its family, where these are others. transformers, in an environment of its own, must find a
place for each tensor and a tensor for each place. Its logits are compared with those that it computed from the
weights of the fixture. It prints a line for each model and writes
benchmarks/results/written_checkpoints-DATE-COMMIT.json.
"""

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from benchmarks.result_files import ROOT, machine, write_record
from jaxvllm.models import checkpoint
from jaxvllm.models.families import find_family, model_spec
from jaxvllm.models.held_tensors import HeldTensors
from jaxvllm.models.hf_export import HfExport, write_checkpoint
from jaxvllm.models.spread import Spread
from tests.models.fixture import NAMES, Fixture

PYTHON = ROOT / ".oracle" / "bin" / "python"
CLOSE = 1e-4  # as in tests/models/test_families.py
# `HfExport.of` refuses it.
REFUSED = ("gemma3n",)


def written(fixture: Fixture, folder: Path) -> list[Path]:
    """Writes the checkpoints of one model, and returns their directories."""
    params = checkpoint.load(
        Path(),
        model_spec(fixture.config),
        dtype=jnp.float32,
        layout="separate",
        hf_config=fixture.config,
        tensors=fixture.weights(),
    )
    spread, family = Spread(model_spec(fixture.config)), find_family(fixture.config)
    model = fixture.write_checkpoint(folder / "model")
    outputs = [folder / "names-of-the-model"]
    write_checkpoint(params, spread, model, outputs[0])
    named = HfExport.of(spread, family, HeldTensors(fixture.weights())).shapes
    if HfExport.of(spread, family).shapes != named:
        (model / "model.safetensors").unlink()
        outputs.append(folder / "names-of-the-family")
        write_checkpoint(params, spread, model, outputs[1])
    return outputs


def main(names: Sequence[str]) -> None:
    device = machine()
    fixtures = [Fixture.load(name) for name in names if name.split("-")[0] not in REFUSED]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        outputs = {fixture.name: written(fixture, folder / fixture.name) for fixture in fixtures}
        asked = {str(path): fixture.prompts for fixture in fixtures for path in outputs[fixture.name]}
        (folder / "prompts.json").write_text(json.dumps(asked))
        command = [
            str(PYTHON),
            "-m",
            "tools.transformers_logits",
            str(folder / "prompts.json"),
            str(folder / "logits.npz"),
        ]
        # transformers must not see our packages.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        with np.load(folder / "logits.npz") as found:
            errors = {
                fixture.name: {
                    path.name: float(np.abs(found[str(path)] - fixture.logits).max()) for path in outputs[fixture.name]
                }
                for fixture in fixtures
            }
    for name, of_names in errors.items():
        print(f"{name}: " + ", ".join(f"{error:.1e} ({kind})" for kind, error in of_names.items()))
    largest = max(error for of_names in errors.values() for error in of_names.values())
    record = {"versions": {"transformers": done.stdout.split()[-1]}, "largest": largest, "results": errors}
    path = write_record("written_checkpoints", device, record)
    print(f"{len(errors)} models, largest difference of a logit {largest:.1e}; written to {path.relative_to(ROOT)}")
    assert largest < CLOSE


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES, help="fixtures; all by default")
    main(parser.parse_args().names)
