"""Replicas that share experts: the tokens of one device, whichever replica has work, and every expert held once."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxvllm import LLM, BeamSearchParams, EngineConfig, SamplingParams
from jaxvllm.core.step_plan import StepPlan
from jaxvllm.core.structured_outputs import StructuredOutputsParams
from jaxvllm.engine.resolved_config import ResolvedConfig
from jaxvllm.models import checkpoint
from jaxvllm.models.experts import ExpertsFfn, by_expert, replicas_of
from jaxvllm.models.families import model_spec
from tests.conftest import Compilations
from tests.engine.tiny import (
    GREEDY,
    assert_idle,
    few_pages,
    one_program,
    random_prompts,
    tiny_llm,
    write_tiny_checkpoint,
)
from tests.models.fixture import Fixture
from tests.quick import rare_programs

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
    """The tokens of all ways, those of a prompt that is scored, and of beams."""
    outputs = llm.generate(PROMPTS, WAYS, use_tqdm=False)
    tokens: list[Any] = [[one.token_ids for one in output.outputs] for output in outputs]
    scores = [list(of_token) for of_token in (outputs[4].prompt_logprobs or ())[1:] if of_token]
    searched = llm.beam_search(PROMPTS[:2], BeamSearchParams(2, 6))
    return [*tokens, [of_token[:5] for of_token in scores], *([one.tokens for one in of.sequences] for of in searched)]


OPTIONS: dict[str, Any] = {"max_logprobs": 30, "dtype": "float32"}


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[Any]:
    with one_program(), tiny_llm(directory, **OPTIONS) as llm:
        return answers(llm)


@pytest.fixture(
    scope="module",
    params=[pytest.param("2x1", marks=pytest.mark.slow), "2x2", pytest.param("2x4", marks=pytest.mark.slow)],
)
def llm(request: pytest.FixtureRequest, directory: Path) -> Iterator[LLM]:
    with rare_programs(on_demand=False):
        llm = tiny_llm(directory, mesh=request.param, **SHARED, **OPTIONS)
    with llm:
        yield llm
        assert_idle(llm)


def test_the_same_tokens_whoever_has_work(
    llm: LLM, expected: list[Any], compilations: Callable[[], AbstractContextManager[Compilations]]
) -> None:
    assert answers(llm) == expected
    assert all(replica.num_steps > 0 for replica in llm.engine.replicas)
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
    stats = llm.engine.stats()
    assert stats.num_preemptions > 0 and stats.num_prefix_hits > 0


def test_a_prompt_comes_while_the_other_replica_decodes(
    llm: LLM, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, tokens = llm.engine, dict[str, list[int]]()
    assert engine._lockstep is not None
    dispatch, under_way = engine._lockstep.dispatch, []

    def counted(plans: Sequence[StepPlan | None]) -> Any:
        under_way.append([replica._num_under_way for replica in engine.replicas])
        return dispatch(plans)

    with monkeypatch.context() as patch:
        patch.setattr(engine._lockstep, "dispatch", counted)
        engine.submit(engine.check("decodes", PROMPTS[7], WAYS[7]))
        while engine.has_work:
            if len(under_way) == 8:
                engine.submit(engine.check("comes", PROMPTS[0], WAYS[0]))
            tokens |= {output.request_id: output.outputs[0].token_ids for output in engine.step() if output.finished}
    assert tokens == {"decodes": expected[7][0], "comes": expected[0][0]}
    assert [1, 1] in under_way, "the host plans a step while the devices compute the one before it"
    assert len(under_way) < 50, "all replicas are in the same step"


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
    before = {name: np.array(values) for name, values in holder._state.items()}
    for kind, words in holder.unchanging.items():
        holder.make(kind(np.concatenate([words] * holder.num_replicas)))
    for name, values in holder._state.items():
        np.testing.assert_array_equal(np.asarray(values), before[name], err_msg=name)


def test_each_device_has_some_experts_and_no_other_has_them(llm: LLM) -> None:
    mesh = llm.config.mesh_shape
    for layer in llm.engine.weights["layers"]:
        for name, array in layer.items():
            for leaf in jax.tree.leaves(array):
                indices = [shard.index for shard in leaf.addressable_shards]
                parts = {str(index) for index in indices}
                if name in ("experts_gate_up", "experts_down"):
                    assert len(parts) == mesh.num_devices
                    assert {shard.data.shape[0] for shard in leaf.addressable_shards} == {8 // mesh.num_devices}
                else:
                    assert len(parts) in (1, mesh.model), f"replicas share {name}"


def test_weights_can_be_replaced(llm: LLM, expected: list[Any]) -> None:
    before = llm.engine.weights
    llm.update_weights(jax.tree.map(lambda x: x * 0.5, before))
    assert llm.generate([PROMPTS[7]], WAYS[7], use_tqdm=False)[0].outputs[0].token_ids != expected[7][0]
    llm.update_weights(before)
    assert answers(llm) == expected


@pytest.mark.parametrize(
    "mesh", [pytest.param("2x1", marks=pytest.mark.slow), "2x2", pytest.param("4x2", marks=pytest.mark.slow)]
)
def test_the_same_tokens_where_each_goes_only_to_its_experts(mesh: str, directory: Path, expected: list[Any]) -> None:
    options = SHARED | OPTIONS | {"all2all_backend": "deepep_low_latency"}
    with one_program(), tiny_llm(directory, mesh=mesh, **options) as llm:
        spec = ResolvedConfig.of(llm.config, checkpoint.read_config(directory), "cpu").spec
        assert any(layer.ffn.sends_apart for layer in spec.layers if isinstance(layer.ffn, ExpertsFfn))
        assert answers(llm) == expected
        [output] = llm.generate([PROMPTS[7]], WAYS[7], use_tqdm=False)
        assert [output.outputs[0].token_ids] == expected[7], "the other replicas have no tokens"
        assert_idle(llm)


def test_an_unknown_way_to_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="all2all_backend must be one of .* or None, not 'fast'"):
        EngineConfig(all2all_backend="fast")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": "2x2x1"},
        {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 2}'},
        {"kv_transfer_config": '{"kv_connector": "host"}'},
    ],
    ids=str,
)
def test_what_replicas_in_lockstep_cannot_do_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(
        NotImplementedError, match="replicas share experts .* is not supported there: leave it out, use"
    ):
        EngineConfig(**{"mesh": "2x2"} | SHARED | options)


def test_experts_that_come_late_are_shared_too():
    spec = model_spec(Fixture.load("longcat_flash").config)
    assert replicas_of(by_expert(spec, num_replicas=2)) == 2 and replicas_of(by_expert(spec)) == 1


def test_experts_that_cannot_be_divided_are_refused(directory: Path) -> None:
    with pytest.raises(ValueError, match="8 experts do not divide over 6 devices: use a mesh of fewer replicas, or"):
        LLM(str(directory), mesh="3x2", **SHARED)
