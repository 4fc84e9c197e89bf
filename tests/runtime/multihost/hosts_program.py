"""What each of two processes runs in `test_two_processes.py`: two devices each, one engine over the four."""

import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jaxvllm
from jaxvllm import LLM, BeamSearchParams, LoRARequest, RequestOutput, SamplingParams
from tests.engine.tiny import greedy_tokens
from tests.models.fixture import Fixture
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

DEMO = Path(jaxvllm.__file__).parent / "assets" / "demo"
MESHES = {"complete in stages": "2x1x2", "share experts": "2x2", "adapt": "2x1x2"}
ADAPTED = "llama"  # the fixture that has an adapter
ADAPTER_ROOM: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_lora_heads": 1, "max_decode_burst": 1}
EXPERTS = "qwen2_moe"  # the fixture whose experts are shared
SHARED_EXPERTS: dict[str, Any] = {
    "enable_prefix_caching": False,
    "enable_expert_parallel": True,
    "enable_eplb": True,
    "eplb_config": {"num_redundant_experts": 2, "step_interval": 6, "window_size": 4},
    "speculation": False,
}


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
    """The tokens of REQUESTS, and of what is left when one of two more is aborted at its first token.

    How many tokens a request has after some steps is not known: the pace of bursts follows the clock.
    """
    prompts, params = zip(*REQUESTS, strict=True)
    whole = tokens(llm.generate(prompts, params, use_tqdm=False))
    for index in range(2):
        llm.engine.submit(llm.engine.check(f"left-{index}", prompts[index], GREEDY))
    left = []
    while llm.engine.has_work:
        outputs = llm.engine.step()
        if any(output.request_id == "left-0" for output in outputs):
            llm.engine.abort("left-0")
        left += [output for output in outputs if output.finished]
    return whole + tokens(left)


def complete_with_experts(llm: LLM) -> dict[str, Any]:
    """What two replicas answer that share experts, which move meanwhile. Process 0 has no device of the second one."""
    fixture = Fixture.load(EXPERTS)
    all_at_once = greedy_tokens(llm, fixture.prompts)
    loads, num_placements = llm.expert_loads(), llm.engine.stats().num_expert_placements
    alone = greedy_tokens(llm, fixture.prompts[:1])  # the other replica has nothing to do
    chosen = {layer: int((of_layer - loads[layer]).sum()) for layer, of_layer in llm.expert_loads().items()}
    again = greedy_tokens(llm, fixture.prompts)
    llm.update_weights(llm.config.model)  # where experts are in their first slots
    replaced = greedy_tokens(llm, fixture.prompts)
    twice = fixture.prompts[3:4] * 2  # each replica gets one of them
    scored = llm.generate(twice, replace(GREEDY, logprobs=2, prompt_logprobs=2), use_tqdm=False)
    return {
        "greedy": [all_at_once, alone, again, replaced],
        "chosen": list(chosen.values()),
        "num_placements": llm.engine.stats().num_expert_placements - num_placements,
        "num_outputs": [replica.num_output_tokens for replica in llm.engine.replicas],
        "scores": [repr([one.prompt_logprobs, one.outputs[0].logprobs]) for one in scored],
        "beams": [[beam.tokens for beam in one.sequences] for one in llm.beam_search(twice, BeamSearchParams(2, 4))],
        "vectors": [one.outputs.embedding for one in llm.embed(twice, use_tqdm=False)],
    }


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


def replace_weights(llm: LLM, directory: Path) -> list[Any]:
    """What a request says before, between and after updates, and why two of them fail."""

    def say() -> list[list[list[int]]]:
        return tokens(llm.generate([REQUESTS[0][0]], GREEDY, use_tqdm=False))

    said, troubles = [say()], []
    for source in (directory / "nowhere", llm.weights):
        try:
            llm.update_weights(source)
        except (ValueError, NotImplementedError) as error:
            troubles.append(str(error))
    llm.sleep(level=1)
    assert llm.wake_up()
    said.append(say())
    for source in (directory, DEMO):
        llm.sleep(level=2)
        assert not llm.wake_up()
        llm.update_weights(source)
        assert llm.wake_up()
        said.append(say())
    return [said, troubles]


def adapted(llm: LLM, adapter: str) -> list[list[int]]:
    """The tokens of a fixture without an adapter, with one, and without again, and of both in one step."""
    prompts, one = Fixture.load(ADAPTED).prompts[:2], LoRARequest("one", 1, adapter)
    rows = [[None, None], [one, one], [None, None], [None, one]]
    params = replace(GREEDY, max_tokens=6)
    return [
        output.outputs[0].token_ids
        for adapters in rows
        for output in llm.generate([*map(list, prompts)], params, use_tqdm=False, lora_request=adapters)
    ]


def main(scenario: str, index: int, coordinator: str, model: str = "demo", turned: str = "") -> None:
    mesh = MESHES.get(scenario, "1x4")
    mine = options(mesh, model=model, coordinator=coordinator, num_processes=2, process_id=index)
    if scenario == "share experts":
        mine |= SHARED_EXPERTS
    if scenario == "adapt":
        mine |= ADAPTER_ROOM
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
        print(json.dumps([first, broken_off, *replace_weights(llm, Path(turned))]), flush=True)
    if scenario == "share experts":
        print(json.dumps(complete_with_experts(llm)))
    if scenario == "adapt":
        print(json.dumps(adapted(llm, turned)))
    while scenario.startswith("complete"):  # until one of the two is killed
        llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
        print("alive", flush=True)


if __name__ == "__main__":
    with quick_engines():
        main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
