"""Says how much longer a decode step takes with adapters (LoRA) on this CPU.

16 rows decode after short prompts: in an engine without room for adapters, and in one with room for two, where no row,
half of the rows or all of them have one adapter, or both halves have one each. The adapters change all matrices of all
layers. The cases take turns, and of each the quickest step counts, because whatever else the machine does only slows
steps down. It prints a table and writes benchmarks/results/adapters-DATE-COMMIT.json.

    python -m benchmarks.adapters [--model narrow 0.6B] [--rank 16] [--dtype float32] [--rounds 20]
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from benchmarks.qwen3 import qwen3, qwen3_600m, write_model
from benchmarks.result_files import ROOT, machine, write_record
from jaxvllm import LLM, LoRARequest, SamplingParams
from jaxvllm.models.families import find_family, model_spec
from jaxvllm.models.lora_arrays import lora_modules

NARROW = qwen3(8, 512, 1536, 8, 4, 64, 4096, max_position_embeddings=1024, torch_dtype="float32")
MODELS = {"narrow": NARROW, "0.6B": qwen3_600m(max_position_embeddings=1024)}
ROWS, PROMPT_TOKENS, OUTPUT_TOKENS = 16, 16, 24
# The adapter of each row, where there is room for any. 0 stands for none.
CASES = {
    "no row": [0] * ROWS,
    "half of the rows": [0, 1] * (ROWS // 2),
    "all rows": [1] * ROWS,
    "all rows, two adapters": [1, 2] * (ROWS // 2),
}
ALONE = "no room for adapters"


def write_adapter(directory: Path, config: dict[str, Any], rank: int, seed: int) -> LoRARequest:
    """Writes a random adapter of all modules, as PEFT saves it."""
    random, tensors = np.random.default_rng(seed), {}
    for name, module in lora_modules(model_spec(config), find_family(config)).items():
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
            compilation_cache="",
            **options,
        )
        self._random = np.random.default_rng(0)

    def milliseconds(self, adapters: Sequence[LoRARequest | None]) -> float:
        """Returns the time of the quickest of some steps, with what the host does for it."""
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
        return min(times)


def measure(config: dict[str, Any], dtype: str, rank: int, rounds: int, directory: Path) -> dict[str, float]:
    """Returns the milliseconds of a step in each case."""
    (directory / "model").mkdir()
    write_model(directory / "model", config)
    adapters = [None, *(write_adapter(directory / str(number), config, rank, number) for number in (1, 2))]
    without = DecodeSteps(directory / "model", dtype)
    room = DecodeSteps(directory / "model", dtype, enable_lora=True, max_loras=2, max_lora_rank=rank)
    found: dict[str, list[float]] = {name: [] for name in (ALONE, *CASES)}
    for _ in range(rounds):
        found[ALONE].append(without.milliseconds([None] * ROWS))
        for name, rows in CASES.items():
            found[name].append(room.milliseconds([adapters[number] for number in rows]))
    return {name: min(times) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    device, results = machine(), {}
    print("| model | case | milliseconds | of the time without room |\n|---|---|---|---|")
    for model in args.model:
        with tempfile.TemporaryDirectory() as directory:
            results[model] = measure(MODELS[model], args.dtype, args.rank, args.rounds, Path(directory))
        for name, step in results[model].items():
            print(f"| {model} | {name} | {step:.3f} | {step / results[model][ALONE]:.3f} |", flush=True)
    record = {"rows": ROWS, "rank": args.rank, "dtype": args.dtype, "models": MODELS, "milliseconds": results}
    print(f"\nwritten to {write_record('adapters', device, record).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
