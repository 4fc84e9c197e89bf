"""Weights that replace those of a running engine: as if it had been started with them, and all of them or none."""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxvllm import LLM
from tests.conftest import Compilations
from tests.engine.tiny import GREEDY, assert_idle, greedy_tokens, tiny_llm
from tests.jax_cache import same_programs_once
from tests.models.fixture import Fixture

FIXTURE = Fixture.load("llama")
# The same model after a training that forgot everything.
OTHER = replace(FIXTURE, seed=FIXTURE.seed + 1)
PROMPTS = [FIXTURE.prompts[2], FIXTURE.prompts[5]]
LONG = [FIXTURE.prompts[6]]  # of several pages


@pytest.fixture(scope="module", params=["1x1", "2x4"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory = FIXTURE.write_checkpoint(tmp_path_factory.mktemp("first"))
    if request.param == "1x1":
        with tiny_llm(directory) as llm:
            yield llm
        return
    # Both replicas have the same programs.
    with same_programs_once(), tiny_llm(directory, mesh=request.param, compilation_cache=None) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[list[int]]]:
    """What engines that start with the weights of a seed say."""
    found = {}
    for fixture in (FIXTURE, OTHER):
        directory = fixture.write_checkpoint(tmp_path_factory.mktemp("other"))
        with tiny_llm(directory) as llm:
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
    llm.update_weights(jax.tree.map(np.asarray, first))
    assert greedy_tokens(llm, PROMPTS) == expected[FIXTURE.seed]


def test_in_the_middle_of_a_request(llm: LLM, expected: dict[int, list[list[int]]]) -> None:
    """Its text stays. All its tokens are computed again, and the rest is what the new weights say after them."""
    llm.update_weights(FIXTURE.weights())
    engine, prompt = llm.engine, list(PROMPTS[1])
    engine.submit(engine.check("long", prompt, GREEDY))
    outputs = []
    while not outputs:
        outputs += engine.step()
    llm.update_weights(OTHER.weights())
    while engine.has_work:
        outputs += engine.step()
    tokens = outputs[-1].outputs[0].token_ids
    assert len(tokens) == GREEDY.max_tokens
    split = next(i for i, (one, two) in enumerate(zip(tokens, expected[FIXTURE.seed][1], strict=True)) if one != two)
    assert split > 0
    [again] = greedy_tokens(llm, [[*prompt, *tokens[:split]]], max_tokens=len(tokens) - split)
    assert again == tokens[split:]
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
    with pytest.raises(ValueError, match="other arrays than the engine's: give one like llm.weights"):
        llm.update_weights({"layers": tree["layers"]})
    with pytest.raises(ValueError, match=r"the given weight \['final_norm'\] is float32\[1\], and the engine's is"):
        llm.update_weights(tree | {"final_norm": np.ones(1, np.float32)})
    assert greedy_tokens(llm, PROMPTS) == expected[FIXTURE.seed]


def test_requests_of_replaced_weights_stay(llm: LLM) -> None:
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
    directory = FIXTURE.write_checkpoint(tmp_path / "model")
    kept = json.dumps({"kv_connector": "files", "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}})
    with tiny_llm(directory, kv_transfer_config=kept) as llm:
        with pytest.raises(NotImplementedError, match="kv_connector files keeps pages of other weights"):
            llm.update_weights(OTHER.weights())


def test_the_directory_of_a_checkpoint(llm: LLM, expected: dict[int, list[list[int]]], tmp_path: Path) -> None:
    llm.update_weights(OTHER.write_checkpoint(tmp_path / "new"))
    assert greedy_tokens(llm, PROMPTS) == expected[OTHER.seed]
    with pytest.raises(ValueError, match="nowhere"):
        llm.update_weights(tmp_path / "nowhere")
    assert greedy_tokens(llm, PROMPTS) == expected[OTHER.seed]
    llm.update_weights(str(FIXTURE.write_checkpoint(tmp_path / "old")))
    assert greedy_tokens(llm, PROMPTS) == expected[FIXTURE.seed]
