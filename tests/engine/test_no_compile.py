"""After warm-up nothing is ever compiled, whatever is asked for."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
import pytest

from jaxvllm import LLM, BeamSearchParams, SamplingParams
from tests.engine.tiny import few_pages, random_prompts

KINDS = (
    dict(temperature=0),
    dict(temperature=1.0, seed=3),
    dict(temperature=0.7, top_k=20),
    dict(temperature=1.3, top_p=0.8, min_p=0.02),
    dict(temperature=0, logprobs=5),
    dict(temperature=1.0, logprobs=0),
    dict(temperature=0, stop=["e ", "a"]),
    dict(temperature=1.0, stop_token_ids=[5, 6, 7], min_tokens=4),
    dict(temperature=1.0, n=2),
    dict(temperature=0, ignore_eos=True),
    dict(temperature=0, repetition_penalty=1.2, frequency_penalty=0.2),
    dict(temperature=1.0, presence_penalty=1.0, n=2),
    dict(temperature=1.0, logit_bias={5: 2.0}, allowed_token_ids=list(range(2, 200))),
    dict(temperature=0, bad_words=["a", "the cat"]),
    dict(temperature=1.0, logprob_token_ids=[3, 4]),
)
PROMPTS = random_prompts(200, longest=100, seed=2)
PARAMS = [SamplingParams(max_tokens=4 + i % 17, **KINDS[i % len(KINDS)]) for i in range(200)]

type Count = Callable[[], AbstractContextManager]


def test_200_mixed_requests(wide_llm: LLM, compilations: Count) -> None:
    wide_llm.wait_until_compiled()
    programs = wide_llm.engine.replicas[0].runner.programs
    for bucket in programs.ladder.split:  # they are compiled, in the background, when a beam search first asks for them
        programs.wait_for(bucket)
    assert wide_llm.engine.stats().num_programs == 1 + len(programs.ladder.buckets) + len(programs.ladder.split)
    with compilations() as seen:
        wide_llm.generate(PROMPTS[:150], PARAMS[:150], use_tqdm=False)
        with few_pages(wide_llm, 40):  # preempted, and with prefixes found again
            wide_llm.generate(PROMPTS[100:], PARAMS[100:], use_tqdm=False)
        wide_llm.beam_search(PROMPTS[:5], BeamSearchParams(4, 9))
        for _ in wide_llm.stream(PROMPTS[0], PARAMS[4]):
            pass
    assert seen.count == 0, seen.names
    assert wide_llm.engine.stats().num_preemptions > 0


def test_a_compilation_on_the_way_would_be_seen(llm: LLM, compilations: Count, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: here is a step that compiles."""
    collect = llm.engine.replicas[0].runner.collect
    monkeypatch.setattr(
        llm.engine.replicas[0].runner, "collect", lambda step: (jax.jit(jnp.sin)(1.0), collect(step))[1]
    )
    with compilations() as seen:
        llm.generate(PROMPTS[:1], PARAMS[0], use_tqdm=False)
    assert seen.count > 0
