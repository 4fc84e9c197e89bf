"""Says how much longer a decode step takes with adapters (LoRA) on this CPU.

16 rows decode after short prompts: in an engine without room for adapters, and in one with room for two, where no row,
half of the rows or all of them have one adapter, or both halves have one each. The adapters change all matrices of all
layers, those of experts, too. All models, dtypes and cases take turns, and of each the quickest step counts, because
whatever else the machine does only slows steps down. Medians are told beside them. Programs come from the cache of
compiled ones, so a first run with `--rounds 1` spares the next one the time to compile. It prints a table and writes
benchmarks/results/adapters-DATE-COMMIT.json, and a picture of it.

    python -m benchmarks.adapters [--model narrow wide experts] [--rank 16] [--dtype float32 bfloat16] [--rounds 8]
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from benchmarks.qwen3 import MODEL_EXPERTS, qwen3, qwen3_600m, write_model
from benchmarks.result_files import ROOT, machine, write_record
from jaxvllm import LLM, LoRARequest, SamplingParams
from jaxvllm.models.families import find_family, model_spec
from jaxvllm.models.lora_modules import lora_modules

# 512 and 1024 wide, the latter as Qwen3 0.6B is, with fewer layers and words.
NARROW = qwen3(8, 512, 1536, 8, 4, 64, 4096, max_position_embeddings=1024, torch_dtype="float32")
WIDE = qwen3(6, 1024, 3072, 16, 8, 128, 4096, max_position_embeddings=1024, torch_dtype="float32")
MODELS = {
    "narrow": NARROW,
    "wide": WIDE,
    "experts": MODEL_EXPERTS,
    "0.6B": qwen3_600m(max_position_embeddings=1024),
}
ROWS, PROMPT_TOKENS, OUTPUT_TOKENS = 16, 16, 24
# The adapter of each row, where there is room for any. 0 stands for none.
CASES = {
    "no row": [0] * ROWS,
    "half of the rows": [0, 1] * (ROWS // 2),
    "all rows": [1] * ROWS,
    "all rows, two adapters": [1, 2] * (ROWS // 2),
}
ALONE = "no room for adapters"
LIMIT = 10  # percent that one adapter may cost


def write_adapter(directory: Path, config: dict[str, Any], rank: int, seed: int) -> LoRARequest:
    """Writes a random adapter of all modules of the layers, as PEFT saves it. Experts are modules one by one."""
    random, tensors = np.random.default_rng(seed), {}
    modules = lora_modules(model_spec(config), find_family(config))
    named = {(one.layer, one.matrix, one.part, one.expert): name for name, one in modules.items()}
    for name in named.values():
        module = modules[name]
        if module.layer is None or module.num_experts is not None:
            continue
        for side, shape in (("A", (rank, module.in_size)), ("B", (module.out_size, rank))):
            numbers = 0.01 * random.standard_normal(shape, np.float32)
            tensors[f"base_model.model.{name}.lora_{side}.weight"] = numbers
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (directory / "adapter_config.json").write_text(json.dumps(told))
    return LoRARequest(f"adapter {seed}", seed, str(directory))


class DecodeSteps:
    """An engine, and the time of its decode steps with `ROWS` rows."""

    def __init__(self, model: Path, dtype: str, **options: Any):
        self._llm = LLM(
            model=str(model),
            load_format="dummy",
            dtype=dtype,
            max_model_len=128,
            max_num_seqs=ROWS,
            row_buckets=(ROWS,),
            token_buckets=(256,),
            max_decode_burst=1,
            enable_prefix_caching=False,
            async_scheduling=False,  # `engine.step` is one step, from its plan to its tokens
            warm_up="full",
            **options,
        )
        self._random = np.random.default_rng(0)

    def milliseconds(self, adapters: Sequence[LoRARequest | None]) -> list[float]:
        """Returns the times of some steps, with what the host does for them."""
        engine, times = self._llm.engine, list[float]()
        params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False)
        for number, adapter in enumerate(adapters):
            prompt = self._random.integers(3, 4096, PROMPT_TOKENS).tolist()
            engine.submit(engine.check(str(number), prompt, params, lora_request=adapter))
        while engine.has_work:
            start = time.perf_counter()
            engine.step()
            seconds = time.perf_counter() - start
            if any(one.num_prefill == 0 and one.num_decode == len(adapters) for one in engine.take_reports()):
                times.append(1e3 * seconds)
        return times


class Comparison:
    """The engines of one model in one dtype, with room for adapters and without, and what was measured of them."""

    def __init__(self, config: dict[str, Any], dtype: str, rank: int, directory: Path):
        (directory / "model").mkdir(parents=True)
        write_model(directory / "model", config)
        self._adapters = [None, *(write_adapter(directory / str(number), config, rank, number) for number in (1, 2))]
        self._without = DecodeSteps(directory / "model", dtype)
        self._room = DecodeSteps(directory / "model", dtype, enable_lora=True, max_loras=2, max_lora_rank=rank)
        self._times: dict[str, list[float]] = {name: [] for name in (ALONE, *CASES)}

    def run(self) -> None:
        """Measures each case once."""
        self._times[ALONE] += self._without.milliseconds([None] * ROWS)
        for name, rows in CASES.items():
            self._times[name] += self._room.milliseconds([self._adapters[number] for number in rows])

    def results(self) -> dict[str, dict[str, float]]:
        """Returns the milliseconds of a step in each case: the least and the median."""
        return {name: {"least": min(own), "median": statistics.median(own)} for name, own in self._times.items()}


def draw(record: Mapping[str, Any], picture: Path) -> None:
    """Writes a panel for each model and dtype: how much longer a step takes than without room for adapters."""
    # Without pyplot, no display is needed and no global state is left behind.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    results = record["milliseconds"]
    figure = Figure(figsize=(4.2 * len(results), 2.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(results), squeeze=False, sharex=True, sharey=True)[0]
    for axes, (title, cases) in zip(panels, results.items(), strict=True):
        for place, name in enumerate(CASES):
            percent = 100 * (cases[name]["least"] / cases[ALONE]["least"] - 1)
            axes.barh(place, percent, color="#4269d0" if percent < LIMIT else "#ff725c")
            axes.annotate(f" {percent:+.1f}%", (max(percent, 0), place), va="center", fontsize=9)
        axes.axvline(LIMIT, linestyle="--", color="#374151", linewidth=1)
        axes.set_yticks(range(len(CASES)), list(CASES))
        axes.set_title(f"{title}: {cases[ALONE]['least']:.1f} ms without", fontsize=9)
    panels[0].invert_yaxis()
    panels[0].margins(x=0.2)
    what = f"A decode step of {ROWS} rows with adapters of rank {record['rank']}: how much longer it takes"
    figure.suptitle(f"{what} ({record['device']['cpu']}, {len(record['device']['cores'])} cores)", fontsize=10)
    figure.savefig(picture, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    dtypes = ("float32", "bfloat16")
    parser.add_argument("--model", nargs="+", choices=tuple(MODELS), default=["narrow", "wide", "experts"])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dtype", nargs="+", choices=dtypes, default=dtypes)
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    device = machine()
    with tempfile.TemporaryDirectory() as directory:
        compared = {
            f"{model}, {dtype}": Comparison(MODELS[model], dtype, args.rank, Path(directory, model, dtype))
            for model in args.model
            for dtype in args.dtype
        }
        for _ in range(args.rounds):
            for one in compared.values():
                one.run()
    results = {title: one.results() for title, one in compared.items()}
    print("| model | case | least ms | of that without room | of the medians |\n|---|---|---|---|---|")
    for title, cases in results.items():
        for name, own in cases.items():
            shares = (f"{own[which] / cases[ALONE][which]:.3f}" for which in ("least", "median"))
            print(f"| {title} | {name} | {own['least']:.3f} | {' | '.join(shares)} |")
    models = {name: MODELS[name] for name in args.model}
    record = {"rows": ROWS, "rank": args.rank, "rounds": args.rounds, "models": models, "milliseconds": results}
    path = write_record("adapters", device, record)
    draw(json.loads(path.read_text()), path.with_suffix(".png"))
    print(f"\nwritten to {path.relative_to(ROOT)}, and drawn beside it")


if __name__ == "__main__":
    main()
