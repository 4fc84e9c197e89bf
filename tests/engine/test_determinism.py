"""A seeded request draws the same tokens whatever it is batched, chunked or interrupted with."""

from dataclasses import replace

import numpy as np

from jaxvllm import LLM, SamplingParams
from tests.engine.tiny import Recomputation, few_pages, random_prompts

PROMPTS = random_prompts(32, longest=70, seed=1)
PARAMS = [
    SamplingParams(temperature=1.0, top_p=0.9, top_k=40, seed=100 + i, max_tokens=24, ignore_eos=True)
    for i in range(len(PROMPTS))
]


def generate(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[list[int]]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def test_alone_in_a_batch_of_32_chunked_and_preempted(llm: LLM, wide_llm: LLM) -> None:
    wide_llm.wait_until_compiled()  # alone and together then use different programs
    alone = [generate(wide_llm, [prompt], [one])[0] for prompt, one in zip(PROMPTS, PARAMS, strict=True)]
    assert len({tuple(completions[0]) for completions in alone}) == len(PROMPTS)

    wide_llm.reset_prefix_cache()
    before = wide_llm.engine.stats().num_preemptions
    assert generate(wide_llm, PROMPTS, PARAMS) == alone
    assert wide_llm.engine.stats().num_preemptions == before

    before = llm.engine.stats().num_preemptions
    assert generate(llm, PROMPTS, PARAMS) == alone  # 16 tokens a step
    assert llm.engine.stats().num_preemptions == before

    with few_pages(llm, 9):
        assert generate(llm, PROMPTS, PARAMS) == alone
    assert llm.engine.stats().num_preemptions > before


def test_each_of_n_is_the_child_of_the_seed(llm: LLM, wide_llm: LLM) -> None:
    three = [replace(one, n=3, seed=i) for i, one in enumerate(PARAMS[:4])]
    together = generate(wide_llm, PROMPTS[:4], three)
    assert all(len({tuple(tokens) for tokens in completions}) == 3 for completions in together)
    with few_pages(llm, 9):
        assert generate(llm, PROMPTS[:4], three) == together
    for prompt, one, completions in zip(PROMPTS, three, together, strict=False):
        children = [one.child(index) for index in range(3)]
        assert generate(llm, [prompt] * 3, children) == [[tokens] for tokens in completions]


def test_requests_without_a_seed_differ(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    first, second = generate(llm, [PROMPTS[0]] * 2, [params] * 2)
    assert first != second


def test_the_distribution_is_the_models(llm: LLM, recomputation: Recomputation) -> None:
    """Tokens that top_k and top_p exclude are never drawn, and the others about as often as they should be."""
    prompt = PROMPTS[0]
    logits = recomputation.logits(prompt, [0])[0]
    probs = np.exp(logits - logits.max())
    probs[np.argsort(-logits)[5:]] = 0
    probs /= probs.sum()
    params = SamplingParams(temperature=1.0, top_k=5, n=400, seed=7, max_tokens=1, ignore_eos=True)
    drawn = np.bincount(np.ravel(generate(llm, [prompt], [params])[0]), minlength=len(probs)) / 400
    assert set(np.flatnonzero(drawn)) <= set(np.flatnonzero(probs))
    assert np.abs(drawn - probs).max() < 4 * np.sqrt(0.25 / 400)  # four standard deviations
