"""Replicas that share experts: the tokens of one device, whichever replica has work, and every expert held once."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest

from jaxvllm import LLM, BeamSearchParams, EngineConfig, SamplingParams
from jaxvllm.core.speculative_config import DEFAULT_SPECULATION
from jaxvllm.core.step_plan import StepPlan
from jaxvllm.core.structured_outputs import StructuredOutputsParams
from jaxvllm.engine.replica import Replica
from jaxvllm.engine.resolved_config import ResolvedConfig
from jaxvllm.engine.rounds import Rounds
from jaxvllm.models import checkpoint
from jaxvllm.models.expert_exchange import ExchangeChoice
from jaxvllm.models.experts import ExpertsFfn, by_expert, replicas_of
from jaxvllm.models.families import model_spec
from tests.conftest import Compilations
from tests.engine.tiny import (
    GREEDY,
    all_drafts_or_none,
    assert_idle,
    choose_drafts,
    few_pages,
    one_program,
    random_prompts,
    tiny_llm,
    write_tiny_checkpoint,
)
from tests.models.fixture import Fixture
from tests.quick import programs_in_advance

SHARED: dict[str, Any] = {"enable_expert_parallel": True}
SEEDED = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
# Each needs something else of a step: masks, readouts, rare parameters, more than one row.
WAYS = (
    replace(GREEDY, max_tokens=12),
    SEEDED,
    replace(
        GREEDY, max_tokens=12, structured_outputs=StructuredOutputsParams(regex="[a-z]{3,9} (und|oder) [a-z]{3,9}")
    ),
    replace(SEEDED, n=2, top_k=9, logprobs=2),
    replace(GREEDY, max_tokens=6, prompt_logprobs=30),
    replace(SEEDED, repetition_penalty=1.4, logit_bias=((3, 2.0), (90, 3.0))),
    replace(SEEDED, structured_outputs=StructuredOutputsParams(choice=("yes", "no", "I would not know what to say"))),
    replace(GREEDY, max_tokens=20),
)
PROMPTS = random_prompts(len(WAYS), longest=60, seed=4)
LOOPS = [[3, 4, 5, 6] * 5, [9, 8] * 9, [7] * 12, [30, 40, 50] * 4]


def with_eight_experts(small: Fixture) -> Fixture:
    """The fixture with two more experts, which have weights of their own."""
    shapes = dict(small.shapes)
    for name, shape in small.shapes.items():
        if ".experts.5." in name:
            shapes |= {name.replace(".experts.5.", f".experts.{number}."): shape for number in (6, 7)}
        elif name.endswith("mlp.gate.weight"):
            shapes[name] = [8, *shape[1:]]
    return replace(small, config=small.config | {"num_experts": 8}, shapes=shapes)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fixture = with_eight_experts(Fixture.load("qwen2_moe"))
    return write_tiny_checkpoint(tmp_path_factory.mktemp("eight"), fixture)


def answers(llm: LLM) -> list[Any]:
    """The tokens of all ways, those of a prompt that is scored, of beams, and after prompts that repeat themselves."""
    outputs = llm.generate(PROMPTS, WAYS, use_tqdm=False)
    tokens: list[Any] = [[one.token_ids for one in output.outputs] for output in outputs]
    scores = [list(of_token) for of_token in (outputs[4].prompt_logprobs or ())[1:] if of_token]
    searched = llm.beam_search(PROMPTS[:2], BeamSearchParams(2, 6))
    beams = [[one.tokens for one in of.sequences] for of in searched]
    looping = llm.generate(LOOPS, replace(GREEDY, max_tokens=28), use_tqdm=False)
    return [*tokens, [of_token[:5] for of_token in scores], *beams, *(one.outputs[0].token_ids for one in looping)]


# One token that comes again is enough, so that there are drafts although the model is random.
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 3}
OPTIONS: dict[str, Any] = {"max_logprobs": 30, "dtype": "float32"}


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[Any]:
    with one_program(), tiny_llm(directory, **OPTIONS) as llm:
        return answers(llm)


@pytest.fixture(
    scope="module",
    params=["2x2", pytest.param("2x2x1", marks=pytest.mark.slow)],
)
def llm(request: pytest.FixtureRequest, directory: Path) -> Iterator[LLM]:
    drafts = SUFFIX if request.param == "2x2x1" else NGRAM
    with programs_in_advance(), all_drafts_or_none():
        llm = tiny_llm(directory, mesh=request.param, speculative_config=drafts, **SHARED, **OPTIONS)
    with llm:
        yield llm
        assert_idle(llm)
        [holder] = llm.engine.holders
        assert holder._forwarded is None, "nothing is held between steps"


# For what the host decides, which knows nothing of stages.
WITHOUT_STAGES = pytest.mark.parametrize("llm", ["2x2"], indirect=True)


@pytest.mark.parametrize("most", [0, 3], ids=["plain", "drafts"])
def test_the_same_tokens_whoever_has_work(
    llm: LLM,
    expected: list[Any],
    compilations: Callable[[], AbstractContextManager[Compilations]],
    monkeypatch: pytest.MonkeyPatch,
    most: int,
) -> None:
    choose_drafts(monkeypatch, lambda possible: most)
    engine = llm.engine
    for replica in engine.replicas:
        replica.num_drafted[:] = replica.num_accepted[:] = 0
    llm.reset_prefix_cache()
    before = engine.stats()
    assert answers(llm) == expected
    assert all(replica.num_steps > 0 for replica in engine.replicas)
    llm.wait_until_compiled()  # what a step in two halves needs is compiled when the first one comes
    with compilations() as seen:
        assert answers(llm) == expected, "prefixes are found again"
        with few_pages(llm, 7):  # of the first replica
            assert answers(llm) == expected
        llm.reset_prefix_cache()
        for number in (0, 7):  # and the other replica has no tokens
            [output] = llm.generate([PROMPTS[number]], WAYS[number], use_tqdm=False)
            assert [output.outputs[0].token_ids] == expected[number]
    assert seen.count == 0, seen.names
    for replica in engine.replicas:
        assert (replica.num_drafted.min() > 0) == (replica.num_accepted[0] > 0) == (most > 0), "in every replica"
    stats = engine.stats()
    assert stats.num_preemptions > before.num_preemptions and stats.num_prefix_hits > before.num_prefix_hits


@WITHOUT_STAGES
def test_a_prompt_comes_while_the_other_replica_decodes(
    llm: LLM, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, tokens = llm.engine, dict[str, list[int]]()
    assert isinstance(engine._steps, Rounds)
    lockstep = engine._steps._lockstep
    dispatch, under_way = lockstep.dispatch, []
    before = [(replica.num_bucket_tokens, replica.num_bucket_rows) for replica in engine.replicas]

    def counted(plans: Sequence[StepPlan | None]) -> Any:
        under_way.append([replica._num_under_way for replica in engine.replicas])
        return dispatch(plans)

    with monkeypatch.context() as patch:
        choose_drafts(patch, lambda possible: 0)  # or the first request may be over before the other one comes
        patch.setattr(lockstep, "dispatch", counted)
        patch.setattr(Replica, "is_ready", property(lambda self: 1 / 0))  # nobody asks again and again
        engine.submit(engine.check("decodes", PROMPTS[7], WAYS[7]))
        while engine.has_work:
            if len(under_way) == 8:
                engine.submit(engine.check("comes", PROMPTS[0], WAYS[0]))
            tokens |= {output.request_id: output.outputs[0].token_ids for output in engine.step() if output.finished}
    assert tokens == {"decodes": expected[7][0], "comes": expected[0][0]}
    assert [1, 1] in under_way, "the host plans a step while the devices compute the one before it"
    assert len(under_way) < 50, "all replicas are in the same step"
    after = [(replica.num_bucket_tokens, replica.num_bucket_rows) for replica in engine.replicas]
    assert len({tuple(np.subtract(*pair)) for pair in zip(after, before, strict=True)}) == 1, "padding counts, too"


def test_a_model_drafts_for_itself_and_is_always_right(
    directory: Path, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after cached prefixes, steps without drafts or with fewer, and preemptions of one replica."""
    numbers = cycle([0, 3, 3, 0, 3])
    choose_drafts(monkeypatch, lambda possible: next(numbers))
    config = {"method": "draft_model", "model": str(directory), "num_speculative_tokens": 3}
    params = replace(GREEDY, max_tokens=28)
    with all_drafts_or_none(), tiny_llm(directory, mesh="2x2", speculative_config=config, **SHARED, **OPTIONS) as llm:
        for count in (4, 14):
            before = llm.engine.stats()
            with few_pages(llm, count):
                looping = llm.generate([*LOOPS, PROMPTS[7]], [params] * 4 + [WAYS[7]], use_tqdm=False)
                assert [one.outputs[0].token_ids for one in looping] == [*expected[-4:], expected[7][0]]
                after = llm.engine.stats()
                assert (after.num_preemptions > before.num_preemptions) == (count == 4)
        [holder] = llm.engine.holders
        for pages in holder._kv_pages:  # those of the draft model come last
            assert {shard.data.shape[1] for shard in pages.addressable_shards} == {65}, "each replica has its own"
        for replica in llm.engine.replicas:
            assert (replica.num_accepted == replica.num_drafted).all() and replica.num_drafted.min() > 20
        assert_idle(llm)


def test_pages_are_kept_elsewhere_and_requests_move(directory: Path, expected: list[Any]) -> None:
    """From replica to replica through the memory of the host, and to an engine of one device and back."""
    options = dict(speculative_config=NGRAM, **OPTIONS)
    kept = dict(mesh="2x2", kv_transfer_config='{"kv_connector": "host"}', **SHARED)
    chosen = [0, 1, 7]
    prompts, ways = [PROMPTS[number] for number in chosen], [WAYS[number] for number in chosen]
    with ExitStack() as stack:
        with all_drafts_or_none(bursts=False):
            llm = stack.enter_context(tiny_llm(directory, **kept, **options))
        with one_program():
            alone = stack.enter_context(tiny_llm(directory, **options))

        def tokens() -> list[list[int]]:
            return [one.outputs[0].token_ids for one in llm.generate(prompts, ways, use_tqdm=False)]

        assert tokens() == [expected[number][0] for number in chosen]
        schedulers = [replica.scheduler for replica in llm.engine.replicas]
        assert not any(scheduler.num_loaded_pages for scheduler in schedulers)
        for replica in llm.engine.replicas:
            assert replica.traffic is not None
            replica.traffic.wait_until_saved()
        llm.reset_prefix_cache()
        prompts, ways = prompts[::-1], ways[::-1]  # each comes to the other replica
        assert tokens() == [expected[number][0] for number in reversed(chosen)]
        assert all(scheduler.num_loaded_pages for scheduler in schedulers)

        engines, found = cycle((alone.engine, llm.engine)), dict[str, list[int]]()
        here = llm.engine
        for number, prompt, way in zip(reversed(chosen), prompts, ways, strict=True):
            here.submit(here.check(str(number), prompt, way))
        for there in (next(engines) for _ in range(4)):
            for _ in range(4):
                found |= {one.request_id: one.outputs[0].token_ids for one in here.step() if one.finished}
            for number in chosen:
                if str(number) not in found:
                    there.import_request(here.export_request(str(number)))
            here = there
        while here.has_work or alone.engine.has_work:  # a step of it is under way
            outputs = [*here.step(), *alone.engine.step()]
            found |= {one.request_id: one.outputs[0].token_ids for one in outputs if one.finished}
        assert found == {str(number): expected[number][0] for number in chosen}
        assert alone.engine.stats().num_prefix_hits > 0, "pages go along"
        assert_idle(llm)
        assert_idle(alone)


@WITHOUT_STAGES
def test_what_breaks_off_resets_all(llm: LLM, expected: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.replicas[1].runner, "collect", lambda step: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate(PROMPTS[:2], WAYS[:2], use_tqdm=False)
    assert_idle(llm)
    assert answers(llm) == expected


def test_what_is_for_one_replica_changes_nothing_in_the_others(llm: LLM) -> None:
    llm.generate(PROMPTS, WAYS, use_tqdm=False)  # slots keep what they had
    [holder] = llm.engine.holders
    before = jax.tree.map(np.array, holder._state)
    for kind, words in holder.unchanging.items():
        holder.make(kind(np.concatenate([words] * holder.num_replicas)))
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, holder._state), before)


def test_each_device_has_some_experts_and_no_other_has_them(llm: LLM) -> None:
    mesh = llm.config.mesh_shape
    for path, array in jax.tree.leaves_with_path(llm.engine.weights["layers"]):
        name = jax.tree_util.keystr(path)
        parts = {str(shard.index) for shard in array.addressable_shards}
        if any(experts in name for experts in ("experts_gate_up", "experts_down")):
            assert len(parts) == mesh.num_devices
            of_experts = -4 if "gate_up" in name else -3  # before it is the layer, where there are stages
            held = {shard.data.shape[of_experts] for shard in array.addressable_shards}
            assert held == {8 * mesh.stages // mesh.num_devices}
        else:
            assert len(parts) in (mesh.stages, mesh.stages * mesh.model), f"replicas share {name}"


@WITHOUT_STAGES
def test_weights_can_be_replaced(llm: LLM, expected: list[Any]) -> None:
    before = llm.engine.weights
    llm.update_weights(jax.tree.map(lambda x: x * 0.5, before))
    assert llm.generate([PROMPTS[7]], WAYS[7], use_tqdm=False)[0].outputs[0].token_ids != expected[7][0]
    llm.update_weights(before)
    assert answers(llm) == expected


def test_the_same_tokens_where_each_goes_only_to_its_experts(directory: Path, expected: list[Any]) -> None:
    """`tests/models/test_expert_exchange.py` has 2x1 and 4x2 as well."""
    options = SHARED | OPTIONS | {"all2all_backend": "deepep_low_latency"}
    with one_program(), tiny_llm(directory, mesh="2x2", **options) as llm:
        spec = ResolvedConfig.of(llm.config, checkpoint.read_config(directory), "cpu").spec
        assert any(layer.ffn.sends_apart for layer in spec.layers if isinstance(layer.ffn, ExpertsFfn))
        assert answers(llm) == expected
        [output] = llm.generate([PROMPTS[7]], WAYS[7], use_tqdm=False)
        assert [output.outputs[0].token_ids] == expected[7], "the other replicas have no tokens"
        assert_idle(llm)


def test_an_unknown_way_to_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="all2all_backend must be one of .* or None, not 'fast'"):
        EngineConfig(all2all_backend="fast")  # type: ignore[arg-type]


def test_they_speculate_by_default_as_others_do() -> None:
    assert EngineConfig(mesh="2x2", **SHARED).drafting == DEFAULT_SPECULATION


def test_a_draft_head_has_all_experts_on_every_device():
    spec = model_spec(Fixture.load("mixtral").config)
    apart = by_expert(spec, num_replicas=2, exchange=ExchangeChoice("cpu", 1, all_to_all=True))
    for layer, before in zip(apart.layers, spec.layers, strict=True):
        assert layer.ffn.sends_apart and layer.ffn.whole() == before.ffn


def test_experts_that_come_late_are_shared_too():
    spec = model_spec(Fixture.load("longcat_flash").config)
    assert replicas_of(by_expert(spec, num_replicas=2)) == 2 and replicas_of(by_expert(spec)) == 1


def test_experts_that_cannot_be_divided_are_refused(directory: Path) -> None:
    with pytest.raises(ValueError, match="8 experts do not divide over 6 devices: use a mesh of fewer replicas, or"):
        LLM(str(directory), mesh="3x2", **SHARED)
