"""On CPU a request has the same bits whatever shares its steps, also in bfloat16.

A sum that differs in its last bit there is a hidden value that differs in its eighth, and then the tokens differ.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxvllm import LLM, SamplingParams
from tests.engine.tiny import few_pages, random_prompts, tiny_llm
from tests.quick import programs_on_demand

PROMPTS = random_prompts(24, longest=70, seed=3)
PARAMS = [
    SamplingParams(temperature=i % 2, seed=i, max_tokens=8, ignore_eos=True, logprobs=0) for i in range(len(PROMPTS))
]


@pytest.fixture(autouse=True, scope="module")
def quick_programs() -> Iterator[None]:
    """There are none here: what is served is compiled with more of LLVM, and it is the one with these bits."""
    with programs_on_demand():
        yield


def answers(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[tuple[list[int], float | None]]:
    """The tokens of each request and the sum of their log-probabilities."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].cumulative_logprob) for output in outputs]


@pytest.mark.slow
def test_alone_together_cached_chunked_and_preempted(tiny_checkpoint: Path) -> None:
    steps = dict(row_buckets=(1, 24), token_buckets=(64,), max_num_seqs=24, max_num_batched_tokens=64, num_pages=257)
    with tiny_llm(tiny_checkpoint, dtype="bfloat16", attention_backend="cpu", **steps) as llm:
        together = answers(llm, PROMPTS, PARAMS)
        assert answers(llm, PROMPTS, PARAMS) == together  # after prefixes of the cache
        llm.reset_prefix_cache()
        assert [answers(llm, [prompt], [one])[0] for prompt, one in zip(PROMPTS, PARAMS, strict=True)] == together
        before = llm.engine.stats().num_preemptions
        with few_pages(llm, 20):
            assert answers(llm, PROMPTS, PARAMS) == together
        assert llm.engine.stats().num_preemptions > before
