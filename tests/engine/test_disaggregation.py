"""A prompt that one engine computes and another goes on from yields the tokens of one engine, and no page is lost."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxvllm import LLM, RequestOutput, SamplingParams
from jaxvllm.core.errors import ParameterError
from jaxvllm.kv_transfer.peer_connector import PeerConnector
from tests.engine.tiny import GREEDY, all_drafts_or_none, assert_idle, one_program, random_prompts, tiny_llm
from tests.waiting import wait_until

PEER: dict[str, Any] = {
    "kv_connector": "peer",
    # A peer that lives answers in time, however slow the machine is: a test with a dead peer waits for less.
    "kv_connector_extra_config": {"secret": "the secret of this test", "silence_seconds": 60.0},
}
PROMPTS = random_prompts(12, longest=90, seed=3)
SEEDED = SamplingParams(temperature=1.0, seed=5, max_tokens=10, ignore_eos=True)
DECODE = {"do_remote_decode": True, "do_remote_prefill": False}


def peer(directory: Path, transport: str = "tcp", **options: Any) -> LLM:
    extra = PEER["kv_connector_extra_config"] | {"transport": transport}
    config = json.dumps(PEER | {"kv_connector_extra_config": extra})
    return tiny_llm(directory, kv_transfer_config=config, warm_up="background", **options)


def run(
    llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams, given: Sequence[Mapping[str, Any] | None]
) -> list[RequestOutput]:
    """Completes `prompts`, each with what another engine said of it."""
    engine, found = llm.engine, dict[str, RequestOutput]()
    for number, (prompt, of_prompt) in enumerate(zip(prompts, given, strict=True)):
        engine.submit(engine.check(str(number), list(prompt), params, kv_transfer_params=of_prompt))
    while engine.has_work:
        found |= {output.request_id: output for output in engine.step() if output.finished}
        for replica in engine.replicas:
            replica.scheduler.check_invariants()
    return [found[str(number)] for number in range(len(prompts))]


def tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def connector(llm: LLM) -> PeerConnector:
    assert llm.engine._connector is not None
    found = llm.engine._connector.inner
    assert isinstance(found, PeerConnector)
    return found


def computed(producer: LLM, prompts: Sequence[Sequence[int]]) -> list[Mapping[str, Any] | None]:
    first = run(producer, prompts, replace(GREEDY, max_tokens=1), [DECODE] * len(prompts))
    return [output.kv_transfer_params for output in first]


def full_pages(llm: LLM, prompts: Sequence[Sequence[int]]) -> list[int]:
    """Tokens of each prompt that need not be computed again."""
    size = llm.config.page_size
    return [(len(prompt) - 1) // size * size for prompt in prompts]


@pytest.fixture(scope="module", params=["1x1", pytest.param("1x2", marks=pytest.mark.slow)])
def producer(request: pytest.FixtureRequest, tiny_checkpoint: Path) -> Iterator[LLM]:
    with peer(tiny_checkpoint, mesh=request.param) as llm:
        yield llm
        assert_idle(llm)


@pytest.fixture(scope="module")
def consumer(producer: LLM, tiny_checkpoint: Path) -> Iterator[LLM]:
    # Pages travel whole, so that it matters to none of the two how many devices the other has: each mesh is here once.
    mesh = {"1x1": "2x1", "1x2": "1x1"}[producer.config.mesh]
    # Other chunks than the producer's.
    with one_program(24), peer(tiny_checkpoint, mesh=mesh, max_num_batched_tokens=24, token_buckets=(24,)) as llm:
        yield llm
        assert_idle(llm)


def test_what_a_consumer_has_is_not_held_for_it(producer: LLM, consumer: LLM) -> None:
    for _ in range(2):
        run(consumer, PROMPTS, GREEDY, computed(producer, PROMPTS))
    wait_until(lambda: not connector(producer).server._offers, lambda: "pages are still held")


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_tokens_are_those_of_one_engine(llm: LLM, producer: LLM, consumer: LLM, params: SamplingParams) -> None:
    expected = tokens(llm.generate([list(prompt) for prompt in PROMPTS], params, use_tqdm=False))
    for one in (producer, consumer):
        one.engine.reset_prefix_cache()
    given = computed(producer, PROMPTS)
    outputs = run(consumer, PROMPTS, params, given)
    assert tokens(outputs) == expected
    assert [output.num_cached_tokens for output in outputs] == full_pages(consumer, PROMPTS)
    wait_until(lambda: not connector(producer).server._offers, lambda: "pages are still held")


def test_a_prompt_that_was_cached_is_offered_whole(producer: LLM, consumer: LLM) -> None:
    """Its pages became full for an earlier request, and may have left the memory of pages since."""
    prompt = PROMPTS[max(range(len(PROMPTS)), key=lambda at: len(PROMPTS[at]))]
    for _ in range(2):
        consumer.engine.reset_prefix_cache()
        connector(producer)._memory.clear()
        [output] = run(consumer, [prompt], GREEDY, computed(producer, [prompt]))
        assert [output.num_cached_tokens] == full_pages(consumer, [prompt])


def test_a_dead_producer_costs_nothing_but_time(
    llm: LLM, tiny_checkpoint: Path, consumer: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_consumer = connector(consumer)
    monkeypatch.setattr(of_consumer, "_options", replace(of_consumer._options, silence_seconds=0.5))
    expected = tokens(llm.generate([list(prompt) for prompt in PROMPTS[:4]], GREEDY, use_tqdm=False))
    with peer(tiny_checkpoint) as dying:
        given = computed(dying, PROMPTS[:4])
    consumer.engine.reset_prefix_cache()
    outputs = run(consumer, PROMPTS[:4], GREEDY, given)
    assert tokens(outputs) == expected
    assert [output.num_cached_tokens for output in outputs] == [0] * 4


def test_a_request_that_ends_while_its_pages_come_leaves_nothing(producer: LLM, consumer: LLM) -> None:
    consumer.engine.reset_prefix_cache()
    prompts = PROMPTS[: consumer.engine.replicas[0].scheduler.slots.num_slots]
    given = computed(producer, prompts)
    engine = consumer.engine
    for number, (prompt, of_prompt) in enumerate(zip(prompts, given, strict=True)):
        engine.submit(engine.check(str(number), list(prompt), GREEDY, kv_transfer_params=of_prompt))
    engine.step()
    for number in range(len(prompts)):
        engine.abort(str(number))
    assert_idle(consumer)
    wait_until(lambda: not connector(producer).server._offers, lambda: "pages are still held")


@pytest.mark.slow
def test_hundreds_of_requests_leave_no_page(producer: LLM, consumer: LLM) -> None:
    for batch in range(4):  # four hundred for the two pairs of engines
        prompts = random_prompts(50, longest=60, seed=batch)
        run(consumer, prompts, replace(GREEDY, max_tokens=2), computed(producer, prompts))
    wait_until(lambda: not connector(producer).server._offers, lambda: "pages are still held")
    for one in (producer, consumer):
        assert_idle(one)
        connector(one)._memory.check_invariants()


@pytest.mark.parametrize("mesh", [pytest.param("2x1x1", marks=pytest.mark.slow), "1x2"])
def test_pages_may_cross_from_device_to_device(llm: LLM, tiny_checkpoint: Path, mesh: str) -> None:
    expected = tokens(llm.generate([list(prompt) for prompt in PROMPTS], SEEDED, use_tqdm=False))
    # A page is the same, whichever program has written it.
    with one_program(), peer(tiny_checkpoint, mesh=mesh, transport="device") as first:
        # Half of the prompts are there already. A ticket that nobody follows would hold their pages for a minute.
        run(first, PROMPTS[:6], replace(GREEDY, max_tokens=1), [None] * 6)
        given = computed(first, PROMPTS)
        with peer(tiny_checkpoint, mesh=mesh, transport="device") as second:
            outputs = run(second, PROMPTS, SEEDED, given)
            assert tokens(outputs) == expected
            assert [output.num_cached_tokens for output in outputs] == full_pages(second, PROMPTS)
            wait_until(lambda: not connector(first).server._offers, lambda: "pages are still held")
            assert_idle(second)
        assert_idle(first)


@pytest.mark.slow
def test_drafts_go_on_from_pages_of_the_draft_model(tiny_checkpoint: Path) -> None:
    prompts = PROMPTS[:6]
    drafting = json.dumps({"method": "draft_model", "model": str(tiny_checkpoint), "num_speculative_tokens": 3})
    with ExitStack() as stack, all_drafts_or_none(bursts=False):
        first, second = (stack.enter_context(peer(tiny_checkpoint, speculative_config=drafting)) for _ in range(2))
        expected = tokens(first.generate([list(prompt) for prompt in prompts], GREEDY, use_tqdm=False))
        assert tokens(run(second, prompts, GREEDY, computed(first, prompts))) == expected
        assert_idle(first)
        assert_idle(second)


def test_only_an_engine_with_peers_takes_such_requests(llm: LLM, producer: LLM) -> None:
    with pytest.raises(ParameterError, match="kv_connector peer"):
        llm.engine.check("r", [5, 6], GREEDY, kv_transfer_params=DECODE)
    with pytest.raises(ParameterError, match="n=1"):
        producer.engine.check("r", [5, 6], replace(SEEDED, n=2), kv_transfer_params=DECODE)
    neutral = {"do_remote_decode": False, "do_remote_prefill": False}
    assert llm.engine.check("r", [5, 6], GREEDY, kv_transfer_params=neutral)


def test_pages_of_another_version_of_the_weights_are_computed(
    llm: LLM, producer: LLM, consumer: LLM, tiny_checkpoint: Path
) -> None:
    """The weights are the same here, and only their name tells the versions apart."""
    expected = tokens(llm.generate([list(prompt) for prompt in PROMPTS], GREEDY, use_tqdm=False))
    full = full_pages(consumer, PROMPTS)
    for one, found in ((producer, [0] * len(PROMPTS)), (consumer, full)):
        one.update_weights(tiny_checkpoint, "second")
        for engine in (producer, consumer):
            engine.reset_prefix_cache()
        outputs = run(consumer, PROMPTS, GREEDY, computed(producer, PROMPTS))
        assert tokens(outputs) == expected
        assert [output.num_cached_tokens for output in outputs] == found
    assert versions(outputs) == {"second"}


def versions(outputs: Sequence[RequestOutput]) -> set[str]:
    return {span.version for output in outputs for span in output.outputs[0].weight_versions or ()}


@pytest.mark.slow
def test_pages_in_files_outlive_their_engine_and_serve_others(llm: LLM, tiny_checkpoint: Path, tmp_path: Path) -> None:
    expected = tokens(llm.generate([list(prompt) for prompt in PROMPTS], GREEDY, use_tqdm=False))
    config = {"kv_connector": "files", "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}}
    for number in range(3):
        options: dict[str, Any] = {"dtype": "bfloat16"} if number == 2 else {}
        with tiny_llm(
            tiny_checkpoint, kv_transfer_config=json.dumps(config), warm_up="background", **options
        ) as engine:
            outputs = engine.generate([list(prompt) for prompt in PROMPTS], GREEDY, use_tqdm=False)
            loaded = sum(replica.scheduler.num_loaded_pages for replica in engine.engine.replicas)
            assert_idle(engine)
        if number == 1:
            assert [output.num_cached_tokens for output in outputs] == full_pages(engine, PROMPTS)
            for file in [path for path in tmp_path.rglob("*") if path.is_file()][::2]:
                file.write_bytes(file.read_bytes()[:-3])  # what is damaged is computed, by others
        else:
            assert loaded == 0  # nothing was there, or only pages of another dtype
        assert number == 2 or tokens(outputs) == expected
    config["kv_role"] = "consumer"
    with tiny_llm(tiny_checkpoint, kv_transfer_config=json.dumps(config), warm_up="background") as engine:
        assert tokens(engine.generate([list(prompt) for prompt in PROMPTS], GREEDY, use_tqdm=False)) == expected
        [replica] = engine.engine.replicas
        assert replica.traffic is not None and replica.traffic.num_failed_loads > 0
        assert replica.traffic.num_saved_pages == 0
        assert_idle(engine)
