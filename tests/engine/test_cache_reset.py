"""What a reset of the prefix cache forgets: pages of the pool, of a connector, and of running requests."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from jaxvllm import LLM
from jaxvllm.kv_transfer.page_format import Page
from tests.engine.test_exported_requests import BEAMS, REQUESTS, Reader, step, submit, submit_all
from tests.engine.tiny import GREEDY, assert_idle, greedy_tokens, one_program, random_prompts, tiny_llm

PROMPTS = random_prompts(6, longest=90, seed=4)


@pytest.fixture(scope="module", params=["host", "files"])
def keeping(request: pytest.FixtureRequest, tiny_checkpoint: Path, tmp_path_factory: Any) -> Iterator[LLM]:
    """Two replicas, whose pages one connector keeps."""
    extra = {"shared_storage_path": str(tmp_path_factory.mktemp("pages"))} if request.param == "files" else {}
    config = json.dumps({"kv_connector": request.param, "kv_connector_extra_config": extra})
    with one_program(), tiny_llm(tiny_checkpoint, mesh="2x1", kv_transfer_config=config) as llm:
        yield llm
        assert_idle(llm)


def cached(llm: LLM) -> list[int]:
    """How many tokens of each prompt are not computed, in all the time until their pages are saved."""
    outputs = [llm.generate([list(prompt)], GREEDY, use_tqdm=False)[0] for prompt in PROMPTS]
    for replica in llm.engine.replicas:
        assert replica.traffic is not None
        replica.traffic.wait_until_saved()
    return [output.num_cached_tokens for output in outputs]


def test_what_a_connector_keeps_is_forgotten_when_it_is_asked_for(llm: LLM, keeping: LLM) -> None:
    expected = greedy_tokens(llm, PROMPTS)
    size = keeping.config.page_size
    full = [(len(prompt) - 1) // size * size for prompt in PROMPTS]
    assert cached(keeping) == [0] * len(PROMPTS)
    assert keeping.reset_prefix_cache() is True
    assert cached(keeping) == full  # it comes back
    for _ in range(2):
        assert keeping.reset_prefix_cache(reset_connector=True) is True
        assert cached(keeping) == [0] * len(PROMPTS)
        keeping.reset_prefix_cache()
        assert cached(keeping) == full  # what was computed since is kept again
    assert greedy_tokens(keeping, PROMPTS) == expected


def test_pages_on_their_way_do_not_come_back(llm: LLM, keeping: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = max(PROMPTS, key=len)
    [expected] = greedy_tokens(llm, [prompt])
    cached(keeping)
    keeping.reset_prefix_cache()
    connector: Any = keeping.engine._connector
    load, coming = connector.load, list[tuple[Future[Sequence[Page]], Sequence[Page]]]()

    def slow(*args: Any) -> Future[Sequence[Page]]:
        coming.append((Future(), load(*args).result()))
        return coming[-1][0]

    monkeypatch.setattr(connector, "load", slow)
    submit(keeping, "loads", prompt, GREEDY)
    while not coming:
        keeping.engine.step()
    keeping.reset_prefix_cache(reset_connector=True)
    [(future, pages)] = coming
    assert pages
    future.set_result(pages)
    while keeping.engine.has_work:
        found = keeping.engine.step()
    assert found[0].num_cached_tokens == 0
    assert found[0].outputs[0].token_ids == expected


@pytest.mark.parametrize("num_steps", [1, 4, 9])
def test_running_requests_compute_everything_again_and_say_the_same(llm: LLM, num_steps: int) -> None:
    alone, moved = Reader(), Reader()
    for reader in (alone, moved):
        llm.reset_prefix_cache()
        submit_all(llm)
        submit(llm, "beams", PROMPTS[0], GREEDY, beam_search=BEAMS)
        for _ in range(num_steps):
            step(llm, reader)
        if reader is moved:
            before, running = llm.engine.stats().num_preemptions, llm.engine.stats().num_running
            llm.reset_prefix_cache(reset_running_requests=True)
            stats = llm.engine.stats()
            assert (stats.num_running, stats.num_preemptions) == (0, before + running) and running
            assert llm.engine.replicas[0].scheduler.cache.is_empty
        while llm.engine.has_work:
            step(llm, reader)
    assert len(alone.whole) >= len(REQUESTS)
    assert moved.whole == alone.whole and moved.scores == alone.scores
    assert_idle(llm)
