"""One model with random weights in the files that each engine reads, all made from the same numbers."""

import json
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.qwen3 import write_weights
from benchmarks.qwen3_gguf import write_gguf
from benchmarks.result_files import ROOT

# The export writes these: the checkpoint's own numbers, or what OpenVINO's compression makes of them by default.
EXPORTS = {"openvino": None, "openvino-int8": "int8", "openvino-int4": "int4"}
GGUF_TYPES = ("Q8_0", "Q4_0", "Q4_K_M")


class PeerFiles:
    """The files of a model in a directory, each written when it is first asked for."""

    def __init__(self, directory: Path, config: dict[str, Any]) -> None:
        self._directory, self._config = directory, config

    def path(self, kind: str) -> Path:
        """Returns the checkpoint, a GGUF file in plain numbers or one of GGUF_TYPES, or one of EXPORTS.

        Raises RuntimeError with the output of the program that failed to write it.
        """
        path = self._directory / kind
        if path.exists():
            return path
        if kind == "checkpoint":
            path.mkdir()
            # All prompts are token ids. With a tokenizer, this engine would prepare grammars beside the runs.
            (path / "config.json").write_text(json.dumps(self._config))
            write_weights(path, self._config)
        elif kind == "gguf":
            write_gguf(path, self._config)
        elif kind in GGUF_TYPES:
            quantize = ROOT / ".llamacpp" / "build" / "bin" / "llama-quantize"
            _call([str(quantize), str(self.path("gguf")), str(path), kind, "2"])
        else:
            weight_format = EXPORTS[kind] or {"float32": "fp32", "bfloat16": "fp16"}[self._config["torch_dtype"]]
            command = [str(ROOT / ".openvino" / "bin" / "optimum-cli"), "export", "openvino"]
            command += ["--model", str(self.path("checkpoint")), "--task", "text-generation-with-past"]
            _call([*command, "--weight-format", weight_format, "--disable-convert-tokenizer", str(path)])
        return path


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{json.dumps(command)} failed:\n{done.stdout}{done.stderr}")
