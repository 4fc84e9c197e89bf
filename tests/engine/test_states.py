"""Layers that keep a state, whatever happens to a request: its tokens are those of the whole sequence computed anew."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxvllm import LLM, BeamSearchParams, SamplingParams
from jaxvllm.core.sampling_params import StructuredOutputsParams
from jaxvllm.core.state_group import MOST_STATES
from tests.core.beam_oracle import beam_search
from tests.engine.test_speculation import Adjustable
from tests.engine.tiny import (
    GREEDY,
    Recomputation,
    all_drafts_or_none,
    assert_idle,
    choose_drafts,
    few_pages,
    greedy_tokens,
    random_prompts,
    tiny_llm,
    write_tiny_checkpoint,
)
from tests.quick import quick_engines

# Of less than a page, of whole pages, and of several chunks of a step.
PROMPTS = [*random_prompts(4, longest=30, seed=11), *(list(range(2, 2 + length)) for length in (16, 32, 45))]


@pytest.fixture(autouse=True, scope="module")
def quick_programs() -> Iterator[None]:
    with quick_engines(have_states=True):
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("states"), "qwen3_5")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    """The greedy tokens after each prompt, by recomputation."""
    model = Recomputation(checkpoint)
    answers: list[list[int]] = []
    for prompt in PROMPTS:
        answer: list[int] = []
        while len(answer) < GREEDY.max_tokens:
            answer.append(int(model.logits([*prompt, *answer], [0]).argmax()))
        answers.append(answer)
    return answers


@pytest.fixture(scope="module")
def proposer(expected: list[list[int]]) -> Adjustable:
    return Adjustable(tuple((*p, *a) for p, a in zip(PROMPTS, expected, strict=True)), (0, 0, 0))


@contextmanager
def drafting(checkpoint: Path, proposer: Adjustable, bursts: bool = True, **options: Any) -> Iterator[LLM]:
    """An engine whose decode steps all have three drafts a row where they may, of the proposer's choice."""
    with pytest.MonkeyPatch.context() as patch:
        choose_drafts(patch)
        with all_drafts_or_none(bursts=bursts):
            patch.setattr("jaxvllm.engine.drafting.NgramProposer", lambda *_: proposer)
            config = {"method": "ngram", "num_speculative_tokens": 3}
            llm = tiny_llm(checkpoint, speculative_config=config, num_pages=65, **options)
        with llm:
            yield llm


@pytest.fixture(scope="module")
def llm(checkpoint: Path, proposer: Adjustable) -> Iterator[LLM]:
    with drafting(checkpoint, proposer) as llm:
        yield llm


# All drafts right, none, the first alone, and each that follows a wrong one.
@pytest.mark.parametrize("shifts", [[0, 0, 0], [1, 1, 1], [0, 1, 0], [0, 0, 1]], ids=str)
def test_a_draft_that_was_wrong_leaves_no_trace(
    llm: LLM, expected: list[list[int]], proposer: Adjustable, shifts: list[int]
) -> None:
    llm.engine.replicas[0].scheduler.cache.reset_prefix_cache()
    proposer.told[:] = shifts
    assert greedy_tokens(llm, PROMPTS) == expected
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == answer
        assert output.num_cached_tokens == (len(prompt) - 1) // 16 * 16
    assert_idle(llm)


def test_samples_of_one_prompt_share_its_snapshot(llm: LLM, proposer: Adjustable) -> None:
    llm.engine.replicas[0].scheduler.cache.reset_prefix_cache()
    proposer.told[:] = [0, 1, 0]
    params = SamplingParams(temperature=0.9, n=3, seed=4, max_tokens=20, ignore_eos=True)
    [together] = llm.generate([PROMPTS[-1]], params, use_tqdm=False)
    alone = [llm.generate([PROMPTS[-1]], replace(params, n=1, seed=4 + index), use_tqdm=False)[0] for index in range(3)]
    assert [one.token_ids for one in together.outputs] == [one.outputs[0].token_ids for one in alone]
    assert_idle(llm)


def test_a_conversation_goes_on_from_the_snapshot_in_the_answer(llm: LLM, proposer: Adjustable) -> None:
    cache = llm.engine.replicas[0].scheduler.cache
    cache.reset_prefix_cache()
    proposer.told[:] = [1, 1, 1]  # so that the request decodes in many steps after the snapshot
    prompt = PROMPTS[-1]
    [answer] = greedy_tokens(llm, [prompt], max_tokens=34)
    # 45 and 34 tokens, the last of which was never computed, are four full pages and most of another.
    [again] = llm.generate([[*prompt, *answer]], replace(GREEDY, max_tokens=1), use_tqdm=False)
    assert again.num_cached_tokens == 64
    cache.reset_prefix_cache()
    [anew] = llm.generate([[*prompt, *answer]], replace(GREEDY, max_tokens=1), use_tqdm=False)
    assert (anew.num_cached_tokens, anew.outputs[0].token_ids) == (0, again.outputs[0].token_ids)
    assert_idle(llm)


def test_preempted_and_with_few_states(llm: LLM, expected: list[list[int]], proposer: Adjustable) -> None:
    proposer.told[:] = [0, 0, 1]
    scheduler = llm.engine.replicas[0].scheduler
    before = scheduler.num_preemptions
    with few_pages(llm, 8):
        assert greedy_tokens(llm, PROMPTS) == expected
    assert scheduler.num_preemptions > before
    with few_pages(llm, 2 * MOST_STATES, number=1):  # two requests at once
        assert greedy_tokens(llm, PROMPTS) == expected
    assert_idle(llm)


def test_beams_have_states_of_their_own(llm: LLM, checkpoint: Path) -> None:
    model = Recomputation(checkpoint)

    def logprobs(tokens: tuple[int, ...]) -> np.ndarray:
        [logits] = model.logits(tokens, [0])
        return np.asarray(logits - np.logaddexp.reduce(logits), np.float32)

    [eos] = llm.engine.eos_token_ids
    for prompt in (PROMPTS[-1][:14], PROMPTS[4]):  # the first page ends while they search, and before
        [output] = llm.beam_search([prompt], BeamSearchParams(3, 6))
        best = beam_search(logprobs, prompt, 3, 6, eos, 1.0, False, False)
        assert [one.tokens for one in output.sequences] == [[*prompt, *found.output] for found in best]
    assert_idle(llm)


def test_a_form_never_guesses_what_a_state_would_have_to_forget(llm: LLM) -> None:
    form = "[ab]{3,9}(cd){2,5}e"
    params = replace(GREEDY, structured_outputs=StructuredOutputsParams(regex=form), ignore_eos=False)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert all(re.fullmatch(form, output.outputs[0].text) for output in outputs)
    for prompt, together in zip(PROMPTS, outputs, strict=True):
        [alone] = llm.generate([prompt], params, use_tqdm=False)
        assert alone.outputs[0].token_ids == together.outputs[0].token_ids
    assert_idle(llm)


@pytest.mark.slow
def test_drafts_in_stages(checkpoint: Path, expected: list[list[int]], proposer: Adjustable) -> None:
    with drafting(checkpoint, proposer, bursts=False, mesh="2x1x1") as llm:
        for shifts in ([0, 0, 0], [0, 1, 0]):
            proposer.told[:] = shifts
            assert greedy_tokens(llm, PROMPTS) == expected
        assert llm.engine.stats().num_draft_tokens > 0
        assert_idle(llm)
