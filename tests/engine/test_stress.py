"""Requests that come, go and compete at random: every answer is the model's, whatever happened around it."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from jaxvllm import LLM, SamplingParams
from tests.engine.tiny import MAX_MODEL_LEN, Recomputation, few_pages

NUM_REQUESTS = 60


@dataclass
class Submitted:
    prompt: list[int]
    params: SamplingParams
    completions: list[tuple[list[int], str | None]] = field(default_factory=list)


def random_prompt(random: np.random.Generator, earlier: list[Submitted]) -> list[int]:
    """New tokens, mostly after what an earlier prompt began with: prefixes are shared at every length."""
    fresh = random.integers(2, 256, random.integers(1, 40)).tolist()
    if not earlier or random.random() < 0.4:
        return fresh
    shared = earlier[random.integers(len(earlier))].prompt
    return (shared[: random.integers(1, len(shared) + 1)] + fresh)[: MAX_MODEL_LEN - 28]


def random_params(random: np.random.Generator) -> SamplingParams:
    params = SamplingParams(temperature=0, max_tokens=int(random.integers(1, 28)))
    kind = random.integers(4)
    if kind == 0:
        return replace(params, logprobs=1)
    if kind == 1:
        return replace(params, stop_token_ids=random.integers(2, 256, 8).tolist())
    if kind == 2:
        return replace(params, n=2)
    return params


@pytest.mark.parametrize("seed", range(6))
def test_mixed_arrivals(llm: LLM, recomputation: Recomputation, seed: int) -> None:
    arrive(llm, recomputation, seed)


@pytest.mark.parametrize("seed", range(6))
def test_mixed_arrivals_between_bursts(bursting: LLM, recomputation: Recomputation, seed: int) -> None:
    bursting.engine.take_reports()
    arrive(bursting, recomputation, seed)
    assert any(report.num_steps > 1 for report in bursting.engine.take_reports())


def arrive(llm: LLM, recomputation: Recomputation, seed: int) -> None:
    random = np.random.default_rng(seed)
    engine, eos = llm.engine, llm.get_tokenizer().eos_token_id
    slots, cache = engine.replicas[0].scheduler.slots, engine.replicas[0].scheduler.cache
    [group] = cache.groups
    requests: dict[str, Submitted] = {}
    aborted = set()
    before = engine.stats()
    with few_pages(llm, 14) as held:
        while len(requests) < NUM_REQUESTS or engine.has_work:
            for _ in range(random.integers(3) if len(requests) < NUM_REQUESTS else 0):
                one = Submitted(random_prompt(random, list(requests.values())), random_params(random))
                name = str(len(requests))
                engine.submit(engine.check(name, one.prompt, one.params))
                requests[name] = one
            if requests and random.random() < 0.03:
                name = str(random.integers(len(requests)))
                if engine.abort(name) is not None:
                    aborted.add(name)
            for output in engine.step():
                if output.finished:
                    assert output.request_id not in aborted
                    assert not requests[output.request_id].completions, "ended twice"
                    requests[output.request_id].completions = [(c.token_ids, c.finish_reason) for c in output.outputs]
            slots.check_invariants()
            group.pool.check_invariants(
                [held, *(group.pages(slot) for slot, _ in engine.replicas[0].scheduler.running())]
            )
    after = engine.stats()
    assert after.num_preemptions > before.num_preemptions and 0 < len(aborted) < NUM_REQUESTS / 2
    for name, one in requests.items():
        assert len(one.completions) == (0 if name in aborted else one.params.n)
        for tokens, reason in one.completions:
            assert recomputation.is_greedy(one.prompt, tokens)
            stops = [i for i, token in enumerate(tokens) if token in (eos, *one.params.stop_token_ids)]
            if reason == "stop":
                assert stops == [len(tokens) - 1]
            else:
                assert reason == "length" and not stops and len(tokens) == one.params.max_tokens
