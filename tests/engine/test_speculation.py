"""Speculation changes no token, no text and no log-probability, whatever the proposer guesses."""

from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm import LLM, SamplingParams
from jaxvllm.core.sampling_params import RequestOutputKind, StructuredOutputsParams
from jaxvllm.engine import drafting as drafting_module
from jaxvllm.engine import repetition_watch
from jaxvllm.engine.outputs import CompletionOutput
from jaxvllm.runtime.proposers import Drafts, HistoryProposer, Proposer
from jaxvllm.runtime.proposers.ngram import NgramProposer
from jaxvllm.runtime.slot_fields import HISTORY, DeviceState
from jaxvllm.text.draft_spans import DraftSpans
from tests.engine.explained import explained, explanation_of
from tests.engine.tiny import (
    GREEDY,
    all_drafts_or_none,
    assert_idle,
    choose_drafts,
    few_pages,
    random_prompts,
    tiny_llm,
)

PROMPTS = [*random_prompts(8, longest=30, seed=5), *([3, 4, 5, 6] * 5, [9, 8] * 9, [7] * 12, [30, 40, 50] * 4)]
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=23, ignore_eos=True)
# Each changes what the next token is, so a draft that was accepted must count in it.
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "ignore_eos": False},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 2},
    {"temperature": 0.0, "frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"temperature": 0.3, "min_p": 0.2, "top_p": 1.0},
    {"temperature": 0.5, "top_k": 5, "logprobs": 3},
    {"temperature": 0.0, "logit_bias": {5: 3.0, 7: -4.0}},
    {"temperature": 0.0, "bad_words": ["a", "bc"]},
    {"temperature": 0.0, "stop": ["e", "ab"]},
    {"temperature": 0.0, "stop_token_ids": tuple(range(20, 50)), "min_tokens": 6, "logprobs": 0},
    {"temperature": 0.2, "n": 3},
    {"temperature": 0.0, "max_tokens": 2},
    {"temperature": 0.0, "allowed_token_ids": tuple(range(30, 50))},
    {"temperature": 0.0, "prompt_logprobs": 1},
    {"temperature": 0.0, "structured_outputs": StructuredOutputsParams(regex="[ab]{3,9}(cd)+e")},
]


@dataclass(frozen=True)
class Knowing(HistoryProposer):
    """A proposer that knows how sequences go on, and says one of `shifts` more than the token; right where that is 0.

    Positions take the shifts in turn.
    """

    sequences: tuple[tuple[int, ...], ...]
    shifts: tuple[int, ...]

    def look(self, state: DeviceState, slots: jax.Array, lengths: jax.Array, num_drafts: int) -> Drafts:
        width = max(map(len, self.sequences)) + num_drafts
        right = jnp.asarray([[*one, *[0] * (width - len(one))] for one in self.sequences], jnp.int32)  # [S, width]
        history = jnp.pad(state[HISTORY.name][slots], ((0, 0), (0, width)))[:, :width]
        is_same = (history[:, None] == right) | (jnp.arange(width) >= lengths[:, None, None])
        at = jnp.argmax(is_same.all(axis=2), axis=1)
        places = jnp.clip(lengths[:, None] + jnp.arange(num_drafts), 0, width - 1)
        drafts = right[at[:, None], places] + self.read_shifts()[places % len(self.shifts)]
        return Drafts(drafts, jnp.full(len(lengths), num_drafts))

    def read_shifts(self) -> jax.Array:
        return jnp.asarray(self.shifts)


@dataclass(frozen=True, eq=False)
class Adjustable(Knowing):
    """Asks the host in each step for the shifts that it has now, so that one engine serves all of them."""

    told: list[int] = field(default_factory=lambda: [0, 0, 0])

    def read_shifts(self) -> jax.Array:
        shape = jax.ShapeDtypeStruct((len(self.shifts),), jnp.int32)
        return jax.pure_callback(lambda: np.asarray(self.told, np.int32), shape)


def drafting(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    proposer: Proposer,
    num_drafts: int = 3,
    divides: bool = False,
    bursts: bool = True,
) -> LLM:
    """An engine all of whose decode steps have drafts where they may: the clock of this machine decides nothing.

    Only this engine has the proposer, however long `monkeypatch` lasts. With `divides` it has the steps in which rows
    divide a few drafts, too, and without `bursts` no program for steps without drafts alone.
    """
    choose_drafts(monkeypatch)
    config = {"method": "ngram", "num_speculative_tokens": num_drafts}
    with pytest.MonkeyPatch.context() as patch, nullcontext() if divides else all_drafts_or_none(bursts=bursts):
        patch.setattr(drafting_module, "NgramProposer", lambda *_: proposer)
        return tiny_llm(directory, speculative_config=config)


@pytest.fixture(scope="module")
def answers(tiny_checkpoint: Path) -> Iterator[list[list[CompletionOutput]]]:
    """What each request is answered without drafts; the greedy ones of all prompts follow."""
    with tiny_llm(tiny_checkpoint) as llm:
        yield [output.outputs for output in llm.generate(*REQUESTS, use_tqdm=False)]


PARAMS = [replace(SAMPLED, seed=index, **options) for index, options in enumerate(OPTIONS)]
PARAMS += [replace(GREEDY, max_tokens=40)] * len(PROMPTS)
REQUESTS: tuple[list[Any], list[SamplingParams]] = (
    [PROMPTS[index % len(PROMPTS)] for index in range(len(OPTIONS))] + PROMPTS,
    PARAMS,
)


def assert_equal(got: list[list[CompletionOutput]], expected: list[list[CompletionOutput]]) -> None:
    for one, other in zip(sum(got, []), sum(expected, []), strict=True):
        assert (one.text, one.token_ids, one.finish_reason, one.stop_reason) == (
            other.text,
            other.token_ids,
            other.finish_reason,
            other.stop_reason,
        )
        assert [list(ranked) for ranked in one.logprobs or ()] == [list(ranked) for ranked in other.logprobs or ()]
        for ranked, others in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert [x.logprob for x in ranked.values()] == pytest.approx([x.logprob for x in others.values()], abs=1e-4)


def assert_marked(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asserts which tokens are marked as drafts where all drafts are right and 5 are verified in a step."""
    marks: dict[DraftSpans, list[bool]] = {}
    expect = DraftSpans.expect

    def spy(spans: DraftSpans, is_draft: bool) -> None:
        marks.setdefault(spans, []).append(is_draft)
        expect(spans, is_draft)

    monkeypatch.setattr(DraftSpans, "expect", spy)
    [replica] = llm.engine.replicas
    for prompts in (PROMPTS[:1], PROMPTS):
        replica.num_accepted[:] = 0
        marks.clear()
        streaming = replace(GREEDY, max_tokens=40, output_kind=RequestOutputKind.DELTA)
        for number, prompt in enumerate(prompts):
            llm.engine.submit(llm.engine.check(str(number), prompt, streaming, wants_draft_spans=True))
        while llm.engine.has_work:
            for output in llm.engine.step():
                [delta] = output.outputs
                assert delta.draft_spans is not None and delta.text == "".join(text for text, _ in delta.draft_spans)
        assert sum(map(sum, marks.values())) == replica.num_accepted.sum() > 0
        assert all(len(of_one) == 40 and not of_one[0] for of_one in marks.values())  # a prompt's end has no drafts
        if len(prompts) == 1:
            [of_one] = marks.values()
            # Each verification ends with a token that nothing guessed; the last has room for two drafts.
            assert of_one == [False, *[True, True, True, True, True, False] * 6, True, True, False]


def assert_explained(llm: LLM) -> None:
    """Asserts that explanations tell of every draft where all of them are right."""
    [replica] = llm.engine.replicas
    replica.num_accepted[:] = 0
    outputs = explained(
        llm, PROMPTS, [replace(GREEDY, max_tokens=40, logprobs=i % 3 or None) for i in range(len(PROMPTS))]
    )
    told = [explanation_of(one) for [one] in outputs]
    assert sum(step.num_accepted for one in told for step in one.steps) == replica.num_accepted.sum() > 0
    assert sum(token.origin == "draft" for one in told for token in one.tokens) == replica.num_accepted.sum()


# What the kinds that know the answers add to each token; positions take three such numbers in turn.
SHIFTS = {"right": 0, "wrong": 1, "beyond the vocabulary": 10**6, "negative": -(10**6)}


@pytest.fixture(scope="module")
def adjustable(tiny_checkpoint: Path, answers: list[list[CompletionOutput]]) -> Iterator[tuple[LLM, list[int]]]:
    """An engine whose proposer knows the answers and guesses five tokens, and by how much it is wrong now."""
    greedy = zip(PROMPTS, answers[len(OPTIONS) :], strict=True)
    proposer = Adjustable(tuple((*prompt, *one.token_ids) for prompt, [one] in greedy), (0, 0, 0))
    with pytest.MonkeyPatch.context() as patch, drafting(tiny_checkpoint, patch, proposer, 5, divides=True) as llm:
        yield llm, proposer.told


# The other proposer that looks at what was said is in test_pipeline.py, with the same requests.
@pytest.mark.parametrize("kind", ["ngram", *SHIFTS])
def test_everything_is_as_without_drafts(
    kind: str,
    tiny_checkpoint: Path,
    answers: list[list[CompletionOutput]],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    with ExitStack() as stack:
        if kind == "ngram":
            llm = stack.enter_context(drafting(tiny_checkpoint, monkeypatch, NgramProposer(1, 3), bursts=False))
        else:
            llm, shifts = request.getfixturevalue("adjustable")
            choose_drafts(monkeypatch)
            shifts[:] = [SHIFTS[kind]] * 3
            llm.reset_prefix_cache()
        [replica] = llm.engine.replicas
        drafted, accepted = replica.num_drafted, replica.num_accepted
        drafted[:] = accepted[:] = 0
        assert_equal([output.outputs for output in llm.generate(*REQUESTS, use_tqdm=False)], answers)
        assert (drafted > 0).all() and (accepted <= drafted).all() and (accepted[1:] <= accepted[:-1]).all()
        if kind == "right":
            replica.num_drafted[:] = replica.num_accepted[:] = 0
            llm.generate(PROMPTS, replace(GREEDY, max_tokens=40), use_tqdm=False)
            assert (accepted == drafted).all()
            assert_marked(llm, monkeypatch)
            assert_explained(llm)
        elif kind == "ngram":
            replica.num_drafted[:] = replica.num_accepted[:] = 0
            llm.generate(PROMPTS[8:], replace(GREEDY, max_tokens=40), use_tqdm=False)  # they repeat themselves
            assert accepted.sum() > 0.2 * drafted.sum()
        else:
            assert accepted.sum() < 0.2 * drafted.sum()
        with few_pages(llm, 14):
            before = llm.engine.stats().num_preemptions
            assert_equal([output.outputs for output in llm.generate(*REQUESTS, use_tqdm=False)], answers)
            assert llm.engine.stats().num_preemptions > before
        assert_idle(llm)


def test_rows_that_divide_a_few_drafts_say_the_same(
    adjustable: tuple[LLM, list[int]], answers: list[list[CompletionOutput]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five drafts a row may have three in such a step, and two on average. Half of the guesses are right."""
    llm, shifts = adjustable
    shifts[:] = [0, 0, 1]
    llm.reset_prefix_cache()
    numbers = cycle([3, 3, 5, 0, 3])
    choose_drafts(monkeypatch, lambda _: next(numbers))
    assert_equal([output.outputs for output in llm.generate(*REQUESTS, use_tqdm=False)], answers)
    [replica] = llm.engine.replicas
    replica.num_drafted[:] = replica.num_accepted[:] = 0
    choose_drafts(monkeypatch, min)
    replica.take_reports()
    llm.generate(PROMPTS[:8], replace(GREEDY, max_tokens=40), use_tqdm=False)
    num_steps = sum(report.num_steps for report in replica.take_reports() if report.num_drafts == 3)
    assert 0 < replica.num_drafted.sum() <= 16 * num_steps and replica.num_drafted[2] < replica.num_drafted[0]
    assert not replica.num_drafted[3:].any() and replica.num_accepted[:2].all()
    with few_pages(llm, 14):
        choose_drafts(monkeypatch, lambda _: next(numbers))
        assert_equal([output.outputs for output in llm.generate(*REQUESTS, use_tqdm=False)], answers)
    assert_idle(llm)


def test_without_being_asked_an_engine_drafts_for_rows_that_repeat_themselves(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_drafts(monkeypatch)
    monkeypatch.setattr(repetition_watch, "FIRST_PAUSE", 1)
    new = replace(SAMPLED, temperature=20.0, max_tokens=90, seed=1)
    loop = replace(GREEDY, max_tokens=80, repetition_penalty=0.1)  # says again what it has said
    texts = []
    one_row: dict[str, Any] = {"max_num_seqs": 1, "row_buckets": (1,)}
    for options in (one_row, {}):  # in steps of eight rows drafts would not pay, so the other engine has none
        with all_drafts_or_none(), tiny_llm(tiny_checkpoint, **options) as llm:
            programs, of_engine = llm.engine.replicas[0].runner.programs, []
            for params in (new, loop, loop):
                of_engine += [output.outputs for output in llm.generate([[3, 4, 5, 6] * 5], params, use_tqdm=False)]
                assert programs.may_compile_drafts == (params is new and options is one_row)
                llm.engine.wait_until_compiled()
            texts.append(of_engine)
            assert (llm.engine.stats().num_accepted_tokens > 20) == (options is one_row)
            assert_idle(llm)
    assert texts[0] == texts[1]
