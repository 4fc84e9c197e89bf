"""The flax module over an engine's arrays: the same bits, derivatives, training, and what is saved."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from flax import nnx

from jaxvllm import LLM, SamplingParams
from jaxvllm.flax import EngineModule
from jaxvllm.models.families import model_spec
from jaxvllm.models.kv_scales import with_kv_scales
from jaxvllm.models.params import Layout, abstract_params
from jaxvllm.models.trained_model import TrainedModel
from pallas_kernels.backend import REFERENCE
from sharding.mesh import MeshShape
from sharding.placement import make_mesh
from tests.conftest import Compilations
from tests.engine.tiny import greedy_tokens, random_prompts, tiny_llm, write_tiny_checkpoint
from tests.models.fixture import Fixture
from tests.quick import earlier_emitters, programs_on_demand, quick_compilation


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    """Compiled as it is served, because its bits are compared. In 16 bits it shows where XLA does not round."""
    sizes = dict(max_num_seqs=16, max_num_batched_tokens=64, row_buckets=(16,), token_buckets=(64,), num_pages=257)
    with programs_on_demand(), tiny_llm(directory, dtype="bfloat16", attention_backend="cpu", **sizes) as llm:
        yield llm


def test_parameters_are_the_engines_arrays(llm: LLM) -> None:
    module = EngineModule.of(llm)
    held = {id(x) for x in jax.tree.leaves(nnx.state(module, nnx.Param))}
    assert held == {id(x) for x in jax.tree.leaves(llm.weights)}
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(llm.weights)]
    state = nnx.state(module)
    for source in (module, module.tree(), state, nnx.to_pure_dict(state)):
        llm.update_weights(source)
        found = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(llm.weights)]
        assert found == pointers, "what is in place is not copied"


@pytest.mark.parametrize("layout", ["separate", "stacked"])
def test_floats_that_are_not_trained_are_no_parameters(layout: Layout) -> None:
    fixture = Fixture.load("deepseek_v3")
    spec, mesh = model_spec(fixture.config), make_mesh(MeshShape(1, 1), jax.devices())
    spec = with_kv_scales(spec)
    weights = jax.tree.map(lambda of: jnp.zeros(of.shape, of.dtype), abstract_params(spec, "float32", layout, mesh))
    module = EngineModule(weights, TrainedModel.of(weights, spec, mesh, REFERENCE), Path())
    others = nnx.to_flat_state(nnx.state(module, nnx.Not(nnx.Param)))
    assert {path[-1] for path, _ in others} == {"kv_scales", "router_choice"}
    assert jax.tree.structure(module.tree()) == jax.tree.structure(weights)


def test_a_trainer_has_the_bits_of_the_engine(llm: LLM) -> None:
    """Of prompts and of what was sampled, 1,000 tokens, computed in chunks and one by one."""
    module = EngineModule.of(llm)
    prompts = random_prompts(16, longest=70, seed=5)
    params = SamplingParams(temperature=1, seed=1, max_tokens=40, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    rows = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
    width = max(map(len, rows))
    tokens, is_real = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), bool)
    for number, row in enumerate(rows):  # padding to the left and to the right of them
        first = number % 2 * (width - len(row))
        tokens[number, first : first + len(row)], is_real[number, first : first + len(row)] = row, True
    graph, state = nnx.split(module)

    def loss(state: nnx.State) -> tuple[jax.Array, jax.Array]:
        found = nnx.merge(graph, state).logprobs(jnp.asarray(tokens), None, jnp.asarray(is_real))
        return jnp.where(is_real[:, 1:], found, 0).sum(), found

    # As a trainer computes them: in the forward pass of a program that has derivatives.
    step = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=module.compiler_options)
    (_, values), _ = step(state)
    found = np.asarray(values)
    count = 0
    for number, output in enumerate(outputs):
        of_prompt = [next(iter(at.values())).logprob for at in output.prompt_logprobs[1:]]
        of_output = [next(iter(at.values())).logprob for at in output.outputs[0].logprobs]
        first = int(is_real[number].argmax())
        engine = np.asarray(of_prompt + of_output, np.float32)
        np.testing.assert_array_equal(found[number, first : first + len(engine)], engine)
        count += len(engine)
    assert count >= 1000


def test_sequences_that_share_a_row_see_their_own_tokens_only(directory: Path) -> None:
    module = EngineModule.load(directory)
    one, other = (jax.random.randint(jax.random.key(seed), (1, 9), 0, 250, jnp.int32) for seed in (1, 2))
    compute = jax.jit(lambda *given: module(*given))
    apart = [np.asarray(compute(x)) for x in (one, other)]
    together = jnp.concatenate([one, jnp.zeros((1, 3), jnp.int32), other], axis=1)
    segments = jnp.asarray([[1] * 9 + [0] * 3 + [2] * 9], jnp.int32)
    found = np.asarray(compute(together, None, segments))
    np.testing.assert_allclose(found[:, :9], apart[0], atol=1e-4)
    np.testing.assert_allclose(found[:, 12:], apart[1], atol=1e-4)
    np.testing.assert_array_equal(compute(one[0]), apart[0][0])  # a row without a batch
    with pytest.raises(ValueError, match=r"positions must have the shape \(1, 9\) of the tokens"):
        module(one, jnp.arange(9))


def trained(module: EngineModule, tokens: jax.Array, steps: int, rate: float = 0.05) -> list[float]:
    """Trains in place by plain gradient descent, and returns the losses."""

    def loss(module: EngineModule) -> jax.Array:
        return -module.logprobs(tokens).mean()

    @nnx.jit
    def step(module: EngineModule) -> jax.Array:
        value, grads = nnx.value_and_grad(loss)(module)
        state = nnx.state(module, nnx.Param)
        nnx.update(module, jax.tree.map(lambda x, of: x - rate * of, state, grads))
        return value

    with quick_compilation(), earlier_emitters():
        return [float(step(module)) for _ in range(steps)]


def test_training_changes_what_is_served_and_saved(
    llm: LLM, tmp_path: Path, compilations: Callable[[], AbstractContextManager[Compilations]]
) -> None:
    before = llm.weights
    try:
        module = EngineModule.of(llm)
        prompt = random_prompts(1, longest=16, seed=9)[0]
        tokens = jnp.asarray([[*prompt, *range(50, 70)]], jnp.int32)
        losses = trained(module, tokens, 30)
        assert losses[-1] < 0.2 < 3 < losses[0]
        assert greedy_tokens(llm, [prompt], 20) != [list(range(50, 70))]  # and every step is compiled
        with compilations() as seen:
            llm.update_weights(module.tree())
            assert greedy_tokens(llm, [prompt], 20) == [list(range(50, 70))]
        assert seen.count == 0, seen.names
        module.save(tmp_path / "new")
        # The same numbers by the names of a checkpoint.
        expected = llm.weights
        llm.update_weights(tmp_path / "new")
        for one, other in zip(jax.tree.leaves(llm.weights), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(one, other)
    finally:
        llm.update_weights(before)


def test_orbax_keeps_a_module(llm: LLM, tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    module = EngineModule.of(llm)
    graph, state = nnx.split(module)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.tree.map(jnp.zeros_like, state))
    again = nnx.merge(graph, restored)
    for one, other in zip(jax.tree.leaves(again.tree()), jax.tree.leaves(llm.weights), strict=True):
        np.testing.assert_array_equal(one, other)


def test_optax_trains_a_module_on_a_mesh(directory: Path) -> None:
    import optax

    module = EngineModule.load(directory, mesh="2x1")
    tokens = jax.random.randint(jax.random.key(3), (2, 24), 0, 250, jnp.int32)
    optimizer = nnx.Optimizer(module, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(module: EngineModule, optimizer: nnx.Optimizer) -> jax.Array:
        value, grads = nnx.value_and_grad(lambda module: -module.logprobs(tokens).mean())(module)
        optimizer.update(module, grads)
        return value

    with quick_compilation(), earlier_emitters(), jax.numpy_dtype_promotion("standard"):  # optax needs it
        losses = [float(step(module, optimizer)) for _ in range(8)]
        loss = -float(module.logprobs(tokens).mean())  # without a program of the caller's
    assert loss < losses[-1] < losses[0] / 2
