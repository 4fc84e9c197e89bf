"""Every family through pages, scheduler and step: the greedy tokens are those of transformers, on every path."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxvllm import LLM
from jaxvllm.core.page_groups import windowed_pages
from jaxvllm.models.families import model_spec
from tests.engine.tiny import GREEDY, assert_idle, few_pages, greedy_tokens, tiny_llm
from tests.jax_cache import same_programs_once
from tests.models.fixture import NAMES, Fixture
from tests.quick import quick_emitters, quick_engines

LONGEST_PAGES = 8  # of 90 prompt tokens and 24 new ones
# The layers and positions of these are those of other families here: of Llama, Gemma 2 and 4, Cohere 2, GPT-2, Phi-3,
# Qwen 2 with experts, Qwen 3.5, DeepSeek V3, GLM with its index, gpt-oss, LFM2, Mamba and Falcon-H1. tests/models
# checks all of them at every position.
ALIKE = frozenset(
    "olmo2 olmo3 cohere opt exaone4 seed_oss starcoder2 ernie4_5 gpt_neox glm4 granite smollm3 mistral ministral3 "
    "qwen2 qwen3 gemma3 phi3 qwen3_moe mixtral olmoe glm4_moe minimax_m2 ernie4_5_moe granitemoe qwen3_5_moe "
    "nemotron arcee phi phimoe dots1 hunyuan hunyuan_moe afmoe cohere2_moe exaone_moe hy_v3 gemma glm "
    "apertus stablelm solar_open flex_olmo olmo cwm internlm3 falcon gpt_bigcode laguna mellum mimo_v2 "
    "hyperclovax jais2 vaultgemma deepseek_v2 deepseek_v32 glm4_moe_lite bailing_hybrid longcat_flash step3p7 "
    "kimi_linear mistral4 youtu mpt gemma3n qwen3_next lfm2_moe bamba granitemoehybrid nemotron_h mamba2 "
    "falcon_mamba jamba".split()
)
# Variants of a family differ in RoPE and biases alone, which tests/models checks at every position. One is enough here:
# the one whose frequencies depend on the engine's `max_model_len`.
VARIANT = "phi3-longrope"
CASES = [
    *(name for name in NAMES if "-" not in name and name not in ALIKE),
    pytest.param(VARIANT, marks=pytest.mark.slow),
]


@pytest.fixture(autouse=True, scope="module")
def quick_programs() -> Iterator[None]:
    with quick_engines(have_states=True):
        yield


@pytest.fixture(scope="module", params=CASES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fixture, LLM]]:
    fixture = Fixture.load(request.param)
    directory = fixture.write_checkpoint(tmp_path_factory.mktemp(fixture.name))
    # Room for all prompts, in the pools of windowed groups too.
    kept = '{"kv_connector": "host"}'
    options = dict(max_model_len=fixture.max_model_len, num_pages=129, kv_transfer_config=kept)
    # What no test here waits for, such as the distributions of a row, is not compiled when the engine ends.
    options["warm_up"] = "background"
    emitters = quick_emitters(model_spec(fixture.config, fixture.max_model_len))
    with same_programs_once(), emitters, tiny_llm(directory, compilation_cache=None, **options) as llm:
        yield fixture, llm


def test_alone(family: tuple[Fixture, LLM]) -> None:
    fixture, llm = family
    llm.engine.replicas[0].scheduler.cache.reset_prefix_cache()
    for prompt, expected in zip(fixture.prompts, fixture.greedy, strict=True):
        assert greedy_tokens(llm, [prompt]) == [expected], f"prompt of {len(prompt)} tokens"
    assert_idle(llm)


def test_mixed_in_one_batch_and_chunked_and_then_found_again(family: tuple[Fixture, LLM]) -> None:
    """In the cache of prefixes, and after that is empty in the memory of the host."""
    fixture, llm = family
    [replica] = llm.engine.replicas
    assert replica.scheduler.max_num_batched_tokens < max(map(len, fixture.prompts))  # several chunks
    llm.reset_prefix_cache(reset_connector=True)
    before = llm.engine.stats()
    assert greedy_tokens(llm, fixture.prompts) == fixture.greedy
    after = llm.engine.stats()
    assert after.num_preemptions == before.num_preemptions
    # They did share steps: far fewer than one after the other would take.
    assert after.num_steps - before.num_steps < sum(map(len, fixture.greedy)) / 2
    assert replica.traffic is not None
    replica.traffic.wait_until_saved()

    # All full pages but the last token's, whose logits are needed.
    full = [(len(prompt) - 1) // llm.config.page_size for prompt in fixture.prompts]
    for prompt, expected, count in zip(fixture.prompts, fixture.greedy, full, strict=True):
        [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == expected
        assert output.num_cached_tokens == count * llm.config.page_size

    replica.scheduler.cache.reset_prefix_cache()
    num_loaded = replica.scheduler.num_loaded_pages
    outputs = llm.generate([list(prompt) for prompt in fixture.prompts], GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == fixture.greedy
    assert [output.num_cached_tokens for output in outputs] == [count * llm.config.page_size for count in full]
    assert replica.scheduler.num_loaded_pages - num_loaded == sum(full)
    assert_idle(llm)


def test_exported_in_the_middle(family: tuple[Fixture, LLM]) -> None:
    """Requests leave the engine, which forgets their pages, and come back with them."""
    fixture, llm = family
    engine, [replica] = llm.engine, llm.engine.replicas
    replica.scheduler.cache.reset_prefix_cache()
    for number, prompt in enumerate(fixture.prompts):
        engine.submit(engine.check(str(number), list(prompt), GREEDY))
    outputs = []
    while not any(request.num_tokens > 70 for _, request in replica.scheduler.running()):
        outputs += engine.step()
    outputs += [output for _ in range(2) for output in engine.step()]
    away = [engine.export_request(name) for name in list(engine.outputs._live)]
    assert any(one.pages for one in away)
    while engine.has_work:
        engine.step()
    replica.scheduler.cache.reset_prefix_cache()
    for one in away:
        engine.import_request(one)
        state = one.sequences[0]
        num_tokens = len(one.request.prompt.token_ids) + len(state.output_token_ids)
        assert len(one.pages) <= num_tokens // llm.config.page_size
    while engine.has_work:
        outputs += engine.step()
    ends = {output.request_id: output.outputs[0].token_ids for output in outputs if output.finished}
    assert [ends[str(number)] for number in range(len(fixture.prompts))] == fixture.greedy
    assert_idle(llm)


def test_a_window_bounds_the_pages_of_a_request(family: tuple[Fixture, LLM]) -> None:
    fixture, llm = family
    engine, longest = llm.engine, max(fixture.prompts, key=len)
    cache, budget = engine.replicas[0].scheduler.cache, engine.replicas[0].scheduler.max_num_batched_tokens
    cache.reset_prefix_cache()
    engine.submit(engine.check("long", longest, GREEDY))
    most = dict.fromkeys(cache.groups, 0)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
        for group in most:
            most[group] = max(most[group], int((group.end - group.first).max()))
    assert outputs[-1].outputs[0].token_ids == fixture.greedy[fixture.prompts.index(longest)]
    every = -(-(len(longest) + 23) // cache.page_size)
    for group, held in most.items():
        assert held == every if group.window is None else held <= windowed_pages(group.window, budget, cache.page_size)
        assert group.window is None or held < every
    # It begins where the first one ended, with only a window of pages in some groups.
    [again] = llm.generate([[*longest, *outputs[-1].outputs[0].token_ids[:8]]], GREEDY, use_tqdm=False)
    if cache.has_states:  # there is a snapshot where the prompt ended, and those that the request held at its end
        assert again.num_cached_tokens in (80, 96)
    else:
        assert again.num_cached_tokens == (len(longest) + 7) // cache.page_size * cache.page_size
    assert again.outputs[0].token_ids[:16] == outputs[-1].outputs[0].token_ids[8:]
    assert_idle(llm)


def test_preempted(family: tuple[Fixture, LLM]) -> None:
    fixture, llm = family
    before = llm.engine.stats().num_preemptions
    with few_pages(llm, LONGEST_PAGES + 2):
        assert greedy_tokens(llm, fixture.prompts) == fixture.greedy
        assert llm.engine.stats().num_preemptions > before
    assert_idle(llm)


@pytest.mark.slow
def test_two_sizes_of_heads_where_no_request_outgrows_a_window(tmp_path: Path) -> None:
    """Then two groups of pages grow, and neither slides."""
    fixture = Fixture.load("gemma4-keys")
    directory = fixture.write_checkpoint(tmp_path)
    with tiny_llm(directory, max_model_len=32, compilation_cache=None, warm_up="background") as llm:
        prompts = [prompt for prompt in fixture.prompts if len(prompt) + len(fixture.greedy[0]) <= 32]
        assert len(prompts) == 3
        for _ in range(2):  # the second time with cached prefixes
            assert greedy_tokens(llm, prompts) == fixture.greedy[:3]
        assert_idle(llm)
