"""Measures what a grammar costs the rows that have one, and the free rows beside them, on the demo model.

Two engines share a process, one with decode bursts and one without. In every round each of them completes the same
prompts as free rows; as rows with an expression that allows nearly every token, as a model finds it that does what it
is asked, so that its guesses are right; as rows with a JSON schema without spaces, of which this small model guesses
little and whose forced tokens are computed at once; and as free rows beside one row of either kind. It prints
milliseconds for a step and for a token of a row, by the clock and by the CPU time of the process, which other work on
the machine disturbs less. It writes benchmarks/results/structured-DATE-COMMIT.json.

    python -m benchmarks.structured [--rounds 5]
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.result_files import machine, spread, write_record
from jaxvllm import LLM, SamplingParams, StructuredOutputsParams

TOKENS = 128
BATCHES = (1, 32)
FREE = SamplingParams(temperature=1.0, max_tokens=TOKENS, min_tokens=TOKENS, ignore_eos=True)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 4, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "occupation": {"enum": ["baker", "gardener", "teacher"]},
    },
    "required": ["name", "age", "occupation"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": PERSON, "minItems": 50}
FORMS = {
    "free": None,
    "any text": StructuredOutputsParams(regex=r"(.|\n){5000}"),
    "schema": StructuredOutputsParams(json=json.dumps(PEOPLE), disable_any_whitespace=True),
}


@dataclass(frozen=True)
class Measurement:
    """One run of a batch."""

    seconds: float
    cpu_seconds: float
    num_steps: int
    num_tokens: int  # of the rows that are measured

    def per_step(self, num_rows: int) -> dict[str, float]:
        """Returns the milliseconds for each step, and for each token of a row."""
        rounds = self.num_tokens / num_rows
        return {
            "step": 1e3 * self.seconds / self.num_steps,
            "token": 1e3 * self.seconds / rounds,
            "cpu_token": 1e3 * self.cpu_seconds / rounds,
        }


def run(llm: LLM, params: list[SamplingParams]) -> Measurement:
    """Completes one prompt with each of `params`."""
    num_steps, start, cpu = llm.engine.stats().num_steps, time.perf_counter(), time.process_time()
    outputs = llm.generate(["Some people: "] * len(params), params, use_tqdm=False)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return Measurement(seconds, cpu_seconds, llm.engine.stats().num_steps - num_steps, num_tokens)


def cases(num_rows: int) -> dict[str, list[SamplingParams]]:
    """Returns the batches to compare, by name."""
    made = {
        name: [replace(FREE, seed=seed, structured_outputs=form) for seed in range(num_rows)]
        for name, form in FORMS.items()
    }
    if num_rows > 1:
        for form in ("any text", "schema"):
            made[f"free beside one of {form}"] = [*made["free"][1:], made[form][0]]
    return made


def main() -> None:
    """Measures, prints and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    device = machine()
    common: dict[str, Any] = dict(
        max_model_len=512, max_num_seqs=32, row_buckets=(1, 32), token_buckets=(16, 64, 128, 256)
    )
    engines = {
        "with bursts": LLM(**common, warm_up="full"),
        "without": LLM(**common, warm_up="full", max_decode_burst=1),
    }
    found: dict[str, dict[int, dict[str, list[dict[str, float]]]]] = {
        name: {size: {case: [] for case in cases(size)} for size in BATCHES} for name in engines
    }
    for number in range(rounds + 1):
        for size in BATCHES:
            for case, params in cases(size).items():
                for name, llm in engines.items():
                    measured = run(llm, params)
                    llm.engine.wait_until_compiled()
                    if number:  # the first compiles grammars and what masks need, and fills caches
                        found[name][size][case].append(measured.per_step(size) | {"steps": measured.num_steps})
    for llm in engines.values():
        llm.close()
    for name, by_size in found.items():
        for size, by_case in by_size.items():
            print(f"{name}, {size} rows: ms by the clock a step, a token; CPU ms a token; steps for {TOKENS} tokens")
            free = statistics.median(one["cpu_token"] for one in by_case["free"])
            for case, values in by_case.items():
                columns = [spread([one[key] for one in values], 2) for key in ("step", "token", "cpu_token")]
                more = statistics.median(one["cpu_token"] for one in values) / free - 1
                print(f"  {case:28}", *columns, f"{values[0]['steps']:.0f}", f"({more:+.0%} CPU)", sep="  ")
    print(write_record("structured", device, {"tokens": TOKENS, "rounds": rounds, "measured": found}))


if __name__ == "__main__":
    main()
