"""Measures how far the log-probabilities of a trainer are from those of the engine that has sampled.

The embedded model samples 1,024 tokens in engines of several dtypes and forms, and an `EngineModule` computes their
log-probabilities. Beside it, vLLM's build for CPUs samples as many tokens of the same model, and transformers computes
theirs, as trainers of torch do. It prints a table, and writes benchmarks/results/drift-DATE-COMMIT.json and a picture.
No figure depends on the load of the machine.

    make .vllm/.stamp && python -m benchmarks.drift
"""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.result_files import ROOT, machine, write_record
from jaxvllm import LLM, SamplingParams
from jaxvllm.flax import EngineModule
from jaxvllm.model_name import DEMO_MODEL

PYTHON = ROOT / ".vllm" / "bin" / "python"
WORKER = ROOT / "benchmarks" / "peers" / "vllm_drift.py"
ROWS, MAX_TOKENS = 16, 64
TEXTS = ("Once upon a time", "The fox", "Tom and Lily lived in a farmhouse.", "What is 24 plus 17?")


@dataclass(frozen=True)
class Pair:
    """A trainer beside an engine.

    trainer: the dtype of a module with arrays of its own. None: the module shares the engine's arrays
    options: of the engine
    has_options: whether the trainer is compiled with the engine's options
    """

    name: str
    trainer: str | None
    options: Mapping[str, str] = field(default_factory=dict)
    has_options: bool = True


PAIRS = (
    Pair("float32, shared arrays", None, {"dtype": "float32"}),
    Pair("bfloat16, shared arrays", None, {"dtype": "bfloat16"}),
    Pair("float32, shared arrays, XLA's usual options", None, {"dtype": "float32"}, has_options=False),
    Pair("bfloat16, shared arrays, XLA's usual options", None, {"dtype": "bfloat16"}, has_options=False),
    Pair("float32, arrays of its own", "float32", {"dtype": "float32"}),
    Pair("bfloat16, trainer in float32", "float32", {"dtype": "bfloat16"}),
    Pair("float32, keys and values in FP8", "float32", {"dtype": "float32", "kv_cache_dtype": "fp8_per_token_head"}),
    Pair("int8, trainer in float32", "float32", {"dtype": "float32", "quantization": "int8"}),
    Pair("FP8, trainer in float32", "float32", {"dtype": "float32", "quantization": "fp8"}),
    Pair("int4, trainer in float32", "float32", {"dtype": "float32", "quantization": "int4"}),
)
PEERS = {
    "vLLM float32, transformers float32": ("float32", "float32"),
    "vLLM bfloat16, transformers bfloat16": ("bfloat16", "bfloat16"),
    "vLLM bfloat16, transformers float32": ("bfloat16", "float32"),
}


def measured(pair: Pair) -> np.ndarray:
    """Returns the differences of all sampled tokens, f32[tokens], in nats."""
    sizes: Any = dict(max_model_len=128, max_num_seqs=ROWS, max_num_batched_tokens=256, num_pages=256)
    options: Any = pair.options
    with LLM(**sizes, **options) as llm:
        module = EngineModule.of(llm) if pair.trainer is None else EngineModule.load(DEMO_MODEL, dtype=pair.trainer)
        params = [
            SamplingParams(temperature=1, seed=seed, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0)
            for seed in range(ROWS)
        ]
        outputs = llm.generate(prompts_of(llm), params, use_tqdm=False)
    rows = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
    width = max(map(len, rows))
    tokens, is_real = np.zeros((ROWS, width), np.int32), np.zeros((ROWS, width), bool)
    for number, row in enumerate(rows):
        tokens[number, : len(row)], is_real[number, : len(row)] = row, True
    compiler_options = module.compiler_options if pair.has_options else {}
    compute = jax.jit(lambda *given: module.logprobs(given[0], None, given[1]), compiler_options=compiler_options)
    of_trainer = np.asarray(compute(jnp.asarray(tokens), jnp.asarray(is_real)))
    differences = []
    for found, output in zip(of_trainer, outputs, strict=True):
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None, "each request asks for them"
        of_engine = np.asarray([next(iter(at.values())).logprob for at in logprobs], np.float32)
        first = len(output.prompt_token_ids) - 1
        differences.append(np.abs(found[first : first + len(of_engine)] - of_engine))
    return np.concatenate(differences)


def prompts_of(llm: LLM) -> list[list[int]]:
    tokenizer = llm.get_tokenizer()
    return [tokenizer.encode(TEXTS[number % len(TEXTS)]) for number in range(ROWS)]


def of_peer(prompts: Sequence[Sequence[int]], dtype: str, trainer_dtype: str) -> tuple[np.ndarray, dict[str, str]]:
    """Returns the differences of vLLM and transformers, and their versions."""
    request = {"model": str(DEMO_MODEL), "dtype": dtype, "trainer_dtype": trainer_dtype, "max_tokens": MAX_TOKENS}
    # vLLM must not see our packages.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(PYTHON), str(WORKER)],
        input=json.dumps(request | {"prompts": prompts}),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=environment,
    )
    answer = json.loads(done.stdout)
    one, other = (np.concatenate(answer[name]) for name in ("engine", "trainer"))
    return np.abs(one - other), answer["versions"]


def row_of(engine: str, name: str, differences: np.ndarray) -> dict[str, Any]:
    """Returns a row of the record."""
    return {
        "engine": engine,
        "name": name,
        "tokens": len(differences),
        "largest": float(differences.max()),
        "mean": float(differences.mean()),
        "equal": int((differences == 0).sum()),
    }


def draw(rows: Sequence[Mapping[str, Any]], picture: Path) -> None:
    """Draws the largest difference of each row as a bar. What is exactly 0 has no bar."""
    # Without pyplot, no display is needed and no global state is left behind.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.9 + 0.36 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    least = 1e-7
    for place, row in enumerate(rows):
        color = "#4269d0" if row["engine"] == "jaxvllm" else "#ff725c"
        text = f" {row['largest']:.1e}" if row["largest"] else " exactly 0"
        axes.barh(place, max(row["largest"], least), color=color)
        axes.annotate(text, (max(row["largest"], least), place), va="center", fontsize=9, weight="bold")
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(least, 100)
    axes.set_xlabel(f"max |log p of trainer - log p of engine| over {rows[0]['tokens']:,} sampled tokens, in nats")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(picture, dpi=120)


def main() -> None:
    device = machine()
    with LLM(max_model_len=128, max_num_seqs=1, max_num_batched_tokens=16, num_pages=16) as llm:
        prompts = prompts_of(llm)
    rows: list[dict[str, Any]] = []
    versions: dict[str, str] = {}
    for pair in PAIRS:
        rows.append(row_of("jaxvllm", pair.name, measured(pair)) | {"pair": asdict(pair)})
    for name, dtypes in PEERS.items():
        differences, versions = of_peer(prompts, *dtypes)
        rows.append(row_of("vLLM", name, differences))
    print("| engine and trainer | largest | mean | tokens that are equal |")
    print("|---|---|---|---|")
    for row in rows:
        print(f"| {row['name']} | {row['largest']:.2g} | {row['mean']:.2g} | {row['equal']} of {row['tokens']} |")
    path = write_record("drift", device, {"model_name": "demo", "versions": versions, "results": rows})
    draw(rows, path.with_suffix(".png"))
    print(f"\nwritten to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
