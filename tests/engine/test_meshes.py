"""The same tokens come out of every mesh, and several replicas behave as one engine."""

import itertools
import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxvllm import LLM, BeamSearchParams, EngineConfig, RequestOutput, SamplingParams
from jaxvllm.cli.generate import StepTimeline
from jaxvllm.core.sampling_params import MAX_LOGPROBS
from jaxvllm.engine import build
from jaxvllm.engine.replica import DEPTH, Replica
from jaxvllm.engine.resolved_config import ResolvedConfig
from jaxvllm.model_name import DEMO_MODEL
from jaxvllm.models import checkpoint
from jaxvllm.models.families import model_spec
from jaxvllm.models.spread import Spread
from jaxvllm.runtime.buckets import Bucket
from jaxvllm.runtime.state import state_bytes
from jaxvllm.runtime.step_program import StepCompiler
from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.chips import chip_named
from sharding.mesh import MeshShape
from sharding.placement import make_mesh, replica_meshes
from tests.engine.tiny import GREEDY, assert_idle, one_program, random_prompts, tiny_llm
from tests.jax_cache import same_programs_once
from tests.models.fixture import Fixture

SEEDED = SamplingParams(temperature=1.0, seed=5, max_tokens=10, ignore_eos=True)
# Every way to draw a token. Those without a seed get theirs in the order of submission, so no mesh may change them.
WAYS = (
    replace(GREEDY, max_tokens=10),
    replace(GREEDY, max_tokens=10, logprobs=3),
    SEEDED,
    replace(SEEDED, top_p=0.8),
    replace(SEEDED, top_k=7, logprobs=2),
    replace(SEEDED, min_p=0.1, n=2),
    replace(SEEDED, seed=None),
    replace(SEEDED, seed=None, n=2),
    replace(GREEDY, max_tokens=10, prompt_logprobs=3),
    replace(GREEDY, max_tokens=10, repetition_penalty=1.5, frequency_penalty=0.5),
    replace(SEEDED, presence_penalty=1.0, logit_bias={3: 2.0, 90: 3.0, 119: -100.0}),
    replace(SEEDED, allowed_token_ids=(5, 40, 80, 110), min_tokens=8, logprobs=2),
    replace(SEEDED, logprob_token_ids=(7, 100)),
    replace(GREEDY, max_tokens=4, prompt_logprobs=-1),
)
PROMPTS = random_prompts(len(WAYS), longest=30, seed=11, vocab_size=120)
# `programs_move` keeps the programs.
EXACT: dict[str, Any] = dict(dtype="float32", max_logprobs=-1, compilation_cache=None)


@pytest.fixture(scope="module", autouse=True)
def programs_move() -> Iterator[None]:
    """Or 8x1 would compile one program eight times, 35 seconds; it takes 5."""
    with same_programs_once():
        yield


@dataclass(frozen=True)
class Answer:
    """What one request came to."""

    token_ids: list[list[int]]
    logprobs: list[Any]  # of each completion, then the prompt's

    @classmethod
    def of(cls, output: RequestOutput) -> "Answer":
        scores = output.prompt_logprobs and output.prompt_logprobs[1:]
        return cls([one.token_ids for one in output.outputs], [*(one.logprobs for one in output.outputs), scores])


def answers(llm: LLM) -> list[Answer]:
    llm.engine.inputs._seeds.seed(0)  # as in a new engine
    llm.reset_prefix_cache()
    outputs = llm.generate(PROMPTS, WAYS, use_tqdm=False)
    searched = llm.beam_search(PROMPTS[:2], BeamSearchParams(3, 10))
    assert_idle(llm)
    found = [Answer([one.tokens for one in of_one.sequences], []) for of_one in searched]
    return [Answer.of(output) for output in outputs] + found


def assert_same(given: list[Answer], expected: list[Answer]) -> None:
    assert [one.token_ids for one in given] == [one.token_ids for one in expected]
    for one, other in zip(given, expected, strict=True):
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert (mine is None) == (theirs is None)
            for ranked, wanted in zip(mine or (), theirs or (), strict=True):
                assert ranked.keys() == wanted.keys()
                for token, logprob in ranked.items():
                    # Named tokens far down are so close to others that a rounding moves them by a place.
                    assert abs(logprob.rank - wanted[token].rank) <= (wanted[token].rank > MAX_LOGPROBS)
                    assert logprob.logprob == pytest.approx(wanted[token].logprob, abs=1e-4)


# All meshes.


def write_checkpoint(directory: Path, ffn_size: int) -> Path:
    """The `llama` fixture, 7 query heads over 1 KV head, with another FFN."""
    small = Fixture.load("llama")
    old = small.config["intermediate_size"]
    shapes = {name: [ffn_size if size == old else size for size in shape] for name, shape in small.shapes.items()}
    config = small.config | {"intermediate_size": ffn_size}
    return replace(small, config=config, shapes=shapes).write_checkpoint(directory)


@pytest.fixture(scope="module")
def seven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its FFN divides by 8; its heads by nothing."""
    return write_checkpoint(tmp_path_factory.mktemp("seven"), ffn_size=112)


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> str:
    return "demo" if request.param == "demo" else str(request.getfixturevalue("seven"))


@pytest.fixture(scope="module")
def expected(model: str) -> list[Answer]:
    with one_program(), tiny_llm(model, **EXACT) as llm:
        return answers(llm)


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        pytest.param(model, mesh, marks=[] if (model, mesh) == ("seven", "1x2") else pytest.mark.slow)
        for model in ("seven", "demo")
        for mesh in (
            # That there are several replicas is the same for any model, and 2x2x2 has two of several devices. Eight
            # devices have four copies of each of the demo model's two KV heads.
            ("1x2", "1x8", "8x1", "2x2x2") if model == "seven" else ("1x8",)
        )
    ],
    indirect=["model"],
    scope="module",  # or each test would have its own `expected`
)
def test_the_same_tokens_on_every_mesh(model: str, seven: Path, expected: list[Answer], mesh: str) -> None:
    # Two microbatches in stages. With the program for decoding alone for one model too: its rows are its tokens.
    programs, tokens = (one_program(32), 32) if mesh.count("x") == 2 else (one_program(), 16)
    with (
        nullcontext() if (model, mesh) == (str(seven), "1x2") else programs,
        tiny_llm(model, mesh=mesh, max_num_batched_tokens=tokens, **EXACT) as llm,
    ):
        assert_same(answers(llm), expected)
        assert sum(replica.num_steps > 0 for replica in llm.engine.replicas) == llm.config.mesh_shape.data


def test_a_model_that_cannot_be_spread(tmp_path: Path) -> None:
    """Found before a weight is read: there is none."""
    (tmp_path / "config.json").write_text(json.dumps(Fixture.load("llama").config))
    with pytest.raises(
        ValueError, match="an FFN of size 116 does not divide over 8 devices: use a mesh of 1x1, 1x2, 1x4"
    ):
        tiny_llm(tmp_path, mesh="1x8")


def test_more_devices_than_there_are() -> None:
    with pytest.raises(ValueError, match="mesh 3x3 needs 9 devices and there are 8: .*JAX_NUM_CPU_DEVICES=9"):
        LLM("/no/such/model", mesh="3x3")


def test_heads_that_do_not_divide_are_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "jaxvllm")
    spec = model_spec(Fixture.load("llama").config, None)
    build._log_costs(Spread(spec, 1))
    assert not caplog.messages
    build._log_costs(Spread(spec, 4))
    assert caplog.messages == [
        "KV heads: 1 over 4 devices, so there are 4 copies of each, and pages take 4 times the memory",
        "query heads: 7 over 4 devices, so they take the time and memory of 8",
    ]


def test_large_groups_of_heads_are_told_where_kernels_do_not_take_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "jaxvllm")
    config = {"architectures": ["FalconForCausalLM"], "vocab_size": 1024, "num_hidden_layers": 2}
    falcon, llama = (model_spec(of, None) for of in (config, Fixture.load("llama").config))
    gpus = [Backend("gpu", chip_named(name)) for name in ("t4", "l4", "h200")]
    # Two devices have a copy of the KV head each, and 36 query heads.
    for spread, backends in (
        (Spread(falcon), (REFERENCE, Backend("tpu", chip_named("v6e")))),
        (Spread(falcon, 2), gpus),
        (Spread(llama), gpus),
    ):
        for backend in backends:
            build._log_large_groups(spread, backend)
    assert not caplog.messages
    for backend in gpus:
        build._log_large_groups(Spread(falcon), backend)
    # An engine says so before it reads a weight, and here is none.
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="has neither model.safetensors nor"):
        tiny_llm(tmp_path, attention_backend="interpret-gpu", dtype="float16")
    told = [message for message in caplog.messages if message.startswith("query heads")]
    assert told == ["query heads: 71 share a KV head, more than the gpu kernels take: plain XLA attends"] * 4


@pytest.mark.parametrize(
    ("mesh", "pages"),
    [
        ("1x1", 100),  # beside the state of the slots, which every device has whole
        ("1x2", 100),  # half the room a device, and half of each page
        ("1x8", 25),  # four copies of each of the two KV heads
        ("4x1", 25),  # for each replica
        ("2x4", 25),  # four devices share half the room, and two copies
    ],
)
def test_virtual_devices_share_the_memory_of_their_host(monkeypatch: pytest.MonkeyPatch, mesh: str, pages: int) -> None:
    config = EngineConfig(mesh=mesh)
    resolved = ResolvedConfig.of(config, checkpoint.read_config(DEMO_MODEL), "cpu")
    spec = resolved.spec
    attention = spec.layers[0].attention
    page_bytes = resolved.dtype.itemsize * 16 * spec.num_layers * attention.num_kv_heads * 2 * attention.head_size
    fullest = jax.devices()[0]
    meshes = replica_meshes(make_mesh(MeshShape.parse(mesh), jax.devices()))
    smallest = resolved.cache_shape(num_pages=2)
    state = state_bytes(smallest.sizes(spec)) * sum(one.size for one in meshes)
    monkeypatch.setattr(build, "free_bytes", lambda device, _: (100 if device == fullest else 200) * page_bytes + state)
    assert build._num_pages(config, spec, smallest, {}, Bucket(16, 8), Backend(), meshes, StepCompiler) == pages


# Two replicas.


@pytest.fixture(scope="module")
def shared_two(seven: Path) -> Iterator[LLM]:
    with one_program(), tiny_llm(seven, mesh="2x1", **EXACT) as llm:
        yield llm


@pytest.fixture
def two(shared_two: LLM) -> Iterator[LLM]:
    shared_two.engine._reset()  # the first replica gets the first request again
    yield shared_two
    assert_idle(shared_two)


@pytest.mark.parametrize("model", ["seven"], indirect=True, scope="module")
def test_the_same_tokens_from_two_replicas(two: LLM, expected: list[Answer]) -> None:
    assert_same(answers(two), expected)


def submit(llm: LLM, **params: SamplingParams) -> None:
    for name, one in params.items():
        llm.engine.submit(llm.engine.check(name, PROMPTS[0], one))


def running(llm: LLM) -> list[list[str]]:
    """The ids of each replica's running requests."""
    return [[request.request_id for _, request in one.scheduler.running()] for one in llm.engine.replicas]


def test_completions_of_one_request_share_a_replica(two: LLM) -> None:
    submit(two, three=replace(SEEDED, n=3), one=GREEDY, other=GREEDY)
    while two.engine.stats().num_waiting:
        two.engine.step()
    assert running(two) == [["three#0", "three#1", "three#2"], ["one", "other"]]
    stats = two.engine.stats()
    assert (stats.num_running, stats.num_pages) == (5, 2 * 64)
    assert stats.num_pages_owned == sum(one.scheduler.cache.pool.num_owned for one in two.engine.replicas)
    assert [len(two.pages(replica).requests) for replica in (0, 1)] == [3, 2]
    with pytest.raises(ValueError, match="replica 2 is not one of the 2 of mesh 2x1"):
        two.pages(2)
    with pytest.raises(ValueError, match="request id 'one' is in use"):
        submit(two, one=GREEDY)
    for name in ("three", "one", "other"):
        output = two.engine.abort(name)
        assert output is not None and {completion.finish_reason for completion in output.outputs} == {"abort"}
    while two.engine.has_work:
        assert two.engine.step() == []


def test_a_prompt_comes_back_to_the_replica_that_knows_it(two: LLM) -> None:
    long = [list(range(2, 60)), list(range(60, 118))]
    cached = [
        [two.generate([prompt], GREEDY, use_tqdm=False)[0].num_cached_tokens for prompt in prompts]
        for prompts in (long, long, long[::-1])  # the last time it is the other one's turn
    ]
    assert cached == [[0, 0], [48, 48], [48, 48]]
    assert [one.scheduler.cache.pool.num_owned for one in two.engine.replicas] == [0, 0]


@pytest.mark.parametrize("where", ["collect", "dispatch"])
def test_what_breaks_one_replica_off_resets_all(two: LLM, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    expected = [Answer.of(output) for output in two.generate(PROMPTS, SEEDED, use_tqdm=False)]
    runner = two.engine.replicas[1].runner
    call, uses = getattr(runner, where), itertools.count(1)

    def broken(*args: Any) -> Any:
        if next(uses) == 4:
            raise KeyboardInterrupt
        return call(*args)

    with monkeypatch.context() as patch:
        patch.setattr(runner, where, broken)
        with pytest.raises(KeyboardInterrupt):
            two.generate(PROMPTS, SEEDED, use_tqdm=False)
    assert_idle(two)
    assert [len(one.scheduler.cache.pool._cached) for one in two.engine.replicas] == [0, 0]
    assert [Answer.of(output) for output in two.generate(PROMPTS, SEEDED, use_tqdm=False)] == expected


def test_no_replica_waits_for_another(two: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first replica's device is stuck: the second one's request is answered."""
    stuck, free = two.engine.replicas
    submit(two, stuck=GREEDY, free=GREEDY)
    with monkeypatch.context() as patch:
        is_ready = Replica.is_ready.fget
        patch.setattr(Replica, "is_ready", property(lambda self: self is not stuck and is_ready(self)))
        steps = stuck.num_steps
        finished: list[str] = []
        while not finished:
            finished += [output.request_id for output in two.engine.step() if output.finished]
        assert finished == ["free"]
        assert stuck.num_steps - steps == DEPTH
    while two.engine.has_work:
        finished += [output.request_id for output in two.engine.step() if output.finished]
    assert finished == ["free", "stuck"]


def test_the_batch_is_drawn_with_the_requests_of_all_replicas(two: LLM) -> None:
    timeline = StepTimeline(two.engine)
    submit(two, **{str(i): replace(GREEDY, max_tokens=6) for i in range(3)})
    while two.engine.has_work:
        two.engine.step()
        timeline.record()
    lines = timeline.draw(["first", "second", "third"]).splitlines()
    assert [line.count("#") >= 5 for line in lines[1:4]] == [True] * 3
    assert "3" in lines[-1], "all three ran at once"
