"""Scheduling decides when a token is computed, never which one it is."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from jaxvllm import LLM
from jaxvllm.core.policy import POLICIES
from tests.engine.tiny import (
    GREEDY,
    MAX_MODEL_LEN,
    Recomputation,
    assert_idle,
    few_pages,
    greedy_tokens,
    random_prompts,
    tiny_llm,
)

PROMPTS = random_prompts(20, longest=80, seed=4)


@pytest.fixture(scope="module", params=list(POLICIES))
def policy_llm(request: pytest.FixtureRequest, tiny_checkpoint: Path) -> Iterator[LLM]:
    with tiny_llm(tiny_checkpoint, scheduler=request.param, scheduling_policy="priority") as llm:
        yield llm


def test_every_policy_gives_the_models_tokens(policy_llm: LLM, recomputation: Recomputation) -> None:
    for pages in (64, 9):
        with few_pages(policy_llm, pages):
            for prompt, tokens in zip(PROMPTS, greedy_tokens(policy_llm, PROMPTS), strict=True):
                assert len(tokens) == 24 and recomputation.is_greedy(prompt, tokens)
        assert_idle(policy_llm)
    preempts = not POLICIES[policy_llm.config.scheduler].reserves_limit
    assert (policy_llm.engine.stats().num_preemptions > 0) == preempts


def test_the_smaller_priority_goes_first(policy_llm: LLM) -> None:
    priorities = [9 - i // 2 for i in range(20)]
    outputs = policy_llm.generate(PROMPTS, GREEDY, priority=priorities, use_tqdm=False)
    scheduled = [output.metrics.first_scheduled_time for output in outputs if output.metrics]
    order = sorted(range(20), key=lambda i: (priorities[i], i))
    by_priority = [scheduled[i] for i in order]
    assert None not in by_priority and by_priority == sorted(by_priority)  # type: ignore[type-var]
    assert by_priority[0] < by_priority[-1]  # type: ignore[operator]
    assert [output.outputs[0].token_ids for output in outputs] == greedy_tokens(policy_llm, PROMPTS)


def test_an_urgent_request_is_preempted_last(policy_llm: LLM) -> None:
    """Four that grow until two fit, the urgent one among them: it never has to start again."""
    prompts = [[10 * i + 2] * 30 for i in range(1, 5)]
    params = replace(GREEDY, max_tokens=MAX_MODEL_LEN - 30)
    with few_pages(policy_llm, 16):
        outputs = policy_llm.generate(prompts, params, priority=[5, 5, 5, -1], use_tqdm=False)
    times = [output.metrics.num_preemptions for output in outputs if output.metrics]
    assert times[3] == 0
    assert (sum(times) > 0) == (not POLICIES[policy_llm.config.scheduler].reserves_limit)
    assert_idle(policy_llm)
