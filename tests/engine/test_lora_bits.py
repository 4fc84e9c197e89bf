"""On CPU a row has the same bits whoever else is in the step, and in whichever slot its adapter is."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from jaxvllm import LLM, LoRARequest, RequestOutput, SamplingParams
from tests.engine import test_lora as dense
from tests.engine import test_lora_experts as experts
from tests.engine.tiny import tiny_llm
from tests.quick import programs_on_demand

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)


@pytest.fixture(autouse=True, scope="module")
def quick_programs() -> Iterator[None]:
    """There are none here: what is served is compiled with more of LLVM, and it is the one with these bits."""
    with programs_on_demand():
        yield


def bits(llm: LLM, prompts: list[list[int]], adapters: list[LoRARequest | None]) -> list[list[dict[int, float]]]:
    """The best log-probabilities at each position of each output."""

    def of(output: RequestOutput) -> list[dict[int, float]]:
        return [{token: one.logprob for token, one in step.items()} for step in output.outputs[0].logprobs or ()]

    llm.reset_prefix_cache()
    return [*map(of, llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=adapters))]


@pytest.mark.slow
@pytest.mark.parametrize("of", [dense, experts], ids=["dense", "experts"])
def test_alone_and_together(of: ModuleType, tmp_path: Path) -> None:
    paths = [one.write(tmp_path / str(number)) for number, one in enumerate(of.ADAPTERS)]
    # Rows decode in bursts with the dense model only. Bursts of experts took four more seconds of the CPU to compile.
    options = of.OPTIONS | ({"max_decode_burst": 1} if of is experts else {})
    adapters = [None if who == 0 else LoRARequest(str(who), who, str(paths[who - 1])) for who in of.WHO]
    with tiny_llm(of.FIXTURE.write_checkpoint(tmp_path / "model"), **options) as llm:
        together = bits(llm, of.PROMPTS, adapters)
        for number in reversed(range(len(of.WHO))):  # adapters come into other slots
            assert bits(llm, [of.PROMPTS[number]], [adapters[number]]) == [together[number]]
