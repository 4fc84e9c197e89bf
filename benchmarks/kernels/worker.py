"""Contenders in a process of their own, which has torch and the packages on top of it: see peers/attention_torch.py."""

import json
import select
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernels.dense import DenseBatch
from benchmarks.result_files import ROOT
from jaxvllm.bench.kernels.contender import LayerOutcome
from jaxvllm.bench.kernels.inputs import layers_of
from jaxvllm.bench.kernels.timing import Timing
from pallas_kernels.ragged_paged_attention.cases import RaggedCase

WORKER = ROOT / "benchmarks" / "peers" / "attention_torch.py"
MAX_LAYERS = 16
# A start may import vLLM. A case that hangs must not use up the minutes of a lent device.
START_SECONDS = 180.0
CASE_SECONDS = 60.0


class TorchWorker:
    """The process. It starts with the first question, and starts again after it died or hung."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._here: dict[str, Any] | None = None

    def versions(self) -> dict[str, str]:
        """Returns the versions of the peers that are here."""
        return dict(self._who_is_here()["versions"])

    def missing(self, peer: str) -> str | None:
        """Returns why `peer` is not here, or None if it is."""
        here = self._who_is_here()
        reason: str | None = here["missing"].get(peer, here.get("problem"))
        return reason

    def _who_is_here(self) -> dict[str, Any]:
        """Asks once which peers are here. A worker that cannot answer has none."""
        if self._here is None:
            try:
                self._here = self.ask({})
            except (OSError, RuntimeError) as error:
                self._here = {"versions": {}, "missing": {}, "problem": str(error)}
        return self._here

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Asks the worker. Raises RuntimeError when it dies, and TimeoutError when it hangs."""
        timeout = CASE_SECONDS
        if self._process is None:
            command = [sys.executable, str(WORKER)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            timeout += START_SECONDS
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            if not select.select([process.stdout], [], [], timeout)[0]:
                raise TimeoutError(f"the torch worker gave no answer in {timeout:.0f} s")
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"the torch worker ended with status {process.wait()}: see above")
        except (OSError, RuntimeError):
            self.close()
            raise
        return dict(json.loads(line))

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@dataclass(frozen=True)
class TorchContender:
    """One peer of the worker, under the worker's name for it."""

    name: str
    peer: str
    worker: TorchWorker
    device: jax.Device

    def versions(self) -> Mapping[str, str]:
        return self.worker.versions() if self.device.platform == "gpu" else {}

    def run(self, case: RaggedCase, dtype: jnp.dtype) -> LayerOutcome:
        if self.device.platform != "gpu":
            raise NotImplementedError("no NVIDIA GPU here")
        if (reason := self.worker.missing(self.peer)) is not None:
            raise NotImplementedError(reason)
        batch = asdict(DenseBatch.of(case)) | {
            "num_heads": case.num_heads,
            "num_kv_heads": case.num_kv_heads,
            "head_size": case.head_size,
            "page_size": case.page_size,
            "scale": case.scale,
            "dtype": dtype.name,
            "layers": min(layers_of(case, dtype, self.device), MAX_LAYERS),
        }
        answer = self.worker.ask({"peer": self.peer, "batch": batch})
        if "problem" in answer:
            return LayerOutcome.without(answer["problem"])
        return LayerOutcome(Timing(tuple(answer["samples"])), answer["error"], details={"note": answer["note"]})
