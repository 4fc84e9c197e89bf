"""Weights that replace those of a running engine: as if it had been started with them, and all of them or none."""

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxvllm import LLM
from jaxvllm.core.sampling_params import RequestOutputKind
from jaxvllm.core.structured_outputs import StructuredOutputsParams
from jaxvllm.engine.outputs import CompletionOutput
from jaxvllm.models.forms import Matrix
from tests.conftest import Compilations
from tests.engine.live_driver import LiveDriver, MixedWeights, weights_of
from tests.engine.tiny import GREEDY, assert_idle, greedy_tokens, one_program, tiny_llm
from tests.jax_cache import same_programs_once
from tests.models.fixture import Fixture

FIXTURE = Fixture.load("llama")
# The same model after a training that forgot everything.
OTHER = replace(FIXTURE, seed=FIXTURE.seed + 1)
PROMPTS = [FIXTURE.prompts[2], FIXTURE.prompts[5]]
LONG = [FIXTURE.prompts[6]]  # of several pages


@pytest.fixture(scope="module", params=["1x1", "2x2x2"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory = FIXTURE.write_checkpoint(tmp_path_factory.mktemp("first"))
    few = dict(num_pages=25)  # for eight requests: some are preempted
    if request.param == "1x1":
        with one_program(), tiny_llm(directory, **few) as llm:
            yield llm
        return
    # Both replicas have the same programs.
    with (
        one_program(),
        same_programs_once(),
        tiny_llm(directory, mesh=request.param, compilation_cache=None, **few) as llm,
    ):
        yield llm


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[list[int]]]:
    """What engines that start with the weights of a seed say."""
    found = {}
    for fixture in (FIXTURE, OTHER):
        directory = fixture.write_checkpoint(tmp_path_factory.mktemp("other"))
        with one_program(), tiny_llm(directory) as llm:
            found[fixture.seed] = greedy_tokens(llm, PROMPTS)
    return found


def test_tensors_by_their_names(
    llm: LLM,
    expected: dict[int, list[list[int]]],
    compilations: Callable[[], AbstractContextManager[Compilations]],
) -> None:
    llm.update_weights(FIXTURE.weights())
    assert greedy_tokens(llm, PROMPTS) == expected[FIXTURE.seed]
    llm.generate(LONG, GREEDY, use_tqdm=False)
    llm.update_weights(OTHER.weights())
    with compilations() as seen:
        assert greedy_tokens(llm, PROMPTS) == expected[OTHER.seed] != expected[FIXTURE.seed]
        [output] = llm.generate(LONG, GREEDY, use_tqdm=False)
    assert output.num_cached_tokens == 0  # no page of the old weights is found
    assert seen.count == 0, seen.names
    # On the devices of a trainer they may be as well.
    llm.update_weights({name: jax.numpy.asarray(array) for name, array in FIXTURE.weights().items()})
    assert greedy_tokens(llm, PROMPTS) == expected[FIXTURE.seed]
    assert_idle(llm)


def test_the_engines_own_tree(llm: LLM, expected: dict[int, list[list[int]]]) -> None:
    llm.update_weights(OTHER.weights())
    other = llm.weights
    llm.update_weights(FIXTURE.weights())
    first = llm.weights
    llm.update_weights(other)
    assert greedy_tokens(llm, PROMPTS) == expected[OTHER.seed]
    for one, two in zip(jax.tree.leaves(llm.weights), jax.tree.leaves(other), strict=True):
        shards = zip(one.addressable_shards, two.addressable_shards, strict=True)
        assert all(a.data.unsafe_buffer_pointer() == b.data.unsafe_buffer_pointer() for a, b in shards)
    # A trainer's arrays may lie elsewhere.
    arrays = jax.tree.map(np.array, first)
    llm.update_weights(arrays)
    for array in jax.tree.leaves(arrays):
        array.fill(0)  # which are the trainer's to write to again
    assert greedy_tokens(llm, PROMPTS) == expected[FIXTURE.seed]


def running(llm: LLM, name: str, prompt: Sequence[int], **options: Any) -> None:
    """Submits a request, and steps until it has had a token."""
    before = llm.engine.stats().num_output_tokens
    llm.engine.submit(llm.engine.check(name, list(prompt), replace(GREEDY, **options)))
    while llm.engine.stats().num_output_tokens == before:
        assert not any(output.finished for output in llm.engine.step())


def completed(llm: LLM) -> dict[str, CompletionOutput]:
    """Steps until nothing is left to do, and returns the last output of each request."""
    found = {}
    while llm.engine.has_work:
        found |= {output.request_id: output.outputs[0] for output in llm.engine.step() if output.finished}
    return found


def versions(output: CompletionOutput) -> list[tuple[str, int, int]]:
    assert output.weight_versions is not None
    return [(span.version, span.start, span.end) for span in output.weight_versions]


def test_in_the_middle_of_a_request(llm: LLM, expected: dict[int, list[list[int]]]) -> None:
    """Its text stays. All its tokens are computed again, and the rest is what the new weights say after them."""
    llm.update_weights(FIXTURE.weights(), "first")
    running(llm, "long", PROMPTS[1])
    assert llm.update_weights(OTHER.weights()) == llm.weight_version
    output = completed(llm)["long"]
    assert len(output.token_ids) == GREEDY.max_tokens
    [(_, _, split), _] = versions(output)
    assert versions(output) == [("first", 0, split), (llm.weight_version, split, len(output.token_ids))]
    assert output.token_ids[:split] == expected[FIXTURE.seed][1][:split]
    [again] = greedy_tokens(llm, [[*PROMPTS[1], *output.token_ids[:split]]], max_tokens=len(output.token_ids) - split)
    assert again == output.token_ids[split:]
    assert_idle(llm)


HEAD = "lm_head.weight"


NUM_STREAMS = 60


def test_whatever_comes_at_random_tokens_are_explained_by_the_versions_that_they_report(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates, pauses, sleeps, aborts and 60 streams: each ends once, and each token is its version's best one.

    The oracle computes the keys and values of each position with the weights that the engine had then.
    """
    whole = {"first": FIXTURE.weights(), "other": OTHER.weights()}
    whole["turned"] = whole["first"] | {HEAD: -whole["first"][HEAD]}
    trees = {}
    for name, tensors in whole.items():
        llm.update_weights(tensors)
        trees[name] = llm.weights
    for holder in llm.engine.holders:
        monkeypatch.setattr(holder, "_is_on_host", False)  # so that a sleep moves weights
    oracle, done, seen = MixedWeights(FIXTURE.write_checkpoint(tmp_path), whole), set[str](), set[str]()
    num_replicas = len(llm.engine.replicas)
    most_spans = num_mixed = 0
    for seed in (1, 2) if num_replicas == 1 else (3,):
        with monkeypatch.context() as patch:
            driver = LiveDriver(llm, trees, NUM_STREAMS, seed)
            driver.run(patch)
        assert driver.ended.keys() == driver.prompts.keys() and len(driver.ended) == NUM_STREAMS
        assert_idle(llm)
        for name, output in driver.ended.items():
            prompt, tokens = driver.prompts[name], output.token_ids
            spans = [(version, place) for version, start, end in versions(output) for place in range(start, end)]
            assert [place for _, place in spans] == [*range(len(tokens))]
            replayed = driver.written.replay(name, [*prompt, *tokens], oracle)
            told = {place + len(prompt): (version, tokens[place]) for version, place in spans}
            assert told.items() <= replayed.items(), (seed, name)
            seen |= {weights_of(version) for version, _ in spans}
            most_spans = max(most_spans, len(versions(output)))
            num_mixed += driver.written.is_mixed(name)
        done |= driver.done.keys()
    if num_replicas == 1:  # of several, what is ready first decides what comes next
        assert seen == whole.keys() and most_spans > 3
        assert num_mixed > 10, "few requests went on with keys and values of other weights"
        wanted = "abort,update drop,update keep,update head,pause abort,pause wait,pause keep,resume,sleep 1,sleep 2"
        assert done >= {*wanted.split(","), "wake pages", "wake up", "release pages"}


@pytest.mark.parametrize("watched", [True, False], ids=["streams", "at the end"])
def test_requests_go_on_with_the_keys_and_values_that_they_have(
    watched: bool, llm: LLM, expected: dict[int, list[list[int]]]
) -> None:
    """A new LM head has no part in keys and values, so that who keeps them says what it would say anew."""
    llm.update_weights(FIXTURE.weights(), "first")
    before = llm.engine.stats().num_preemptions
    kind = RequestOutputKind.CUMULATIVE if watched else RequestOutputKind.FINAL_ONLY
    running(llm, "kept", LONG[0], output_kind=kind)
    head = {HEAD: OTHER.weights()[HEAD]}
    llm.update_weights(head, "second", kv="keep", partial=True)
    llm.engine.submit(llm.engine.check("new", list(LONG[0]), GREEDY))
    found = completed(llm)
    tokens = found["kept"].token_ids
    [(_, _, split), _] = versions(found["kept"])
    assert versions(found["kept"]) == [("first", 0, split), ("second", split, len(tokens))]
    assert llm.engine.stats().num_preemptions == before
    [after] = greedy_tokens(llm, [[*LONG[0], *tokens[:split]]], max_tokens=len(tokens) - split)
    assert after == tokens[split:]
    assert versions(found["new"]) == [("second", 0, len(tokens))]
    # The pages of the first weights are nobody else's, not even after the request has ended.
    llm.update_weights(OTHER.weights(), "third")
    running(llm, "kept", LONG[0])
    llm.update_weights(FIXTURE.weights(), "fourth", kv="keep")
    kept = completed(llm)["kept"]
    assert [version for version, _, _ in versions(kept)] == ["third", "fourth"]
    # The second one would go on from a page that the request has filled since.
    for prompt, num_cached in ((LONG[0], 0), ([*LONG[0], *kept.token_ids], len(LONG[0]))):
        [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert output.num_cached_tokens == num_cached
    assert_idle(llm)


def test_a_row_that_waits_for_a_mask_is_sampled_by_the_weights_that_computed_it(tiny_checkpoint: Path) -> None:
    """Its step is two programs, and an update may come between them."""
    form = StructuredOutputsParams(regex="[a-z ]{40}")
    params = replace(GREEDY, structured_outputs=form, logprobs=0)  # with these nothing is guessed without the mask
    with one_program(), tiny_llm(tiny_checkpoint) as llm:
        [expected] = llm.generate([PROMPTS[1]], params, use_tqdm=False)
        running(llm, "masked", PROMPTS[1], structured_outputs=form, logprobs=0)
        [replica] = llm.engine.replicas
        replica.dispatch(llm.engine.outputs)
        assert replica._held is not None
        head = load_file(tiny_checkpoint / "model.safetensors")[HEAD]
        llm.update_weights({HEAD: -head}, "turned", kv="keep", partial=True)
        output = completed(llm)["masked"]
        [(_, _, split), _] = versions(output)
        assert output.token_ids[:split] == expected.outputs[0].token_ids[:split]
        assert output.token_ids != expected.outputs[0].token_ids


def test_a_part_of_the_weights(llm: LLM, expected: dict[int, list[list[int]]]) -> None:
    """Tensors by their names, some layers of a stack among them, and arrays of a tree: what is not given stays."""
    llm.update_weights(FIXTURE.weights())
    other = OTHER.weights()
    parts = [{name: array for name, array in other.items() if ".layers.1." in name}]
    parts += [{name: array for name, array in other.items() if ".layers.1." not in name}]
    for part in parts:
        before = greedy_tokens(llm, PROMPTS)
        llm.update_weights(part, partial=True)
        assert greedy_tokens(llm, PROMPTS) != before
    assert greedy_tokens(llm, PROMPTS) == expected[OTHER.seed]
    tree = llm.weights
    llm.update_weights(FIXTURE.weights())
    places = range(len(tree["layers"])) if isinstance(tree["layers"], list) else tree["layers"]
    layers = {place: tree["layers"][place] for place in places}
    llm.update_weights({"layers": layers}, partial=True)
    assert greedy_tokens(llm, PROMPTS) != expected[OTHER.seed]
    llm.update_weights(Module({name: array for name, array in tree.items() if name != "layers"}), partial=True)
    assert greedy_tokens(llm, PROMPTS) == expected[OTHER.seed]
    assert llm.weights["final_norm"] is tree["final_norm"]


class Module:
    """A trainer's module: it has weights as the engine has them, each in something that holds it."""

    def __init__(self, weights: dict[str, Any]):
        self._weights = weights

    def tree(self) -> dict[str, Any]:
        def held(node: Any) -> Any:
            arrays = node.arrays if isinstance(node, Matrix) else node
            return {name: held(one) for name, one in arrays.items()} if isinstance(arrays, dict) else Variable(node)

        return {name: held(node) for name, node in self._weights.items()}


@dataclass
class Variable:
    array: jax.Array

    def get_value(self) -> jax.Array:
        return self.array


QUERY, KEY = (f"model.layers.1.self_attn.{letter}_proj.weight" for letter in "qk")


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({QUERY: None}, f"{QUERY} and {KEY} are parts of one matrix here, and only the former is given"),
        ({"model.layers.9.mlp.down_proj.weight": None}, "unexpected tensor model.layers.9"),
        ({"final_norm": np.ones(1, np.float32)}, r"the given weight \['final_norm'\] is float32\[1\]"),
        ({"layers": 5}, r"other arrays than the engine's, \['layers'\] is int"),
        ({"lm_head": np.ones(1)}, "lm_head"),
        ({"other_norm": np.ones(1)}, "other arrays than the engine's, at its root has 'other_norm'"),
    ],
    ids=["one of three", "no layer", "shape", "no mapping", "no form", "no array"],
)
def test_a_wrong_part_replaces_nothing(
    part: dict[str, Any], message: str, llm: LLM, expected: dict[int, list[list[int]]]
) -> None:
    llm.update_weights(FIXTURE.weights(), "right")
    given = {name: OTHER.weights().get(name, np.ones(1)) if array is None else array for name, array in part.items()}
    with pytest.raises(ValueError, match=message):
        llm.update_weights(given, "wrong", partial=True)
    for wrong in ({"version": ""}, {"kv": "reset"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            llm.update_weights(OTHER.weights(), **wrong)
    assert llm.weight_version == "right"
    assert greedy_tokens(llm, PROMPTS) == expected[FIXTURE.seed]


def test_weights_that_sleep_come_back_whole(llm: LLM, expected: dict[int, list[list[int]]]) -> None:
    llm.update_weights(FIXTURE.weights())
    tree = llm.weights
    llm.sleep(level=2)
    with pytest.raises(ValueError, match="a part needs the weights beside it"):
        llm.update_weights({HEAD: OTHER.weights()[HEAD]}, partial=True)
    for source, seed in ((OTHER.weights(), OTHER.seed), (tree, FIXTURE.seed)):
        llm.update_weights(source)
        llm.wake_up()
        assert greedy_tokens(llm, PROMPTS) == expected[seed]
        if source is not tree:
            llm.sleep(level=2)


def test_weights_get_another_name_and_nothing_else_changes(llm: LLM) -> None:
    llm.update_weights(FIXTURE.weights(), "first")
    [expected], before = greedy_tokens(llm, LONG), llm.engine.stats().num_preemptions
    running(llm, "named", LONG[0])
    llm.update_weight_version("second")
    with pytest.raises(ValueError, match="version must be a text of 1 to 256 characters"):
        llm.update_weight_version("")
    output = completed(llm)["named"]
    [(_, _, split), _] = versions(output)
    assert versions(output) == [("first", 0, split), ("second", split, len(expected))]
    assert output.token_ids == expected and llm.engine.stats().num_preemptions == before
    assert_idle(llm)


def test_two_hundred_updates_leave_nothing_behind_and_compile_nothing(
    llm: LLM, compilations: Callable[[], AbstractContextManager[Compilations]]
) -> None:
    trees = [llm.weights, jax.tree.map(lambda array: array + 0, llm.weights)]
    llm.update_weights(trees[1])
    greedy_tokens(llm, PROMPTS, 2)

    def update(count: int) -> tuple[int, int]:
        """Updates while a request runs. Returns how many arrays there are then, and how many objects of Python."""
        for number in range(count):
            if number % 50 == 0:
                greedy_tokens(llm, PROMPTS, 2)
                running(llm, f"{count}-{number}", PROMPTS[0])
            llm.update_weights(trees[number % 2], kv=("drop", "keep")[number // 2 % 2])
            for given, held in zip(jax.tree.leaves(trees[number % 2]), jax.tree.leaves(llm.weights), strict=True):
                assert given is held or llm.config.mesh != "1x1"  # the second replica has copies
            if number % 50 == 25:
                completed(llm)
        gc.collect()
        return len(jax.live_arrays()), len(gc.get_objects())

    gc.collect()
    before = len(jax.live_arrays())
    with compilations() as seen:
        num_arrays, num_objects = update(100)
        more_arrays, more_objects = update(100)
    assert seen.count == 0, seen.names
    assert num_arrays <= before and more_arrays <= before
    assert more_objects - num_objects < 100, "each update left something"
    assert_idle(llm)


def without(weights: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {key: array for key, array in weights.items() if key != name}


LAST = "model.layers.2.mlp.down_proj.weight"
BAD: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda w: without(w, LAST), f"lack the tensor {LAST}, which should have shape"),
    (lambda w: w | {LAST: w[LAST].T}, f"tensor {LAST} has shape .*, and the config makes it"),
    (lambda w: w | {LAST: w[LAST].astype(np.int8)}, f"tensor {LAST} has dtype int8: give floating-point"),
    (lambda w: w | {LAST: 5}, f"tensor {LAST} has shape int"),
    (lambda w: w | {"model.extra": w[LAST]}, "unexpected tensor model.extra"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=["missing", "shape", "dtype", "no array", "extra"])
def test_wrong_weights_replace_none(
    change: Callable[[dict[str, Any]], Any], message: str, llm: LLM, expected: dict[int, list[list[int]]]
) -> None:
    llm.update_weights(FIXTURE.weights())
    with pytest.raises(ValueError, match=message):
        llm.update_weights(change(OTHER.weights()))
    assert greedy_tokens(llm, PROMPTS) == expected[FIXTURE.seed]


def test_a_wrong_tree_replaces_nothing(llm: LLM, expected: dict[int, list[list[int]]]) -> None:
    llm.update_weights(FIXTURE.weights())
    tree = llm.weights
    with pytest.raises(ValueError, match="at its root lacks '.*': give one like llm.weights"):
        llm.update_weights({"layers": tree["layers"]})
    with pytest.raises(ValueError, match="weights must be a tree like llm.weights, .* not NoneType"):
        llm.update_weights(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"the given weight \['final_norm'\] is float32\[1\], and the engine's is"):
        llm.update_weights(tree | {"final_norm": np.ones(1, np.float32)})
    assert greedy_tokens(llm, PROMPTS) == expected[FIXTURE.seed]


def test_requests_of_weights_without_a_name_stay(llm: LLM) -> None:
    """Another engine of this model would go on from pages that it would never have computed."""
    llm.update_weights(OTHER.weights())
    engine = llm.engine
    engine.submit(engine.check("stays", list(PROMPTS[1]), GREEDY))
    with pytest.raises(NotImplementedError, match="whose weights were replaced"):
        engine.export_request("stays")
    while engine.has_work:
        engine.step()
    assert_idle(llm)


def test_pages_that_leave_an_engine_have_the_name_of_its_weights(tmp_path: Path) -> None:
    """Two engines keep pages in one directory, and find those of the same version alone."""
    directory = FIXTURE.write_checkpoint(tmp_path / "model")
    kept = json.dumps({"kv_connector": "files", "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}})

    def num_cached(llm: LLM) -> int:
        llm.reset_prefix_cache()
        [output] = llm.generate(LONG, GREEDY, use_tqdm=False)
        for replica in llm.engine.replicas:
            assert replica.traffic is not None
            replica.traffic.wait_until_saved()
        return output.num_cached_tokens

    with tiny_llm(directory, kv_transfer_config=kept) as one, tiny_llm(directory, kv_transfer_config=kept) as two:
        one.engine._moves._page_format().fingerprint  # noqa: B018  # waits until the weights are named
        two.engine._moves._page_format().fingerprint  # noqa: B018
        assert num_cached(one) == 0
        full = num_cached(one)
        assert full > 0 and num_cached(two) == full
        one.update_weights(OTHER.weights(), "second")
        assert (num_cached(one), num_cached(one)) == (0, full)
        assert num_cached(two) == full  # pages of the first weights are still there
        two.update_weights(OTHER.weights(), "second")
        assert num_cached(two) == full
        for llm in (one, two):  # nobody knows that these are the same
            llm.update_weights(FIXTURE.weights())
            assert (num_cached(llm), num_cached(llm)) == (0, full)
        # A request moves between engines whose weights have the same name.
        one.update_weights(OTHER.weights(), "third")
        two.update_weights(OTHER.weights(), "fourth")
        running(one, "moves", LONG[0])
        exported = one.engine.export_request("moves")
        with pytest.raises(ValueError, match="another model, dtype, page or version"):
            two.engine.import_request(exported)
        two.update_weights(OTHER.weights(), "third")
        two.engine.import_request(exported)
        output = completed(two)["moves"]
        assert versions(output) == [("third", 0, len(output.token_ids))]
        assert [output.token_ids] == greedy_tokens(two, LONG)


def test_the_directory_of_a_checkpoint(llm: LLM, expected: dict[int, list[list[int]]], tmp_path: Path) -> None:
    llm.update_weights(OTHER.write_checkpoint(tmp_path / "new"))
    assert greedy_tokens(llm, PROMPTS) == expected[OTHER.seed]
    with pytest.raises(ValueError, match="nowhere"):
        llm.update_weights(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="cannot be read: File name too long"):
        llm.update_weights(tmp_path / ("x" * 300))
    assert greedy_tokens(llm, PROMPTS) == expected[OTHER.seed]
    llm.update_weights(str(FIXTURE.write_checkpoint(tmp_path / "old")))
    assert greedy_tokens(llm, PROMPTS) == expected[FIXTURE.seed]
