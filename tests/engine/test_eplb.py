"""Experts that move by load while an engine serves: the same tokens, and nothing is compiled."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm import LLM
from jaxvllm.config import EngineConfig
from jaxvllm.models import checkpoint
from jaxvllm.models.decoder import embed_tokens, run_layers
from jaxvllm.models.families import model_spec
from tests.conftest import Compilations
from tests.engine.tiny import GREEDY, assert_idle, greedy_tokens, one_program, tiny_llm
from tests.models.dense import dense_attend
from tests.models.fixture import Fixture
from tests.quick import programs_in_advance

# An expert beside the others, and layers without experts between.
FIXTURE = Fixture.load("qwen2_moe")
NUM_EXPERTS = 6
EPLB = {"num_redundant_experts": 2, "step_interval": 6, "window_size": 4}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FIXTURE.write_checkpoint(tmp_path_factory.mktemp("experts"))


# Nothing is guessed, so that each program is one of the model.
OPTIONS: dict[str, Any] = {
    "max_model_len": FIXTURE.max_model_len,
    "enable_prefix_caching": False,
    "speculation": False,
}


# The mesh, and how tokens come to experts that replicas share.
WAYS = [
    ("1x2", None),
    ("2x2", None),
    pytest.param(("2x2", "ragged_all_to_all"), marks=pytest.mark.slow),
    pytest.param(("2x1x2", None), marks=pytest.mark.slow),
    pytest.param(("2x2x1", None), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=WAYS, ids=str)
def llm(request: pytest.FixtureRequest, directory: Path) -> Iterator[LLM]:
    mesh, all2all_backend = request.param
    options = OPTIONS | {"mesh": mesh, "enable_expert_parallel": True, "enable_eplb": True}
    options["all2all_backend"] = all2all_backend
    with ExitStack() as stack:
        if mesh == "1x2":  # which has the program of bursts, and prompts longer than a tile of attention
            options |= {"max_num_batched_tokens": 64, "token_buckets": (64,)}
        else:  # replicas that share, and stages
            stack.enter_context(one_program())
        with programs_in_advance():
            llm = tiny_llm(directory, eplb_config=EPLB, **options)
        yield stack.enter_context(llm)


def placed(llm: LLM) -> list[list[int]]:
    """The expert in each slot of each layer."""
    slots = [holder.expert_slots for holder in llm.engine.holders]
    return [held.tolist() for one in slots if one is not None for held in one.held.values()]


def test_tokens_stay_when_experts_move(
    llm: LLM, compilations: Callable[[], AbstractContextManager[Compilations]]
) -> None:
    first = placed(llm)
    assert all(set(held) == set(range(NUM_EXPERTS)) for held in first)  # and no slot is empty
    num_placements = llm.engine.stats().num_expert_placements
    params = replace(GREEDY, logprobs=3)
    seen_bits, seen_places = [], [first]
    with compilations() as seen:
        for prompts in (FIXTURE.prompts, FIXTURE.prompts[:2] * 4, FIXTURE.prompts):
            expected = [FIXTURE.greedy[FIXTURE.prompts.index(prompt)] for prompt in prompts]
            assert greedy_tokens(llm, prompts) == expected
            [output] = llm.generate(FIXTURE.prompts[3], params, use_tqdm=False)
            seen_bits.append([one.logprob for best in output.outputs[0].logprobs or () for one in best.values()])
            seen_places.append(placed(llm))
    assert seen.count == 0, seen.names
    assert seen_bits[0] == seen_bits[1] == seen_bits[2]
    assert any(one != first for one in seen_places)
    stats = llm.engine.stats()
    assert stats.num_expert_placements > num_placements
    assert 0 < stats.mean_expert_load < stats.most_expert_load
    assert_idle(llm)


def test_weights_that_are_replaced_are_placed_again(llm: LLM) -> None:
    llm.update_weights(replace(FIXTURE, seed=FIXTURE.seed + 1).weights())
    others = greedy_tokens(llm, FIXTURE.prompts)
    assert others != FIXTURE.greedy
    llm.update_weights(FIXTURE.weights())
    assert all(set(held) >= set(range(NUM_EXPERTS)) for held in placed(llm))
    assert greedy_tokens(llm, FIXTURE.prompts) == FIXTURE.greedy


@pytest.fixture(scope="module")
def choices(directory: Path) -> Callable[[list[int]], dict[int, list[int]]]:
    """How many of some tokens choose each expert, by the number of the layer: without pages, and counted by NumPy."""
    spec = model_spec(checkpoint.read_config(directory), FIXTURE.max_model_len)
    params = checkpoint.load(directory, spec, dtype=jnp.float32, layout="separate")

    @jax.jit
    def chosen(tokens: jax.Array) -> jax.Array:
        nobody = jnp.full((spec.num_layers, len(tokens), 3), -1, jnp.int32)
        positions = jnp.arange(len(tokens), dtype=jnp.int32)
        x = embed_tokens(params, spec, tokens, positions)
        note = lambda noted, chosen, number: noted.at[number].set(chosen)  # noqa: E731
        return run_layers(params, spec, x, positions, nobody, dense_attend, count=note)[2]

    def count(tokens: list[int]) -> dict[int, list[int]]:
        padded = np.zeros(128, np.int32)
        padded[: len(tokens)] = tokens
        layers = enumerate(np.asarray(chosen(padded))[:, : len(tokens)])
        return {
            layer: np.bincount(one.ravel(), minlength=NUM_EXPERTS).tolist() for layer, one in layers if one.min() >= 0
        }

    return count


def test_loads_are_those_of_the_choices(llm: LLM, choices: Callable[[list[int]], dict[int, list[int]]]) -> None:
    before = llm.expert_loads()
    for prompt in (*FIXTURE.prompts[4:6], FIXTURE.prompts[7]):
        [tokens] = greedy_tokens(llm, [prompt], max_tokens=4)
        loads = llm.expert_loads()
        assert {layer: (loads[layer] - before[layer]).tolist() for layer in loads} == choices([*prompt, *tokens[:-1]])
        before = loads


def test_options_that_cannot_be(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="enable_eplb moves whole experts .*: set enable_expert_parallel"):
        EngineConfig(enable_eplb=True)
    with pytest.raises(ValueError, match="eplb_config says how experts move, and enable_eplb is off"):
        EngineConfig(eplb_config="{}")
    with pytest.raises(ValueError, match="eplb_config num_redundant_experts must be .* from 0 to 65536, not -1"):
        EngineConfig(enable_expert_parallel=True, enable_eplb=True, eplb_config='{"num_redundant_experts": -1}')
    options: dict[str, Any] = {"enable_expert_parallel": True, "enable_eplb": True}
    with pytest.raises(ValueError, match="6 experts and 3 redundant ones do not divide over 2 devices"):
        LLM(str(directory), mesh="1x2", eplb_config='{"num_redundant_experts": 3}', **options)
    dense = Fixture.load("qwen3").write_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="count_expert_loads needs a model with experts, and this one has none"):
        LLM(str(dense), count_expert_loads=True)
