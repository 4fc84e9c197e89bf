"""What each of two processes runs in `test_two_processes.py`: two devices each, one engine over the four."""

import json
import signal
import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import jaxvllm
from jaxvllm import LLM, RequestOutput, SamplingParams
from tests.engine.tiny import one_program
from tests.quick import quick_engines
from tests.run_cache import run_cache

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True)
# More requests than slots, and prompts longer than a step.
REQUESTS = (
    ("Once upon a time", GREEDY),
    ("My friend Lola lives in Vienna, is 60 years old and is a singer. She likes to sing, and to dance.", GREEDY),
    ("The cat", SEEDED),
    ("What is 10 + 10?", replace(SEEDED, top_p=0.8, n=2)),
    ("The opposite of late is early. The opposite of day is night. The opposite of up is", replace(SEEDED, seed=None)),
    ("Write the name", replace(GREEDY, logprobs=2, max_tokens=5)),
)


def options(mesh: str, **others: Any) -> dict[str, Any]:
    """Two programs: four running requests, sixteen tokens a step."""
    small = dict(
        mesh=mesh,
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        row_buckets=(4,),
        token_buckets=(16,),
        num_pages=40,
        compilation_cache=run_cache(),
        dtype="float32",  # in bfloat16, which some CPUs take by default, sums over more devices are other tokens
    )
    return small | others


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[list(completion.token_ids) for completion in output.outputs] for output in outputs]


def complete(llm: LLM) -> list[list[list[int]]]:
    """The tokens of REQUESTS, and of what is left when one of them is aborted after four steps."""
    prompts, params = zip(*REQUESTS, strict=True)
    whole = tokens(llm.generate(prompts, params, use_tqdm=False))
    for index in range(2):
        llm.engine.submit(llm.engine.check(f"left-{index}", prompts[index], GREEDY))
    left = []
    for number in range(1000):
        if number == 4:
            llm.engine.abort("left-0")
        left += [output for output in llm.engine.step() if output.finished]
        if not llm.engine.has_work:
            break
    return whole + tokens(left)


def interrupt(llm: LLM, seconds: float) -> bool:
    """Breaks a generation off after `seconds`, wherever it is; False when it was done by then."""

    def raise_interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, raise_interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        llm.generate(["Once upon a time"] * 6, GREEDY, use_tqdm=False)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return True
    return False


def main(scenario: str, index: int, coordinator: str) -> None:
    mesh = "2x1x2" if scenario == "complete in stages" else "1x4"
    mine = options(mesh, coordinator=coordinator, num_processes=2, process_id=index)
    if scenario == "differ":
        mine["page_size"] = (16, 32)[index]
    if scenario == "lead twice":
        LLM(**mine)
    if jaxvllm.follow(**mine):
        return
    llm = LLM(**mine)  # never closed: those who follow must get to know that this process ends
    if scenario.startswith("complete"):
        first = complete(llm)
        broken_off = sum(interrupt(llm, 0.013 * count) for count in range(1, 6))
        print(json.dumps([first, broken_off, tokens(llm.generate([REQUESTS[0][0]], GREEDY, use_tqdm=False))]))
    while scenario == "endless":
        llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
        print("alive", flush=True)


if __name__ == "__main__":
    few_programs = one_program(num_rows=4) if sys.argv[1] == "endless" else nullcontext()
    with quick_engines(), few_programs:
        main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
