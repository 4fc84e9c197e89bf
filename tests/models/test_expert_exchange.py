"""How tokens come to experts and back: each way returns what NumPy computes, whatever tokens have chosen."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from numpy.typing import NDArray

from jaxvllm.models.expert_exchange import ExchangeChoice, sent_by_all_to_all, sent_by_gather, torus_hops
from jaxvllm.models.expert_router import ExpertRouter
from jaxvllm.models.experts import SLOTS, ExpertsFfn
from jaxvllm.models.layer_input import LayerInput
from sharding.axis import ModelAxis
from sharding.mesh import MeshShape
from sharding.placement import make_mesh
from sharding.rules import DATA, MODEL
from sharding.whole_mesh import WholeMesh

pytestmark = pytest.mark.usefixtures("quick_fusions")

NUM_EXPERTS, TOP_K, HIDDEN, INNER = 8, 3, 8, 16
TOKENS = 5  # of each replica, which no two devices can share out evenly
MESHES = ("2x1", "2x2", "4x2")
RANDOM = np.random.default_rng(0)
GATE_UP = RANDOM.normal(size=(NUM_EXPERTS, 2, INNER, HIDDEN)).astype(np.float32)
DOWN = RANDOM.normal(size=(NUM_EXPERTS, HIDDEN, INNER)).astype(np.float32)
STATES = RANDOM.normal(size=(4 * TOKENS, HIDDEN)).astype(np.float32)  # of all replicas
# Two slots more than experts on 2x1, which two experts have copies in. Others have no room for them.
COPIES = np.array([[0, 8], [1, -1], [2, 9], [3, -1], [4, -1], [5, -1], [6, -1], [7, -1]], np.int32)

type Ints = NDArray[np.int32]


def expected(chosen: Ints, counts: NDArray[np.float32], is_real: NDArray[np.bool]) -> NDArray[np.float64]:
    """What experts return for each token, one after the other, in float64."""
    out = np.zeros((len(chosen), HIDDEN))
    for token in np.flatnonzero(is_real):
        for expert, count in zip(chosen[token], counts[token], strict=True):
            if expert >= NUM_EXPERTS:  # it has no matrices, and is no part of this sum
                continue
            gate, up = GATE_UP[expert].astype(np.float64) @ STATES[token]
            out[token] += count * (DOWN[expert] @ (gate / (1 + np.exp(-gate)) * up))
    return out


def on(
    mesh_name: str, *, all_to_all: bool, has_slots: bool = False, num_identities: int = 0
) -> Callable[..., NDArray[np.float32]]:
    """A program for what experts return for the tokens of all replicas, [device of its replica, token, HIDDEN]."""
    shape = MeshShape.parse(mesh_name)
    router = ExpertRouter(HIDDEN, NUM_EXPERTS + num_identities, TOP_K)
    ways = {"is_by_expert": True, "num_replicas": shape.data, "sends_apart": all_to_all}
    whole = ExpertsFfn(HIDDEN, INNER, router, num_identities=num_identities, **ways)  # type: ignore[arg-type]
    ffn = replace(whole, num_redundant=2 if has_slots else None).spread(shape.model).shard(shape.model)
    axis = ModelAxis(shape.model)

    def run(gate_up: jax.Array, down: jax.Array, slots: jax.Array, *tokens: jax.Array) -> jax.Array:
        x, chosen, counts, is_real = tokens
        weights = {"experts_gate_up": gate_up, "experts_down": down, SLOTS: slots}
        step: Any = LayerInput(jnp.arange(len(x)), None, None, None, axis, None, 0, 0, is_real)  # type: ignore[arg-type]
        out = ffn._chosen(weights, x, chosen, counts, step)
        return (out if all_to_all or has_slots else axis.sum(out))[None]

    over_all, over_data = PartitionSpec((DATA, MODEL)), PartitionSpec(DATA)
    specs = (over_all, over_all, PartitionSpec(), *[over_data] * 4)
    mesh = make_mesh(shape, jax.devices())
    program = jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(MODEL, DATA), check_vma=False)
    )
    order = np.r_[0:NUM_EXPERTS, 0, 2] if has_slots else np.arange(NUM_EXPERTS)
    return lambda *tokens: np.asarray(program(GATE_UP[order], DOWN[order], COPIES, *tokens))


WAYS = [(name, True, False) for name in MESHES] + [("2x1", True, True), ("2x2", False, False)]


@pytest.fixture(scope="module", params=WAYS, ids=str)
def computed(request: pytest.FixtureRequest) -> Iterator[tuple[int, Callable[..., NDArray[np.float32]]]]:
    name, all_to_all, has_slots = request.param
    selected = WholeMesh._selected

    def agreed(mesh: WholeMesh, rows: jax.Array, result: jax.Array, sizes: jax.Array) -> jax.Array:
        """Where two devices do not agree how many rows one sends the other, accelerators would hang or read garbage."""
        expected_of_this = jax.lax.all_to_all(sizes[3], (DATA, MODEL), 0, 0, tiled=True)
        is_agreed = (expected_of_this == sizes[1]).all() & (sizes[0] + sizes[1] <= len(rows)).all()
        return jnp.where(is_agreed, selected(mesh, rows, result, sizes), jnp.nan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WholeMesh, "_selected", agreed)
        yield MeshShape.parse(name).data * TOKENS, on(name, all_to_all=all_to_all, has_slots=has_slots)


def distinct(num_tokens: int) -> st.SearchStrategy[list[list[int]]]:
    chosen = st.permutations(range(NUM_EXPERTS)).map(lambda order: order[:TOP_K])
    return st.lists(chosen, min_size=num_tokens, max_size=num_tokens)


ANY = distinct(len(STATES)).map(lambda chosen: np.array(chosen, np.int32))
REAL = st.lists(st.booleans(), min_size=len(STATES), max_size=len(STATES)).map(np.array)
ALL_TO_THE_FIRST = np.tile(np.arange(TOP_K, dtype=np.int32), (len(STATES), 1))
COUNTS = RANDOM.uniform(size=(len(STATES), TOP_K)).astype(np.float32)


@given(chosen=ANY, is_real=REAL)
@example(chosen=ALL_TO_THE_FIRST, is_real=np.ones(len(STATES), bool))
@example(chosen=ALL_TO_THE_FIRST[:, ::-1] + 5, is_real=np.ones(len(STATES), bool))
@example(chosen=ALL_TO_THE_FIRST * 2, is_real=np.ones(len(STATES), bool))  # each goes to three of 2x2
@example(chosen=ALL_TO_THE_FIRST, is_real=np.zeros(len(STATES), bool))
@example(chosen=ALL_TO_THE_FIRST, is_real=np.arange(len(STATES)) >= TOKENS)  # one replica is idle
@settings(max_examples=12, deadline=None)
def test_every_way_returns_what_the_experts_do(
    computed: tuple[int, Callable[..., NDArray[np.float32]]], chosen: Ints, is_real: NDArray[np.bool]
) -> None:
    num_tokens, run = computed
    of_devices = run(*(x[:num_tokens] for x in (STATES, chosen, COUNTS, is_real)))
    for out in of_devices:  # all devices of a replica have it
        np.testing.assert_allclose(out, expected(chosen, COUNTS, is_real)[:num_tokens], rtol=1e-5, atol=1e-5)


def test_experts_without_matrices_are_nowhere() -> None:
    run, count = on("2x2", all_to_all=True, num_identities=2), 2 * TOKENS
    chosen = np.stack([RANDOM.permutation(NUM_EXPERTS + 2)[:TOP_K] for _ in range(count)]).astype(np.int32)
    assert (chosen >= NUM_EXPERTS).any()
    is_real = np.arange(count) != 3
    for out in run(STATES[:count], chosen, COUNTS[:count], is_real):
        np.testing.assert_allclose(out, expected(chosen, COUNTS, is_real), rtol=1e-5, atol=1e-5)


# Eight experts of each token, as in DeepSeek V3: the table of docs/scaling.md.
@pytest.mark.parametrize(
    ("mesh", "gather", "switch", "torus"),
    [
        ("2x1", 2.0, 5.0, 7.1),
        ("2x4", 3.5, 3.6, 5.4),
        ("4x2", 7.0, 6.3, 9.9),
        ("8x1", 14.0, 11.6, 18.7),
        ("4x4", 7.5, 4.1, 8.0),
        ("16x1", 30.0, 13.5, 28.9),
        ("8x8", 15.75, 2.8, 8.7),
        ("32x1", 62.0, 14.7, 42.9),
        ("64x1", 126.0, 15.3, 62.3),
    ],
)
def test_the_way_that_sends_less_is_chosen_on_tpus(mesh: str, gather: float, switch: float, torus: float) -> None:
    replicas, size = MeshShape.parse(mesh).data, MeshShape.parse(mesh).model
    hops = torus_hops(replicas * size)
    assert sent_by_gather(replicas, size) == gather
    assert sent_by_all_to_all(replicas, size, 8, has_shared=False) == pytest.approx(switch, abs=0.05)
    assert sent_by_all_to_all(replicas, size, 8, False, hops) == pytest.approx(torus, abs=0.05)
    assert ExchangeChoice("tpu", size).sends_apart(replicas, 8, False) == (torus < gather)
    assert not ExchangeChoice("gpu", size).sends_apart(replicas, 8, False)
    assert ExchangeChoice("cpu", size, all_to_all=True).sends_apart(replicas, 8, True)
    assert not ExchangeChoice("tpu", size, all_to_all=False).sends_apart(replicas, 8, False)
    assert not ExchangeChoice("tpu", size, all_to_all=True).sends_apart(1, 8, False)


def test_what_is_beside_the_experts_has_a_sum_of_its_own() -> None:
    assert sent_by_all_to_all(4, 4, 8, True) - sent_by_all_to_all(4, 4, 8, False) == pytest.approx(1.5)
    assert ExchangeChoice("tpu", 8).sends_apart(4, 8, False) and not ExchangeChoice("tpu", 8).sends_apart(4, 8, True)
