"""Models that were trained a little, one with experts and one with states: whatever happens to a request, its text is
that of the whole sequence computed anew. Random weights choose a few experts, repeat few words and accept no drafts.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer

from jaxvllm import LLM
from jaxvllm.models.expert_router import ExpertRouter
from pallas_kernels.backend import Backend
from tests.engine.tiny import (
    GREEDY,
    Recomputation,
    all_drafts_or_none,
    assert_idle,
    choose_drafts,
    few_pages,
    greedy_tokens,
    one_program,
    tiny_llm,
)
from tests.quick import quick_engines
from tools.demo_corpus import EVALUATION_SEED, Corpus

ASSETS = Path(__file__).parent.parent / "assets"
TOKENIZER = Path(__file__).parents[2] / "jaxvllm" / "assets" / "demo"
SHARED = 64  # tokens, four pages
MAX_TOKENS = 48


def encoded(text: str) -> list[int]:
    ids: list[int] = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    return ids


# A story that the models have not seen. The prompts that share a prefix have four pages of it.
STORY = encoded(next(one.text for one in Corpus(EVALUATION_SEED).part(held_out=True) if one.kind == "story"))
SHARING = [[*STORY[:SHARED], *encoded(text)] for text in (" One day", " He was", " They went to the", " The")]
PROMPTS = [STORY[:5], STORY[:30], encoded("<|bos|>Once upon a time"), *SHARING]


@pytest.fixture(autouse=True, scope="module")
def quick_programs() -> Iterator[None]:
    """Gives way to `name`, which compiles as each model needs it."""
    yield


@pytest.fixture(scope="module", params=["experts", "states"])
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    with quick_engines(have_states=request.param == "states"):
        yield request.param


@pytest.fixture(scope="module")
def model(name: str) -> Recomputation:
    return Recomputation(ASSETS / name)


def served(name: str, **options: Any) -> LLM:
    return tiny_llm(ASSETS / name, tokenizer=str(TOKENIZER), dtype="float32", **options)


@pytest.fixture(scope="module")
def llm(name: str) -> Iterator[LLM]:
    """An engine that takes up to three drafts from the row itself in each step, and 16 tokens of prompts."""
    with pytest.MonkeyPatch.context() as patch:
        choose_drafts(patch)
        with all_drafts_or_none(bursts=False):
            config = {"method": "ngram", "num_speculative_tokens": 3}
            llm = served(name, speculative_config=config)
        with llm:
            yield llm


@pytest.fixture(scope="module")
def answers(llm: LLM, model: Recomputation) -> list[list[int]]:
    """The tokens after each prompt, alone and with nothing cached, which are the model's best."""
    found = []
    for prompt in PROMPTS:
        llm.engine.replicas[0].scheduler.cache.reset_prefix_cache()
        found += greedy_tokens(llm, [prompt], MAX_TOKENS)
    assert all(model.is_greedy(prompt, answer) for prompt, answer in zip(PROMPTS, found, strict=True))
    return found


def test_the_model_has_learnt_english(model: Recomputation) -> None:
    length = len(STORY[:120])
    logits = model.logits(STORY[:1], STORY[1:length]).astype(np.float64)
    loss = np.mean(np.logaddexp.reduce(logits, axis=-1) - logits[range(length - 1), STORY[1:length]])
    assert loss < 3  # nats; equal chances of all tokens have 7.6, and their frequencies alone 5.7


def test_batched_cached_and_preempted_it_says_the_same(llm: LLM, answers: list[list[int]]) -> None:
    scheduler = llm.engine.replicas[0].scheduler
    scheduler.cache.reset_prefix_cache()
    for _ in range(2):  # the second time with cached prefixes
        assert greedy_tokens(llm, PROMPTS, MAX_TOKENS) == answers
    before = scheduler.num_preemptions
    with few_pages(llm, 12):
        assert greedy_tokens(llm, PROMPTS, MAX_TOKENS) == answers
    assert scheduler.num_preemptions > before
    stats = llm.engine.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert_idle(llm)


def test_prompts_that_share_pages_find_them(llm: LLM, answers: list[list[int]]) -> None:
    llm.engine.replicas[0].scheduler.cache.reset_prefix_cache()
    before = llm.engine.stats()
    for prompt, answer in zip(SHARING, answers[-len(SHARING) :], strict=True):
        [output] = llm.generate([prompt], replace(GREEDY, max_tokens=MAX_TOKENS), use_tqdm=False)
        assert output.outputs[0].token_ids == answer
        assert output.num_cached_tokens == (0 if prompt is SHARING[0] else SHARED)
    after = llm.engine.stats()
    hits = after.num_prefix_hits - before.num_prefix_hits
    assert hits == SHARED * (len(SHARING) - 1)
    assert hits / (after.num_prefix_queries - before.num_prefix_queries) > 0.6
    assert_idle(llm)


def test_on_two_devices_it_says_the_same(name: str, answers: list[list[int]]) -> None:
    is_by_expert = name == "experts"
    options = {"enable_expert_parallel": True} if is_by_expert else {"warm_up": "background"}
    with one_program() if is_by_expert else nullcontext(), served(name, mesh="1x2", **options) as llm:
        for _ in range(2):  # the second time with cached prefixes
            assert greedy_tokens(llm, PROMPTS, MAX_TOKENS) == answers
        assert_idle(llm)


def test_every_expert_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    choose, loads = ExpertRouter.choose, []

    def spy(router: ExpertRouter, weights: Any, x: jax.Array, backend: Backend) -> tuple[jax.Array, jax.Array]:
        chosen, counts = choose(router, weights, x, backend)
        jax.debug.callback(lambda chosen: loads.append(np.bincount(chosen.ravel(), minlength=8)), chosen)
        return chosen, counts

    monkeypatch.setattr(ExpertRouter, "choose", spy)
    Recomputation(ASSETS / "experts").logits(STORY[:1], STORY[1:120])
    jax.effects_barrier()
    shares = [load / load.sum() for load in loads]
    assert len(shares) == 2, "one of each layer"
    assert all(share.min() > 0.02 and share.max() < 0.4 for share in shares)
