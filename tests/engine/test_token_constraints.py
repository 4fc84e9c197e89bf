"""Requests whose tokens the host constrains: their steps wait between the forward pass and sampling for a mask."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from jaxvllm import LLM
from jaxvllm.core.request import TokenConstraint
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.core.step_plan import StepPlan
from tests.engine.tiny import GREEDY, Recomputation, few_pages, random_prompts

VOCAB = 256
PROMPTS = random_prompts(6, longest=24, seed=9)


class Rising:
    """Allows only tokens of another remainder by 3 than the last token had: what may come depends on what came."""

    is_complete = False

    def __init__(self) -> None:
        self.seen: list[int] = []

    def advance(self, token_ids: Sequence[int]) -> int:
        for index, token in enumerate(token_ids):
            if token >= VOCAB or not self.allowed(self.seen)[token]:
                return index
            self.seen.append(token)
        return len(token_ids)

    def forced(self) -> Sequence[int]:
        return ()

    def allowed(self, before: Sequence[int]) -> NDArray[np.bool_]:
        tokens = np.arange(VOCAB)
        return tokens % 3 != before[-1] % 3 if before else tokens % 2 == 0

    def fill(self, words: NDArray[np.int32]) -> None:
        bits = np.packbits(self.allowed(self.seen), bitorder="little").view(np.int32)
        words[: len(bits)] = bits


class Anything(Rising):
    """Allows every token of the mask's form."""

    def allowed(self, before: Sequence[int]) -> NDArray[np.bool_]:
        return np.ones(VOCAB, np.bool_)


def generate(llm: LLM, params: SamplingParams, constraints: dict[int, Rising], guesses: bool = True) -> list[list[int]]:
    """The tokens after each of PROMPTS; those with a number in `constraints` are constrained."""
    engine = llm.engine
    scheduler = engine.replicas[0].scheduler
    outputs: dict[str, list[int]] = {}
    for index, prompt in enumerate(PROMPTS):
        engine.submit(engine.check(str(index), prompt, replace(params, seed=index)))
        constraint: TokenConstraint | None = constraints.get(index)
        request = scheduler._waiting_ids[str(index)]
        request.constraint, request.masks_commute = constraint, guesses
    while engine.has_work:
        outputs |= {output.request_id: output.outputs[0].token_ids for output in engine.step() if output.finished}
        scheduler.slots.check_invariants()
    return [list(outputs[str(index)]) for index in range(len(PROMPTS))]


def is_constrained_greedy(recomputation: Recomputation, prompt: list[int], output: list[int]) -> bool:
    """Whether each token is the best of those that the constraint allows after the ones before it."""
    logits = recomputation.logits(prompt, output)[:, :VOCAB]
    rule = Rising()
    best = [int(np.where(rule.allowed(output[:i]), row[:VOCAB], -np.inf).argmax()) for i, row in enumerate(logits)]
    return best == output


@pytest.mark.parametrize("num_pages", [None, 7])
def test_each_token_is_the_best_that_is_allowed(llm: LLM, recomputation: Recomputation, num_pages: int | None) -> None:
    constraints = {index: Rising() for index in (0, 2, 3)}
    free = generate(llm, GREEDY, {})
    before = llm.engine.stats().num_preemptions
    if num_pages is None:
        got = generate(llm, GREEDY, constraints)
    else:
        with few_pages(llm, num_pages):
            got = generate(llm, GREEDY, constraints)
        assert llm.engine.stats().num_preemptions > before
    for index, constraint in constraints.items():
        assert got[index] != free[index]
        assert is_constrained_greedy(recomputation, PROMPTS[index], got[index])
        assert constraint.seen == got[index], "every token was taken in, once and in order"
    # Rows beside them lose nothing.
    assert [got[i] for i in (1, 4, 5)] == [free[i] for i in (1, 4, 5)]


def test_sampled_tokens_are_allowed_and_the_free_ones_unchanged(wide_llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, top_k=50, max_tokens=20, ignore_eos=True)
    free = generate(wide_llm, params, {})
    got = generate(wide_llm, params, {1: Rising()})
    rule = Rising()
    assert all(rule.allowed(got[1][:i])[token] for i, token in enumerate(got[1]))
    assert [got[i] for i in (0, 2, 3, 4, 5)] == [free[i] for i in (0, 2, 3, 4, 5)]
    # Nobody is constrained any more: the slot's next tenant samples freely.
    assert generate(wide_llm, params, {}) == free


@pytest.mark.parametrize("rule", [Rising, Anything])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_guesses_give_the_tokens_that_masks_give(bursting: LLM, rule: type[Rising], temperature: float) -> None:
    # `allowed_token_ids` keep the guesses within what the rules know.
    params = SamplingParams(
        temperature=temperature, max_tokens=40, ignore_eos=True, allowed_token_ids=list(range(VOCAB))
    )
    indices = range(len(PROMPTS))
    masked = generate(bursting, params, {index: rule() for index in indices}, guesses=False)
    rules = {index: rule() for index in indices}
    assert generate(bursting, params, rules) == masked
    assert [rules[index].seen for index in indices] == masked, "every token was taken in, once and in order"
    if rule is Rising:  # it allows two thirds of the tokens, so some guesses were wrong
        assert masked != generate(bursting, params, {})


def test_a_row_whose_guesses_are_right_decodes_in_bursts(bursting: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = bursting.engine.replicas[0].runner
    plans: list[StepPlan] = []
    dispatch = runner.dispatch

    def watch(plan: StepPlan) -> object:
        plans.append(plan)
        return dispatch(plan)

    monkeypatch.setattr(runner, "dispatch", watch)
    params = replace(GREEDY, max_tokens=40, ignore_eos=True, allowed_token_ids=tuple(range(VOCAB)))
    generate(bursting, params, {index: Anything() for index in range(len(PROMPTS))})
    assert max(plan.width for plan in plans) > 1
    # A mask is there for the token after a prompt, and for no other.
    assert not any(plan.masked[: plan.num_decode].any() for plan in plans if plan.masked is not None)


def test_a_request_that_leaves_while_its_step_is_held_back_waits_for_nothing(llm: LLM) -> None:
    engine = llm.engine
    scheduler = engine.replicas[0].scheduler
    for name in ("constrained", "free"):
        engine.submit(engine.check(name, PROMPTS[0], GREEDY))
    scheduler._waiting_ids["constrained"].constraint = rule = Rising()
    for _ in range(8):
        engine.step()
    replica = engine.replicas[0]
    replica.dispatch(engine.outputs)
    if replica._held is None:  # this step is the free row's alone
        engine.step()
        replica.dispatch(engine.outputs)
    assert replica._held is not None and replica.is_busy and replica.is_due
    engine.abort("constrained")
    count = len(rule.seen)
    while engine.has_work:
        engine.step()
        scheduler.check_invariants()
    assert len(rule.seen) == count
