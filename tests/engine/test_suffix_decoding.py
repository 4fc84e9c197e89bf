"""Suffix decoding: what a server has said before, it guesses again, also for another request."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxvllm import LLM, SamplingParams
from jaxvllm.runtime.suffix_index import INDEX
from tests.engine.tiny import GREEDY, all_drafts_or_none, assert_idle, choose_drafts, random_prompts, tiny_llm

PROMPTS = random_prompts(3, longest=60, seed=11)
# Random tokens, so a row that looks at itself alone finds little that is right.
SAMPLED = SamplingParams(temperature=1.0, seed=7, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Iterator[LLM]:
    """On a mesh, where all devices must find the same drafts."""
    config = {"method": "suffix", "num_speculative_tokens": 3}
    with all_drafts_or_none(bursts=False), tiny_llm(tiny_checkpoint, mesh="1x2", speculative_config=config) as llm:
        yield llm


@pytest.fixture
def llm(engine: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """The engine as new. All decode steps have drafts where they may: the clock of this machine decides nothing."""
    choose_drafts(monkeypatch)
    forget(engine)
    return engine


def forget(llm: LLM) -> None:
    llm.engine.replicas[0].runner.reset()
    llm.reset_prefix_cache()


def answer(llm: LLM, prompts: list[list[int]], params: SamplingParams = SAMPLED) -> tuple[list[list[int]], np.ndarray]:
    """The tokens after each prompt, and how many drafts there were, and how many of them were right."""
    [replica] = llm.engine.replicas
    replica.num_drafted[:] = replica.num_accepted[:] = 0
    outputs = llm.generate(prompts, params, use_tqdm=False)
    counts = np.array([replica.num_drafted.sum(), replica.num_accepted.sum()])
    return [list(output.outputs[0].token_ids) for output in outputs], counts


def test_a_second_request_is_guessed_from_one_that_has_ended(llm: LLM) -> None:
    first, alone = answer(llm, PROMPTS)
    assert alone[1] < 12
    second, again = answer(llm, PROMPTS)
    # 40 tokens of each of 3 rows. The first of each is the prompt's step's, and a step whose drafts are right yields 4.
    assert second == first and again[1] >= 3 * 27 and again[1] > 0.9 * again[0]
    # The slots' next tenants say something else, so what was said is forgotten.
    answer(llm, [[3] * 100] * 8, replace(GREEDY, max_tokens=27))
    third, few = answer(llm, PROMPTS)
    assert third == first and few[1] < 12
    forget(llm)
    fresh, counts = answer(llm, PROMPTS)
    assert fresh == first and counts.tolist() == alone.tolist()
    assert_idle(llm)


def test_a_slot_is_the_next_when_all_others_were(llm: LLM) -> None:
    """So a request that comes alone does not replace what the last one said."""
    [first], alone = answer(llm, PROMPTS[:1])
    answer(llm, [[3] * 100], replace(GREEDY, max_tokens=27))
    [second], again = answer(llm, PROMPTS[:1])
    assert second == first and alone[1] < 4 and again[1] >= 27


def test_a_request_is_guessed_from_one_that_runs_beside_it(llm: LLM) -> None:
    [text], alone = answer(llm, PROMPTS[:1])
    forget(llm)
    # The noise of a token depends on its position. So the other row says the same, 20 tokens ahead.
    [slow, quick], beside = answer(llm, [PROMPTS[0], PROMPTS[0] + text[:20]])
    assert slow == text and quick[:20] == text[20:]
    assert alone[1] < 4 and beside[1] >= 15


def test_the_index_is_in_the_memory_that_is_told(llm: LLM) -> None:
    runner = llm.engine.replicas[0].runner
    state = runner._state
    whole = sum(x.nbytes for x in jax.tree.leaves(state))
    assert runner.memory_use().state == whole > 4 * len(state[INDEX]) > 4 * 8 * 128 * 3
