"""Layers divided among stages: the tokens are those of an engine whose devices have all layers, on every path."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from jaxvllm import LLM, EngineConfig, SamplingParams
from jaxvllm.core.page_groups import windowed_pages
from jaxvllm.engine.exported_request import ExportedRequest
from jaxvllm.models import families
from jaxvllm.models.families.family import Family
from jaxvllm.models.families.llama import llama_spec
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.spec import ModelSpec
from tests.engine.test_speculation import OPTIONS, PROMPTS
from tests.engine.tiny import (
    GREEDY,
    all_drafts_or_none,
    assert_idle,
    choose_drafts,
    few_pages,
    greedy_tokens,
    one_program,
    random_prompts,
    tiny_llm,
)
from tests.models import test_layers_that_differ as toy
from tests.models.fixture import Fixture
from tests.models.seeded_weights import seeded_weights

# Steps with prompts are cut into two microbatches, and so are decode steps: see `Pipeline.num_microbatches`.
SIZES: dict[str, Any] = dict(
    max_num_seqs=16, row_buckets=(16,), max_num_batched_tokens=64, token_buckets=(64,), num_pages=129, dtype="float32"
)
# Of four layers of which every other has a window; of four alike; of three, so that a layer of zeros fills up a stage.
QUICK = ("gemma2", "2x1x2")
UNEVEN = ("llama", "2x1x4")
STATES = ("lfm2", "2x1x1")  # two and attention, and then one and attention
SHARED = ("gemma4", "2x1x1")  # one layer, and then all that others read, and those that read
CASES = [QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in (("qwen3", "4x1x1"), UNEVEN))]


def engine(directory: Path, mesh: str, **options: Any) -> LLM:
    return tiny_llm(directory, **SIZES | {"mesh": mesh} | options)


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def staged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fixture, LLM]]:
    name, mesh = request.param
    fixture = Fixture.load(name)
    directory = fixture.write_checkpoint(tmp_path_factory.mktemp(name))
    with engine(directory, mesh, max_model_len=fixture.max_model_len, warm_up="background") as llm:
        yield fixture, llm


def test_the_tokens_are_those_of_transformers(staged: tuple[Fixture, LLM]) -> None:
    fixture, llm = staged
    assert llm.engine.replicas[0].scheduler.max_num_batched_tokens < max(map(len, fixture.prompts))  # several chunks
    assert greedy_tokens(llm, fixture.prompts) == fixture.greedy
    # After a cached prefix, and alone.
    for prompt, expected in zip(fixture.prompts, fixture.greedy, strict=True):
        [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == expected
    assert_idle(llm)


def test_also_after_preemptions(staged: tuple[Fixture, LLM]) -> None:
    fixture, llm = staged
    before = llm.engine.stats().num_preemptions
    first = llm.engine.replicas[0].scheduler.cache.groups[0]
    longest = 8 if first.window is None else windowed_pages(first.window, 64, llm.config.page_size)
    prompts = fixture.prompts * 2
    with few_pages(llm, longest + 1):
        assert greedy_tokens(llm, prompts) == fixture.greedy * 2
    assert llm.engine.stats().num_preemptions > before
    assert_idle(llm)


# The other one has stages of one layer each, and is else as these.
@pytest.mark.parametrize(
    "case", [QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in (UNEVEN, STATES, SHARED))], ids="-".join
)
def test_pages_travel_between_engines_with_and_without_stages(case: tuple[str, str], tmp_path: Path) -> None:
    """By files that both engines share. Each computes some prompts, and finds the others'."""
    name, mesh = case
    fixture = Fixture.load(name)
    directory = fixture.write_checkpoint(tmp_path / name)
    extra = {"shared_storage_path": str(tmp_path / "pages")}
    kept = json.dumps({"kv_connector": "files", "kv_connector_extra_config": extra})
    options = {"max_model_len": fixture.max_model_len, "kv_transfer_config": kept, "warm_up": "background"}
    mine, others = slice(0, None, 2), slice(1, None, 2)
    # Pages that travel are those of prompts. The program of bursts writes to pages in the tests above.
    with one_program(64, 16), ExitStack() as stack:
        staged, alone = (stack.enter_context(engine(directory, one, **options)) for one in (mesh, "1x1"))
        for llm, own in ((staged, mine), (alone, others)):
            assert greedy_tokens(llm, fixture.prompts[own]) == fixture.greedy[own]
            traffic = llm.engine.replicas[0].traffic
            assert traffic is not None
            traffic.wait_until_saved()
        for llm, given in ((staged, others), (alone, mine)):
            outputs = llm.generate(fixture.prompts[given], GREEDY, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == fixture.greedy[given]
            size = llm.config.page_size
            full = [(len(prompt) - 1) // size * size for prompt in fixture.prompts[given]]
            assert [output.num_cached_tokens for output in outputs] == full and any(full)
            assert_idle(llm)


@pytest.mark.slow
def test_a_running_request_moves_between_engines_with_and_without_stages(tmp_path: Path) -> None:
    name, mesh = UNEVEN
    fixture = Fixture.load(name)
    directory = fixture.write_checkpoint(tmp_path)
    options: dict[str, Any] = {"max_model_len": fixture.max_model_len, "warm_up": "background"}
    # Without bursts, or the request may have ended in six steps, where they take little time.
    with one_program(64, 16), ExitStack() as stack:
        alone, staged = (stack.enter_context(engine(directory, one, **options)) for one in ("1x1", mesh))
        for first, second in ((alone, staged), (staged, alone)):
            for llm in (first, second):
                llm.reset_prefix_cache()
            assert_moves(fixture, first, second)


def assert_moves(fixture: Fixture, first: LLM, second: LLM) -> None:
    """Asserts that a request goes on in the second engine, whose tokens are the expected ones."""
    prompt, expected = fixture.prompts[-1], fixture.greedy[-1]
    num_hits = second.engine.stats().num_prefix_hits
    first.engine.submit(first.engine.check("moves", prompt, GREEDY))
    for _ in range(6):
        first.engine.step()
    exported = ExportedRequest.from_bytes(first.engine.export_request("moves").to_bytes())
    assert exported.pages
    while first.engine.has_work:  # steps that were under way
        first.engine.step()
    second.engine.import_request(exported)
    while second.engine.has_work:
        outputs = second.engine.step()
    assert outputs[0].outputs[0].token_ids == expected
    # What came along was not computed again, but for the page of the last token.
    size, num_tokens = second.config.page_size, len(prompt) + len(exported.sequences[0].output_token_ids)
    num_found = second.engine.stats().num_prefix_hits - num_hits
    assert num_found == min((num_tokens - 1) // size * size, len(prompt)) > 0
    for llm in (first, second):
        assert_idle(llm)


def routed_spec(config: HfConfig) -> ModelSpec:
    """Experts in every layer."""
    spec = llama_spec(config)
    routed = toy.SoftlyRoutedFfn(
        spec.hidden_size, config.integer("num_experts"), config.integer("moe_intermediate_size")
    )
    return replace(spec, layers=tuple(replace(layer, ffn=routed) for layer in spec.layers))


FAMILY = Family("RoutedForCausalLM", routed_spec, layer_sources=toy.toy_sources, understood=("num_experts",))


@pytest.fixture
def routed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(families.MODULES, FAMILY.architecture, __name__)
    config = toy.CONFIG | {"architectures": ["RoutedForCausalLM"], "num_hidden_layers": 2, "first_k_dense_replace": 0}
    # The toy's layers 2 and 3, the first with experts, are 0 and 1 here.
    renamed = {
        name.replace(f"layers.{layer + 2}.", f"layers.{layer}."): shape
        for layer in range(2)
        for name, shape in toy.stored_shapes().items()
        if f"layers.{layer + 2}." in name or not name.startswith("model.layers.")
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(seeded_weights(renamed, 7, 0.0), tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.slow
def test_experts_in_stages(routed: Path) -> None:
    prompts = random_prompts(8, longest=40, seed=3, vocab_size=toy.V)
    found = []
    for mesh in ("1x1", "2x1x2"):
        with one_program(num_tokens=64, num_rows=16), engine(routed, mesh, max_model_len=64) as llm:
            found.append(greedy_tokens(llm, prompts, max_tokens=16))
    assert found[0] == found[1]


@pytest.mark.slow
def test_drafts_and_masks_in_stages(llm: LLM, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bursts, with every option of sampling that a draft must count in, and with a grammar."""
    # The clock of this machine does not decide whether there are drafts.
    choose_drafts(monkeypatch)
    params = [SamplingParams(**{"max_tokens": 23, "seed": 3, "ignore_eos": True} | options) for options in OPTIONS]
    prompts = [PROMPTS[-1 - index % 4] for index in range(len(params))]

    def answers(llm: LLM) -> list[list[tuple[list[int], str]]]:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [[(one.token_ids, one.text) for one in output.outputs] for output in outputs]

    expected = answers(llm)
    assert not llm.engine.stats().num_draft_tokens
    drafting = {"speculative_config": json.dumps({"method": "suffix", "num_speculative_tokens": 2})}
    with all_drafts_or_none(), engine(tiny_checkpoint, "2x1x1", **drafting) as staged:
        assert answers(staged) == expected
        assert 0 < staged.engine.stats().num_accepted_tokens < staged.engine.stats().num_draft_tokens
        with few_pages(staged, 14):
            assert answers(staged) == expected
        assert staged.engine.stats().num_preemptions > 0
        assert_idle(staged)


# What is refused before any weight is read.


def test_drafts_that_need_all_layers_together() -> None:
    options: dict[str, Any] = {"speculative_config": '{"method": "mtp"}'}
    message = "drafts of a model or head are not supported there: use the method ngram"
    with pytest.raises(NotImplementedError, match=f"mesh 2x1x2 divides the layers among stages, and {message}"):
        EngineConfig(mesh="2x1x2", **options)
    assert EngineConfig(mesh="1x2", **options)


def test_layers_that_no_stages_share(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(Fixture.load("llama").config))
    with pytest.raises(
        ValueError,
        match="3 layers cannot be divided among 4 stages so that each stage has some.* use a mesh of 1x1, 2x1x1$",
    ):
        tiny_llm(tmp_path, mesh="4x1x1")
