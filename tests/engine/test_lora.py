"""Adapters in an engine: each request gets the tokens of its merged weights, whoever else is in the step."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxvllm import LLM, LoRARequest, RequestOutput, SamplingParams
from jaxvllm.engine.exported_request import ExportedRequest
from jaxvllm.models.lora import LORA, MOST_MASKED
from jaxvllm.models.params import head_of
from jaxvllm.runtime.readouts.readout import Forwarded
from tests.conftest import Compilations
from tests.engine.test_disaggregation import DECODE, PEER
from tests.engine.tiny import GREEDY, assert_idle, greedy_tokens, merged_tokens, one_program, tiny_llm
from tests.jax_cache import same_programs_once
from tests.models.adapters import RandomAdapter
from tests.models.fixture import Fixture
from tests.quick import programs_in_advance

FIXTURE = Fixture.load("llama")
ADAPTERS = (
    RandomAdapter(FIXTURE, seed=1),
    RandomAdapter(FIXTURE, seed=2, ends=("q_proj", "down_proj"), rank=2, config={"use_dora": True}),
    RandomAdapter(FIXTURE, 3, ("_proj",), config={"use_rslora": True}, tables=("lm_head", "model.embed_tokens")),
    RandomAdapter(
        FIXTURE,
        seed=4,
        ends=("v_proj", "o_proj", "gate_proj"),
        config={"rank_pattern": {"v_proj": 8, "layers.1.self_attn.o_proj": 1}, "alpha_pattern": {"gate_proj": 3}},
        tables=("lm_head",),
    ),
)
PROMPTS = [list(prompt) for prompt in (FIXTURE.prompts * 2)[:8]]
# More adapters than there are slots; two that want the same room for their LM heads; and two requests without any.
WHO = (1, 2, 0, 3, 1, 4, 0, 2)
OPTIONS = dict(enable_lora=True, max_loras=2, max_lora_rank=8, max_cpu_loras=3, max_lora_heads=1)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [one.write(tmp_path_factory.mktemp("adapter")) for one in ADAPTERS]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FIXTURE.write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    return merged_tokens(checkpoint, [FIXTURE.weights(), *(one.merged() for one in ADAPTERS)], PROMPTS, WHO)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with programs_in_advance():  # tests count what is compiled later
        llm = tiny_llm(checkpoint, **OPTIONS)
    with llm:
        yield llm


def requests_of(paths: list[Path]) -> list[LoRARequest | None]:
    return [None if who == 0 else LoRARequest(f"adapter {who}", who, str(paths[who - 1])) for who in WHO]


def tokens_of(llm: LLM, paths: list[Path], numbers: Sequence[int] = range(len(WHO))) -> list[list[int]]:
    adapters = [requests_of(paths)[number] for number in numbers]
    outputs = llm.generate([PROMPTS[number] for number in numbers], GREEDY, use_tqdm=False, lora_request=adapters)
    return [output.outputs[0].token_ids for output in outputs]


def test_each_request_has_the_tokens_of_its_merged_weights(
    llm: LLM,
    paths: list[Path],
    expected: list[list[int]],
    compilations: Callable[[], AbstractContextManager[Compilations]],
) -> None:
    base = greedy_tokens(llm, PROMPTS)
    assert greedy_tokens(llm, PROMPTS) == base  # what takes prefixes from the cache is compiled when it is first needed
    assert all((mine == theirs) == (who == 0) for mine, theirs, who in zip(expected, base, WHO, strict=True))
    with compilations() as seen:
        assert tokens_of(llm, paths) == expected
        # Now pages are found, of the same adapter only.
        assert tokens_of(llm, paths) == expected
    assert seen.count == 0, seen.names
    assert_idle(llm)


def test_only_steps_with_adapters_are_called_with_their_arrays(llm: LLM) -> None:
    programs = llm.engine.holders[0].programs
    sizes = {False: 0, True: 0}
    for bucket in (one for one in programs.ladder.buckets if one.num_rows == programs.ladder.largest.num_rows):
        (params, *_), _ = programs.wait_for(bucket).begin.args_info
        assert (LORA in params) == bucket.is_adapted, str(bucket)
        sizes[bucket.is_adapted] += 1
    assert sizes[False] == sizes[True] > 0


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": "2x2", "compilation_cache": None},
        {"mesh": "2x1x1"},
        {"attention_backend": "reference"},
        {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 2}'},
    ],
    ids=["mesh", "stages", "masked", "drafts"],
)
def test_everywhere(
    llm: LLM, checkpoint: Path, paths: list[Path], expected: list[list[int]], options: dict[str, Any]
) -> None:
    """And with requests that move from one mesh to the other and back, some before their prompt is computed."""
    # The engine of this module decodes in bursts, and so does the one that drafts.
    programs = nullcontext() if "speculative_config" in options else one_program()
    with same_programs_once(), programs, tiny_llm(checkpoint, **OPTIONS, **options) as other:
        assert tokens_of(other, paths) == expected
        if "mesh" in options:
            assert moved(llm, other, requests_of(paths), steps=(3, 9)) == expected
            assert_idle(llm)
        assert_idle(other)


def test_more_adapters_than_other_devices_multiply_at_once(
    checkpoint: Path,
    paths: list[Path],
    expected: list[list[int]],
    tmp_path: Path,
    compilations: Callable[[], AbstractContextManager[Compilations]],
) -> None:
    num_slots = MOST_MASKED + 4
    more = [RandomAdapter(FIXTURE, seed, ("q_proj", "up_proj"), size=1) for seed in range(10, 10 + num_slots - 4)]
    others = [LoRARequest(f"{one.seed}", one.seed, str(one.write(tmp_path / str(one.seed)))) for one in more]
    adapters = [*requests_of(paths), *others]
    prompts = [*PROMPTS, *([PROMPTS[0]] * len(others))]
    options = OPTIONS | dict(max_loras=num_slots, max_cpu_loras=num_slots, max_num_seqs=32, row_buckets=(32,))
    options |= dict(token_buckets=(64,), max_num_batched_tokens=64, num_pages=256)
    with one_program(64, 32), tiny_llm(checkpoint, **options) as llm:

        def tokens(numbers: Iterable[int]) -> list[list[int]]:
            chosen = [*numbers]
            outputs = llm.generate(
                [prompts[one] for one in chosen],
                GREEDY,
                use_tqdm=False,
                lora_request=[adapters[one] for one in chosen],
            )
            return [output.outputs[0].token_ids for output in outputs]

        together = tokens(range(len(prompts)))
        assert together[: len(PROMPTS)] == expected
        assert len(set(map(tuple, together[len(PROMPTS) :]))) > len(others) // 2
        with compilations() as seen:
            for number in (len(PROMPTS), len(prompts) - 1):
                assert tokens([number]) == [together[number]]
        assert seen.count == 0, seen.names
        assert_idle(llm)


def test_pages_travel_between_engines_for_one_adapter(
    checkpoint: Path, paths: list[Path], expected: list[list[int]]
) -> None:
    """One engine is both of them here."""
    number = max(range(len(WHO)), key=lambda at: len(PROMPTS[at]) * (WHO[at] > 0))
    own = requests_of(paths)[number]
    other = next(one for one in requests_of(paths) if one not in (own, None))

    def run(params: SamplingParams, adapter: LoRARequest | None, given: Mapping[str, Any]) -> RequestOutput:
        engine = llm.engine
        llm.reset_prefix_cache()
        options: dict[str, Any] = {"lora_request": adapter, "kv_transfer_params": given}
        engine.submit(engine.check("one", {"prompt_token_ids": PROMPTS[number], "cache_salt": "a"}, params, **options))
        found: list[RequestOutput] = []
        while engine.has_work:
            found = [*found, *engine.step()]
        return found[-1]

    with one_program(), tiny_llm(checkpoint, **OPTIONS, kv_transfer_config=json.dumps(PEER)) as llm:
        whole = (len(PROMPTS[number]) - 1) // llm.config.page_size * llm.config.page_size
        for adapter, num_cached in ((other, 0), (None, 0), (own, whole)):
            ticket = run(replace(GREEDY, max_tokens=1), own, DECODE).kv_transfer_params
            assert ticket is not None
            output = run(GREEDY, adapter, ticket)
            assert output.num_cached_tokens == num_cached
            assert (output.outputs[0].token_ids == expected[number]) == (adapter == own)
        assert_idle(llm)


def test_a_request_that_moves_finds_its_adapter_by_content(llm: LLM, tmp_path: Path) -> None:
    own, adapter = PROMPTS[6], LoRARequest("moves", 30, str(replace(ADAPTERS[0], seed=30).write(tmp_path / "moves")))
    [wanted] = llm.generate([own], GREEDY, use_tqdm=False, lora_request=adapter)
    engine = llm.engine

    def exported() -> ExportedRequest:
        engine.submit(engine.check("moves", own, GREEDY, lora_request=adapter))
        for _ in range(3):
            engine.step()
        left = engine.export_request("moves")
        assert left.sequences[0].output_token_ids
        assert not finish()
        return left

    def finish() -> list[list[int]]:
        return [output.outputs[0].token_ids for output in step_to_the_end(llm) if output.finished]

    left = exported()
    renamed = replace(left, request=replace(left.request, lora_request=LoRARequest("moves", 1, "/nowhere")))
    engine.import_request(renamed)  # it is in memory, whatever another engine calls it
    assert finish() == [wanted.outputs[0].token_ids]
    left = exported()
    engine.adapters.unload(30)
    llm.reset_prefix_cache()
    engine.import_request(left)  # and now it is read
    [queued] = engine.replicas[0].scheduler.queue
    assert engine.replicas[0].scheduler.num_cached_tokens(queued) > 0, "its pages came along"
    assert finish() == [wanted.outputs[0].token_ids]
    left = exported()
    for changed in (replace(left, adapter=None), replace(left, adapter=b"another")):
        with pytest.raises(ValueError, match="'moves' of this engine is not the one with which the request was"):
            engine.import_request(changed)
    assert_idle(llm)


def moved(one: LLM, other: LLM, adapters: Sequence[LoRARequest | None], steps: Sequence[int]) -> list[list[int]]:
    """The tokens of all prompts, which begin in one engine, and go to the other one and back after so many steps."""
    for number, (prompt, adapter) in enumerate(zip(PROMPTS, adapters, strict=True)):
        one.engine.submit(one.engine.check(str(number), prompt, GREEDY, lora_request=adapter))
    here, there = one.engine, other.engine
    ended: list[RequestOutput] = []
    for count in steps:
        for _ in range(count):
            ended += here.step()
        for name in [*here.outputs.request_ids]:
            there.import_request(ExportedRequest.from_bytes(here.export_request(name).to_bytes()))
        here, there = there, here
    ended += [*step_to_the_end(one), *step_to_the_end(other)]
    by_name = {int(output.request_id): output.outputs[0].token_ids for output in ended if output.finished}
    return [by_name[number] for number in range(len(PROMPTS))]


def step_to_the_end(llm: LLM) -> Iterator[RequestOutput]:
    while llm.engine.has_work:
        yield from llm.engine.step()


def test_a_base_in_eight_bits_takes_adapters(checkpoint: Path, paths: list[Path]) -> None:
    adapters = [LoRARequest(f"adapter {who}", who, str(paths[who - 1])) for who in (1, 3)]
    with one_program(), tiny_llm(checkpoint, **OPTIONS, quantization="int8") as llm:
        [base] = greedy_tokens(llm, PROMPTS[:1])
        outputs = llm.generate(PROMPTS[:1] * 2, GREEDY, use_tqdm=False, lora_request=adapters)
    one, other = (output.outputs[0].token_ids for output in outputs)
    assert len(one) == len(other) == len(base) and base != one != other != base


def test_a_trainer_replaces_the_content_of_an_adapter(
    llm: LLM, paths: list[Path], compilations: Callable[[], AbstractContextManager[Compilations]]
) -> None:
    """Requests that run go on with the old content, and no page of it is found by later ones."""
    one, other = (LoRARequest(f"adapter {who}", who, str(paths[who - 1])) for who in (1, 3))

    def tokens(request: LoRARequest) -> tuple[list[int], int]:
        [output] = llm.generate(PROMPTS[6:7], GREEDY, use_tqdm=False, lora_request=request)
        return output.outputs[0].token_ids, output.num_cached_tokens

    (before, _), (wanted, _), (_, num_cached) = tokens(one), tokens(other), tokens(one)
    assert before != wanted and num_cached > 0
    given = {
        name: jax.numpy.asarray(array) for name, array in load_file(paths[2] / "adapter_model.safetensors").items()
    }
    live = LoRARequest("live", 20, str(paths[2]))  # which has the config of the tensors
    llm.update_lora(live, load_file(paths[2] / "adapter_model.safetensors"))
    assert tokens(live)[0] == wanted
    base = {f"base_model.model.{name}": jax.numpy.asarray(array) for name, array in FIXTURE.weights().items()}
    nothing = {name: base.get(name, 0 * array) for name, array in given.items()}  # with the tables of the model
    engine = llm.engine
    engine.submit(engine.check("runs", PROMPTS[6], GREEDY, lora_request=live))
    engine.step()
    with compilations() as seen:
        llm.update_lora(live, nothing)
        engine.submit(engine.check("new", PROMPTS[6], GREEDY, lora_request=live))
        ended = {output.request_id: output for _ in iter(lambda: engine.has_work, False) for output in engine.step()}
        assert ended["runs"].outputs[0].token_ids == wanted
        assert ended["new"].outputs[0].token_ids == greedy_tokens(llm, PROMPTS[6:7])[0]
        assert ended["new"].num_cached_tokens == 0
        for number in (1, 2, 3):  # more adapters than host memory keeps
            tokens(LoRARequest(f"adapter {number}", number, str(paths[number - 1])))
        assert tokens(live)[0] == ended["new"].outputs[0].token_ids != wanted
    assert seen.count == 0, seen.names
    name, array = next(one for one in given.items() if "lora_A" in one[0])
    for wrong, message in (
        ({name: array}, "the given tensors of the adapter 'live'.* needs lora_B"),
        (given | {name: array[:1]}, "shape"),
        (given | {name: 5}, "must be arrays by their names"),
        (given | {"other": array}, "unexpected tensor other"),
        ({}, "has no tensor"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.update_lora(live, wrong)
    assert tokens(live)[0] == ended["new"].outputs[0].token_ids
    engine.adapters.unload(20)
    assert tokens(live)[0] == wanted  # the number names the directory again
    assert_idle(llm)


def test_an_adapter_that_was_changed_shares_no_page_with_what_it_was(
    llm: LLM, tmp_path: Path, paths: list[Path]
) -> None:
    prompt = [PROMPTS[6]]
    first = ADAPTERS[0].write(tmp_path / "live")
    one, same = (LoRARequest("live", number, str(first)) for number in (10, 11))
    params = replace(GREEDY, max_tokens=4)
    [before] = llm.generate(prompt, params, use_tqdm=False, lora_request=one)
    replace(ADAPTERS[0], seed=99).write(first)
    [after] = llm.generate(prompt, params, use_tqdm=False, lora_request=same)
    [still] = llm.generate(prompt, params, use_tqdm=False, lora_request=one)
    assert after.num_cached_tokens == 0 < (still.num_cached_tokens or 0)
    assert before.outputs[0].token_ids == still.outputs[0].token_ids
    [salted] = llm.generate(
        {"prompt_token_ids": prompt[0], "cache_salt": "a"}, params, use_tqdm=False, lora_request=one
    )
    assert salted.num_cached_tokens == 0 and salted.outputs[0].token_ids == before.outputs[0].token_ids


def test_wrong_adapters_disturb_nobody(llm: LLM, paths: list[Path], expected: list[list[int]], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"prompt 1: .* has no adapter_config.json"):
        llm.generate(PROMPTS[:2], GREEDY, lora_request=[None, LoRARequest("none", 50, str(tmp_path))])
    with pytest.raises(ValueError, match="lora_int_id 1 is that of"):
        llm.generate(PROMPTS[0], GREEDY, lora_request=LoRARequest("other", 1, str(paths[1])))
    with pytest.raises(ValueError, match="1 lora_request for 2 prompts"):
        llm.generate(PROMPTS[:2], GREEDY, lora_request=[None])
    with pytest.raises(ValueError, match="must be a LoRARequest"):
        llm.generate(PROMPTS[0], GREEDY, lora_request=["adapter"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="must be a LoRARequest, not str"):
        llm.generate(PROMPTS[:2], GREEDY, lora_request=str(paths[0]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tensors must be arrays by PEFT's names, .* not NoneType"):
        llm.update_lora(LoRARequest("adapter 1", 1, str(paths[0])), None)  # type: ignore[arg-type]
    high = replace(ADAPTERS[0], rank=9).write(tmp_path / "high")
    with pytest.raises(ValueError, match="rank 9, and max_lora_rank is 8"):
        llm.generate(PROMPTS[0], GREEDY, lora_request=LoRARequest("high", 51, str(high)))
    # The largest numbers that float32 has overflow in the rows of that adapter, and in no other.
    wild = replace(ADAPTERS[0], size=1e37).write(tmp_path / "wild")
    adapters = requests_of(paths)[:-1] + [LoRARequest("wild", 52, str(wild))]
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=adapters)
    assert [output.outputs[0].token_ids for output in outputs[:-1]] == expected[:-1]
    assert_idle(llm)


def test_a_trainer_gives_a_tree_as_the_engine_has_it(llm: LLM, paths: list[Path]) -> None:
    one, other = (LoRARequest(f"adapter {who}", who, str(paths[who - 1])) for who in (2, 3))  # and 2 is one of DoRA
    live, prompt = LoRARequest("tree", 21, str(paths[0])), PROMPTS[6]

    def tokens(request: LoRARequest | None) -> list[int]:
        [output] = llm.generate([prompt], GREEDY, use_tqdm=False, lora_request=request)
        return output.outputs[0].token_ids

    tree = llm.lora_weights(one)
    for request in (other, one):
        tree = llm.lora_weights(request)
        llm.update_lora(live, jax.tree.map(jax.numpy.asarray, tree))
        assert tokens(live) == tokens(request)
    assert tokens(live) != tokens(None)
    for layer in tree["layers"]:  # an optimizer has changed even what only says which part of the matrix a row is
        for up in jax.tree.leaves([node for name, node in layer.items() if name.startswith("lora_b_")]):
            up[:, -1] = 7
    llm.update_lora(live, tree)
    assert tokens(live) == tokens(one)
    name = "lora_a_qkv"
    first, others = tree["layers"][0], tree["layers"][1:]
    [array] = jax.tree.leaves(first[name])
    for wrong, message in (
        ({"layers": tree["layers"]}, r"give one like llm.lora_weights\(lora_request\)"),
        (tree | {"layers": others}, "has other arrays than the engine's"),
        (tree | {"layers": [{**first, "other": array}, *others]}, "has other arrays than the engine's"),
        (tree | {"layers": [jax.tree.map(lambda x: x[:, :1], first), *others]}, "the engine's is float32"),
        (tree | {"layers": [jax.tree.map(lambda x: x.astype("float16"), first), *others]}, "is float16"),
        (tree | {"layers": [jax.tree.map(lambda x: x * np.nan, first), *others]}, "numbers that are not finite"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.update_lora(live, wrong)
    assert tokens(live) == tokens(one)
    llm.update_lora(live, jax.tree.map(np.zeros_like, tree))
    assert tokens(live) == tokens(None), "it adds nothing"
    assert_idle(llm)


@pytest.mark.parametrize("mesh", ["2x1", pytest.param("2x2x1", marks=pytest.mark.slow)])
def test_replicas_that_share_experts_have_slots_of_their_own(mesh: str, tmp_path: Path) -> None:
    """Each has room for one adapter here, and at most times these differ."""
    fixture = Fixture.load("qwen2_moe")
    # Of experts, which the replicas have together, and of what each has of its own.
    some = (
        RandomAdapter(fixture, 1, ("q_proj", "up_proj", "down_proj")),
        RandomAdapter(fixture, 2, ("q_proj", "v_proj", "o_proj"), config={"use_dora": True}, tables=("lm_head",)),
        RandomAdapter(fixture, 3, ("v_proj", "gate_proj"), rank=2, tables=("lm_head", "model.embed_tokens")),
    )
    requests = [LoRARequest(f"{one.seed}", one.seed, str(one.write(tmp_path / f"{one.seed}"))) for one in some]
    who = [requests[0], None, requests[1], requests[2], requests[1], None, requests[2], requests[0]]
    prompts = [list(prompt) for prompt in fixture.prompts[: len(who)]]
    options: dict[str, Any] = {
        **OPTIONS,
        "max_loras": 1,
        "enable_expert_parallel": True,
        "mesh": mesh,
        "dtype": "float32",
    }
    with tiny_llm(fixture.write_checkpoint(tmp_path / "model"), **options, speculation=False) as llm:
        expected: dict[LoRARequest | None, list[list[int]]] = {None: greedy_tokens(llm, prompts)}
        for request, one in zip(requests, some, strict=True):
            llm.update_weights(one.merged())
            expected[request] = greedy_tokens(llm, prompts)
        llm.update_weights(fixture.weights())
        for _ in range(2):
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=who)
            for number, (output, request) in enumerate(zip(outputs, who, strict=True)):
                assert output.outputs[0].token_ids == expected[request][number], number
                assert (request is None) == (output.outputs[0].token_ids == expected[None][number])
        assert all(replica.scheduler.lora_slots.digests for replica in llm.engine.replicas)
        assert_idle(llm)


def test_configs(checkpoint: Path) -> None:
    for options, error, message in (
        ({"max_lora_rank": 7}, ValueError, "max_lora_rank must be one of"),
        ({"enable_lora": True, "max_loras": 2, "max_cpu_loras": 1}, ValueError, "at least max_loras"),
        ({"enable_lora": True, "max_lora_heads": 2}, ValueError, "max_lora_heads 2 must be at most max_loras 1"),
    ):
        with pytest.raises(error, match=message):
            LLM(model=str(checkpoint), **options)


def test_dora_divides_by_the_norms_of_the_weights_that_are_there(
    llm: LLM, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, adapter = PROMPTS[WHO.index(2)], LoRARequest("adapter 2", 2, str(paths[1]))
    first = FIXTURE.weights()
    other = {name: weight * np.float32(3) if "q_proj" in name else weight for name, weight in first.items()}

    def tokens(weights: dict[str, np.ndarray], lora_request: LoRARequest | None) -> list[int]:
        llm.update_weights(weights)
        [output] = llm.generate([prompt], GREEDY, use_tqdm=False, lora_request=lora_request)
        return output.outputs[0].token_ids

    # The adapter is in its slot when other weights come, and so it is when the first ones come back.
    expected = [tokens(ADAPTERS[1].merged(weights), None) for weights in (first, other)]
    found = [tokens(weights, adapter) for weights in (first, other)]
    assert found == expected
    [holder] = llm.engine.holders
    unsampled: Any = None
    with monkeypatch.context() as patch:
        # A step is held back, and what is left of it computes with the head that it had.
        patch.setattr(holder, "_forwarded", Forwarded(unsampled, unsampled, head_of(holder.params)))
        llm.update_weights(first)
        assert (held := holder._forwarded) is not None
        assert not any(array.is_deleted() for array in jax.tree.leaves(held.head))
    assert tokens(first, adapter) == expected[0]


def test_where_a_device_has_no_memory_for_ratios_the_weights_and_their_version_agree(
    llm: LLM, paths: list[Path], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    number = WHO.index(2)
    assert tokens_of(llm, paths, [number]) == [expected[number]]
    [holder] = llm.engine.holders
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no memory"):
        patch.setattr(holder, "bring_adapter", Mock(side_effect=RuntimeError("no memory")))
        assert holder._bound_to_weights
        llm.update_weights(ADAPTERS[0].merged(), "merged")
    assert llm.engine.weight_version.name == "merged"
    [output] = llm.generate([PROMPTS[0]], GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == expected[0], "they are those of its first adapter"
    llm.update_weights(FIXTURE.weights())
    assert tokens_of(llm, paths, [number]) == [expected[number]]


def test_the_scores_of_a_prompt_are_those_of_the_adapted_head(llm: LLM, paths: list[Path]) -> None:
    params, prompt = replace(GREEDY, max_tokens=1, prompt_logprobs=1), max(PROMPTS, key=len)

    def scores(lora_request: LoRARequest | None) -> list[float]:
        [output] = llm.generate([prompt], params, use_tqdm=False, lora_request=lora_request)
        return [max(one.logprob for one in step.values()) for step in output.prompt_logprobs or () if step]

    for who in (1, 4):  # an adapter of the head, and one that has a head of its own
        found = scores(LoRARequest(f"adapter {who}", who, str(paths[who - 1])))
        llm.update_weights(ADAPTERS[who - 1].merged())
        expected = scores(None)
        llm.update_weights(FIXTURE.weights())
        np.testing.assert_allclose(found, expected, atol=1e-4)
        assert not np.allclose(scores(None), expected, atol=1e-2)


def test_embeddings_and_beams(llm: LLM, paths: list[Path]) -> None:
    [adapter] = [LoRARequest("adapter 1", 1, str(paths[0]))]
    [plain] = llm.embed([PROMPTS[0]], use_tqdm=False)
    [adapted] = llm.embed([PROMPTS[0]], use_tqdm=False, lora_request=adapter)
    assert not np.allclose(plain.outputs.embedding, adapted.outputs.embedding, atol=1e-2)


def test_adapters_that_sleep_come_back_with_new_weights(
    llm: LLM, paths: list[Path], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.engine.holders[0], "_is_on_host", False)
    assert tokens_of(llm, paths) == expected
    llm.sleep(1)
    assert llm.engine.sleeping == ("weights", "kv_cache")
    llm.update_weights(FIXTURE.weights())
    assert llm.wake_up(["kv_cache"])
    assert tokens_of(llm, paths) == expected


def test_slots_that_a_broken_fill_has_taken_along_are_made_anew(
    llm: LLM, paths: list[Path], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fills = llm.engine.holders[0]._adapter_fills
    assert fills is not None
    whole = fills._program

    def broken(*arguments: Any) -> None:
        whole(*arguments)  # which donates the slots
        raise RuntimeError("the device failed")

    assert tokens_of(llm, paths) == expected
    with monkeypatch.context() as patch:
        patch.setattr(fills, "_program", broken)
        fresh = LoRARequest("fresh", 60, str(replace(ADAPTERS[0], seed=60).write(paths[0].parent / "fresh")))
        with pytest.raises(RuntimeError, match="the device failed"):
            llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, lora_request=fresh)
    assert tokens_of(llm, paths) == expected
    assert_idle(llm)


def test_new_weights_keep_adapters(
    llm: LLM,
    paths: list[Path],
    expected: list[list[int]],
    compilations: Callable[[], AbstractContextManager[Compilations]],
) -> None:
    """It stands last: requests of an engine whose weights were replaced do not move to engines of other tests."""
    tokens_of(llm, paths)
    llm.wait_until_compiled()  # steps of tests before have split programs compiled beside them
    with compilations() as seen:
        llm.update_weights(FIXTURE.weights())
        assert tokens_of(llm, paths) == expected
    assert seen.count == 0, seen.names
    assert_idle(llm)
