"""The engines that are compared: this one, in this process, and peers in processes and environments of their own."""

import importlib.metadata
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.peer_files import PeerFiles
from benchmarks.peers.process import PeerProcess
from benchmarks.result_files import ROOT
from benchmarks.workload import Workload

WORKERS = ROOT / "benchmarks" / "peers"


@dataclass(frozen=True)
class Run:
    """One run of a workload: wall seconds, mean seconds to a first token, and the tokens of each request."""

    seconds: float
    first_token_seconds: float
    tokens: list[list[int]]

    def agreeing(self, other: "Run") -> list[int]:
        """Returns how many of the first tokens of each request are the same."""
        return [
            next((place for place, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))
            for ours, theirs in zip(self.tokens, other.tokens, strict=True)
        ]


@dataclass(frozen=True)
class Setting:
    """The options that every engine is given."""

    dtype: str
    threads: int
    context: int  # tokens of the longest request
    requests: int  # at once, at most


class Engine(Protocol):
    name: str
    versions: dict[str, str]
    settings: Any  # the options that it has beside those of a Setting, for the record

    def takes(self, load: Workload) -> bool: ...

    def run(self, prompts: list[list[int]], output_tokens: tuple[int, ...]) -> Run: ...


class Ours:
    """jaxvllm in this process."""

    def __init__(self, name: str, checkpoint: Path, setting: Setting, quantization: str | None) -> None:
        from jaxvllm import LLM, __version__

        self.name = name
        self.settings = {
            "dtype": setting.dtype,
            "quantization": quantization,
            "max_model_len": setting.context,
            "max_num_seqs": setting.requests,
        }
        # Compiling in the background would take the cores from all engines.
        options: dict[str, Any] = {"warm_up": "full", **self.settings}
        self.llm = LLM(model=str(checkpoint), **options)
        self.versions = {"jaxvllm": __version__, "jax": importlib.metadata.version("jax")}

    def takes(self, load: Workload) -> bool:
        return True

    def run(self, prompts: list[list[int]], output_tokens: tuple[int, ...]) -> Run:
        from jaxvllm import SamplingParams

        params = [
            SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
            for count in output_tokens
        ]
        start = time.perf_counter()
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        waits = [output.metrics.first_token_seconds or 0.0 for output in outputs if output.metrics]
        return Run(seconds, statistics.fmean(waits), [list(output.outputs[0].token_ids) for output in outputs])


# Of this engine: names, and values of `quantization`. The groups of int4 are as long as OpenVINO's, and those of
# int4_g32 as llama.cpp's.
OUR_FORMS: dict[str, dict[str, str | None]] = {
    "plain": {"jaxvllm": None},
    "int8": {"jaxvllm": "int8"},
    "int4": {"jaxvllm": "int4", "jaxvllm g32": "int4_g32"},
}


@dataclass(frozen=True)
class Installation:
    """The environment in which a peer is installed, its worker, and its kinds of files for each form of weights."""

    name: str
    environment: str  # a folder of the checkout, and the target that makes it
    worker: str
    forms: Mapping[str, Sequence[str]]
    is_static: bool = False  # whether it takes only requests of one shape

    @property
    def python(self) -> Path:
        return ROOT / self.environment / "bin" / "python"

    @property
    def is_installed(self) -> bool:
        return (ROOT / self.environment / ".stamp").exists()

    def engine_names(self, weights: str) -> Iterator[tuple[str, str]]:
        """Yields the name of an engine for each file that it reads, and the kind of this file."""
        kinds = self.forms.get(weights, ())
        for kind in kinds:
            yield (self.name if len(kinds) == 1 else f"{self.name} {kind}"), kind


INSTALLATIONS = (
    Installation(
        "OpenVINO",
        ".openvino",
        "openvino_worker.py",
        {"plain": ["openvino"], "int8": ["openvino-int8"], "int4": ["openvino-int4"]},
    ),
    Installation(
        "llama.cpp",
        ".llamacpp",
        "llamacpp_worker.py",
        {"plain": ["gguf"], "int8": ["Q8_0"], "int4": ["Q4_0", "Q4_K_M"]},
    ),
    Installation("vLLM", ".vllm", "vllm_cpu.py", {"plain": ["checkpoint"]}),
    Installation("transformers", ".oracle", "transformers_worker.py", {"plain": ["checkpoint"]}, is_static=True),
)


def chosen_installations(
    names: Sequence[str] | None, weights: str, installations: Sequence[Installation] = INSTALLATIONS
) -> tuple[list[Installation], list[str]]:
    """Returns the peers of these names, or else all that can take part, and a line for each that is left out.

    Raises ValueError if a peer that was named is not installed, or takes no such weights.
    """
    chosen, left_out = [], []
    for one in installations:
        if names is not None and one.name not in names:
            continue
        problem = None
        if weights not in one.forms:
            problem = f"{one.name} makes no {weights} weights of a checkpoint"
        elif not one.is_installed:
            problem = f"{one.name} is not installed: make {one.environment}/.stamp"
        if problem is None:
            chosen.append(one)
        elif names is not None:
            raise ValueError(problem)
        else:
            left_out.append(f"without {one.name}: {problem}")
    return chosen, left_out


class Peer:
    """A peer that is installed, with one of its files."""

    def __init__(self, name: str, installation: Installation, path: Path, setting: Setting) -> None:
        self.name, self._is_static = name, installation.is_static
        self._process = PeerProcess(installation.python, WORKERS / installation.worker)
        request = {"load": str(path), "dtype": setting.dtype, "threads": setting.threads}
        answer = self._process.ask(request | {"context": setting.context, "requests": setting.requests})
        self.versions, self.settings = answer["versions"], answer["settings"]

    def takes(self, load: Workload) -> bool:
        return load.is_uniform or not self._is_static

    def run(self, prompts: list[list[int]], output_tokens: tuple[int, ...]) -> Run:
        return Run(**self._process.ask({"prompts": prompts, "max_tokens": output_tokens}))

    def close(self) -> None:
        self._process.close()


def our_engines(files: PeerFiles, weights: str, setting: Setting) -> list[Ours]:
    """Returns this engine with each of its forms of `weights`, all programs compiled."""
    checkpoint = files.path("checkpoint")
    return [Ours(name, checkpoint, setting, form) for name, form in OUR_FORMS[weights].items()]
