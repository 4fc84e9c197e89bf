"""Requests whose tokens the host constrains: their steps wait between the forward pass and sampling for a mask."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from jaxvllm import LLM
from jaxvllm.core.sampling_params import RequestOutputKind, SamplingParams
from jaxvllm.core.step_plan import StepPlan
from jaxvllm.core.token_constraint import GuardedConstraint
from jaxvllm.engine.outputs import RequestOutput
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


class Failing(Rising):
    """Allows everything, forces now and then, and fails at one of its methods from so many calls of it on."""

    def __init__(self, method: str, num_calls: int, error: type[BaseException] = RuntimeError):
        super().__init__()
        self._method, self._left, self._error = method, num_calls, error

    def _called(self, method: str) -> None:
        if method == self._method:
            self._left -= 1
            if self._left < 0:
                raise self._error(f"{method} failed")

    @property
    def is_complete(self) -> bool:  # type: ignore[override]
        self._called("is_complete")
        return False

    def advance(self, token_ids: Sequence[int]) -> int:
        self._called("advance")
        if self._method == "refusal" and self.forced() and len(self.seen) >= self._left:
            return 0
        self.seen += token_ids
        return len(token_ids)

    def forced(self) -> Sequence[int]:
        self._called("forced")
        return [7, 8, 9] if len(self.seen) % 5 == 2 else ()

    def fill(self, words: NDArray[np.int32]) -> None:
        self._called("fill")
        words[:] = -1


class Panic(BaseException):
    """What a library in Rust raises where it is wrong."""


def generate(llm: LLM, params: SamplingParams, constraints: dict[int, Rising], guesses: bool = True) -> list[list[int]]:
    """The tokens after each of PROMPTS; those with a number in `constraints` are constrained."""
    engine = llm.engine
    scheduler = engine.replicas[0].scheduler
    outputs: dict[str, list[int]] = {}
    for index, prompt in enumerate(PROMPTS):
        engine.submit(engine.check(str(index), prompt, replace(params, seed=index)))
        request = scheduler.queue[str(index)]
        request.constraint, request.masks_commute = GuardedConstraint.of(constraints.get(index)), guesses
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
    assert max(plan.row_tokens for plan in plans) > 1
    # A mask is there for the token after a prompt, and for no other.
    assert not any(plan.masked[: plan.num_decode].any() for plan in plans if plan.masked is not None)


def test_a_request_that_leaves_while_its_step_is_held_back_waits_for_nothing(llm: LLM) -> None:
    engine = llm.engine
    scheduler = engine.replicas[0].scheduler
    for name in ("constrained", "free"):
        engine.submit(engine.check(name, PROMPTS[0], GREEDY))
    scheduler.queue["constrained"].constraint = GuardedConstraint(rule := Rising())
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


@pytest.mark.parametrize("seed", range(3))
def test_a_constraint_that_fails_at_any_call_ends_its_request_alone(bursting: LLM, seed: int) -> None:
    """Each method fails in a request of its own, at a random call, beside two honest rows, one of them constrained."""
    rng = np.random.default_rng(seed)
    params = [SamplingParams(temperature=float(index % 2), seed=index, max_tokens=40) for index in range(8)]
    engine, prompts = bursting.engine, [*PROMPTS, *PROMPTS[:2]]
    scheduler = engine.replicas[0].scheduler

    def run(failing: dict[int, str]) -> dict[str, RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        for index, prompt in enumerate(prompts):
            engine.submit(engine.check(str(index), prompt, replace(params[index], ignore_eos=True)))
            request = scheduler.queue[str(index)]
            if index in failing:
                error = Panic if rng.random() < 0.5 else RuntimeError
                failure = Failing(failing[index], int(rng.integers(8)), error)
                request.constraint = GuardedConstraint(failure)
                request.masks_commute = bool(rng.random() < 0.5) or failing[index] != "fill"
            elif index == 1:
                request.constraint = GuardedConstraint(Rising())
        while engine.has_work:
            outputs |= {output.request_id: output for output in engine.step() if output.finished}
            scheduler.check_invariants()
        return outputs

    honest = [str(index) for index in (1, 6, 7)]
    alone = run({})
    methods = dict(zip((0, 2, 3, 4, 5), ("advance", "forced", "fill", "is_complete", "refusal"), strict=True))
    beside = run(methods)
    assert [beside[name].outputs for name in honest] == [alone[name].outputs for name in honest]
    for index, method in methods.items():
        [output] = beside[str(index)].outputs
        # Guesses need no mask after the first one.
        is_needed = method != "fill" or output.finish_reason == "error"
        if is_needed:
            assert output.finish_reason == "error" and len(output.token_ids) < 40, method
            wrong = "refuses a token that it forced" if method == "refusal" else f"{method} failed"
            assert wrong in str(output.stop_reason)


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_a_request_whose_output_cannot_be_processed_ends_alone(
    wide_llm: LLM, kind: RequestOutputKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = wide_llm.engine
    outputs, calls = engine.outputs, 0
    params = SamplingParams(max_tokens=12, n=2, seed=1, logprobs=0, temperature=0, ignore_eos=True, output_kind=kind)

    def run() -> dict[str, list[RequestOutput]]:
        told: dict[str, list[RequestOutput]] = {name: [] for name in ("honest", "doomed", "other")}
        for name in told:
            engine.submit(engine.check(name, PROMPTS[0], params))
        while engine.has_work:
            for output in engine.step():
                told[output.request_id].append(output)
            engine.replicas[0].scheduler.check_invariants()
        return told

    def whole(told: list[RequestOutput]) -> list[list[int]]:
        """The tokens of both completions, whatever the kind of outputs."""
        parts = told if kind is RequestOutputKind.DELTA else told[-1:]
        found: list[list[int]] = [[], []]
        for completion in (one for output in parts for one in output.outputs):
            found[completion.index] += completion.token_ids
        return found

    before = run()
    assert [len(ids) for ids in whole(before["honest"])] == [12, 12]
    for method, count in (("_take_token", 0), ("_take_token", 5), ("_finish", 0), ("_completion_output", 1)):
        real = getattr(outputs, method)

        def failing(group: Any, *args: Any, real: Any = real, count: int = count) -> Any:
            nonlocal calls
            calls += group.request.request_id == "doomed"
            if group.request.request_id == "doomed" and calls > count:
                raise Panic("a library in Rust")
            return real(group, *args)

        calls = 0
        with monkeypatch.context() as patch:
            patch.setattr(outputs, method, failing)
            told = run()
        assert engine.outputs is outputs, "no step broke off"
        assert [whole(told[name]) for name in ("honest", "other")] == [
            whole(before[name]) for name in ("honest", "other")
        ]
        last = told["doomed"][-1]
        assert last.finished and [one.finish_reason for one in last.outputs] == ["error"] * 2
        assert last.outputs[0].stop_reason == "the output of this request could not be processed (Panic)"
        assert not any(output.finished for output in told["doomed"][:-1])


def test_a_request_that_cannot_be_queued_leaves_nothing(wide_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = wide_llm.engine
    scheduler = engine.replicas[0].scheduler
    real, calls = scheduler.add, 0

    def add(*args: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError
        real(*args, **options)

    request = engine.check("a", PROMPTS[0], replace(GREEDY, n=3))
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "add", add)
        with pytest.raises(MemoryError):
            engine.submit(request)
    assert not engine.has_work and not engine.outputs.num_requests
    engine.submit(request)
    assert engine.abort("a") is not None


def test_what_a_request_excludes_is_excluded_from_forced_tokens_too(bursting: LLM) -> None:
    """Whether a forced token is sampled depends on what runs beside it, and the answer must not."""

    class Forcing(Anything):
        def forced(self) -> Sequence[int]:
            return [20 + len(self.seen)]

        def allowed(self, before: Sequence[int]) -> NDArray[np.bool_]:
            return np.arange(VOCAB) == 20 + len(before)

    engine = bursting.engine
    scheduler = engine.replicas[0].scheduler
    for beside in (0, 3):
        for index in range(beside):
            engine.submit(engine.check(f"free {index}", PROMPTS[index], GREEDY))
        params = SamplingParams(max_tokens=20, allowed_token_ids=[20, 21, 22, 30])
        engine.submit(engine.check("form", PROMPTS[0], params))
        scheduler.queue["form"].constraint = GuardedConstraint(Forcing())
        outputs: dict[str, RequestOutput] = {}
        while engine.has_work:
            outputs |= {output.request_id: output for output in engine.step() if output.finished}
        [output] = outputs["form"].outputs
        assert (output.token_ids, output.finish_reason) == ([20, 21, 22], "error")
        assert output.wrong_param == "allowed_token_ids" and "behind 3 tokens" in str(output.stop_reason)


@pytest.mark.parametrize("options", [dict(logprob_token_ids=[5, 20]), dict(logprobs=2)])
def test_log_probabilities_of_forced_tokens_are_the_same_in_company(llm: LLM, options: dict[str, Any]) -> None:
    class Forcing(Anything):
        def forced(self) -> Sequence[int]:
            return [20, 21, 22, 23] if len(self.seen) % 6 == 2 else ()

        def allowed(self, before: Sequence[int]) -> NDArray[np.bool_]:
            tokens = np.arange(VOCAB)
            place = len(before) % 6
            return tokens == 18 + place if place >= 2 else tokens < VOCAB

    engine = llm.engine
    scheduler = engine.replicas[0].scheduler
    told = []
    for beside in (0, 4):
        for index in range(beside):
            engine.submit(engine.check(f"free {index}", PROMPTS[index], replace(GREEDY, max_tokens=30)))
        engine.submit(engine.check("form", PROMPTS[0], replace(GREEDY, max_tokens=24, **options)))
        scheduler.queue["form"].constraint = GuardedConstraint(Forcing())
        outputs: dict[str, RequestOutput] = {}
        while engine.has_work:
            outputs |= {output.request_id: output for output in engine.step() if output.finished}
        [output] = outputs["form"].outputs
        assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids) == 24
        told.append(
            [(token, ranked[token].logprob) for token, ranked in zip(output.token_ids, output.logprobs, strict=True)]
        )
    alone, in_company = told
    assert alone == in_company
    assert [value for index, (_, value) in enumerate(alone) if index % 6 >= 2] == [0.0] * 16
