"""Every family through pages, scheduler and step: the greedy tokens are those of transformers, on every path."""

from collections.abc import Iterator

import pytest

from jaxvllm import LLM
from tests.engine.tiny import GREEDY, assert_idle, few_pages, greedy_tokens, tiny_llm
from tests.models.fixture import NAMES, Fixture

LONGEST_PAGES = 8  # of 90 prompt tokens and 24 new ones
# Variants of a family differ in RoPE alone, which tests/models checks at every position.
CASES = [pytest.param(name, marks=[pytest.mark.slow] if "-" in name else []) for name in NAMES]


@pytest.fixture(scope="module", params=CASES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fixture, LLM]]:
    fixture = Fixture.load(request.param)
    directory = fixture.write_checkpoint(tmp_path_factory.mktemp(fixture.name))
    with tiny_llm(directory, max_model_len=fixture.max_model_len) as llm:
        yield fixture, llm


def test_alone(family: tuple[Fixture, LLM]) -> None:
    fixture, llm = family
    llm.engine.replicas[0].scheduler.pool.reset_prefix_cache()
    for prompt, expected in zip(fixture.prompts, fixture.greedy, strict=True):
        assert greedy_tokens(llm, [prompt]) == [expected], f"prompt of {len(prompt)} tokens"
    assert_idle(llm)


def test_mixed_in_one_batch_and_chunked(family: tuple[Fixture, LLM]) -> None:
    fixture, llm = family
    assert llm.engine.replicas[0].scheduler.max_num_batched_tokens < max(map(len, fixture.prompts))  # several chunks
    llm.engine.replicas[0].scheduler.pool.reset_prefix_cache()
    before = llm.engine.stats()
    assert greedy_tokens(llm, fixture.prompts) == fixture.greedy
    after = llm.engine.stats()
    assert after.num_preemptions == before.num_preemptions
    # They did share steps: far fewer than one after the other would take.
    assert after.num_steps - before.num_steps < sum(map(len, fixture.greedy)) / 2
    assert_idle(llm)


def test_with_a_prefix_hit(family: tuple[Fixture, LLM]) -> None:
    fixture, llm = family
    llm.engine.replicas[0].scheduler.pool.reset_prefix_cache()
    greedy_tokens(llm, fixture.prompts)
    page_size = llm.config.page_size
    for prompt, expected in zip(fixture.prompts, fixture.greedy, strict=True):
        [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == expected
        # All full pages but the last token's, whose logits are needed.
        assert output.num_cached_tokens == (len(prompt) - 1) // page_size * page_size
    assert_idle(llm)


def test_preempted(family: tuple[Fixture, LLM]) -> None:
    fixture, llm = family
    before = llm.engine.stats().num_preemptions
    with few_pages(llm, LONGEST_PAGES + 2):
        assert greedy_tokens(llm, fixture.prompts) == fixture.greedy
        assert llm.engine.stats().num_preemptions > before
    assert_idle(llm)
