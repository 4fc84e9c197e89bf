"""MTP heads of families with experts, latent attention or states: what each computes, by its block alone."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxvllm.models import checkpoint
from jaxvllm.models.decoder import run_layers
from jaxvllm.models.families import model_spec
from jaxvllm.models.heads.head import DRAFT
from jaxvllm.models.heads.mtp_files import read_mtp
from jaxvllm.models.hf_weights import StoredWeights
from jaxvllm.models.params import Params
from sharding.axis import ALONE
from tests.models.dense import dense_attend
from tests.models.fixture import Fixture
from tests.models.heads.reference import rms_norm
from tests.models.heads.written_mtp import WRITTEN
from tests.quick import quick_compilation


@pytest.fixture(autouse=True, scope="module")
def quick_programs() -> Iterator[None]:
    with quick_compilation():
        yield


@pytest.mark.parametrize("kind", WRITTEN)
def test_a_head_is_its_block_over_what_joins_token_and_feature(kind: str, tmp_path: Path) -> None:
    """The block is loaded as the only layer of a model, which is compared with transformers elsewhere."""
    written = WRITTEN[kind]
    fixture = written.beside(Fixture.load(kind))
    config, tensors = fixture.config, fixture.weights()
    directory = fixture.write_checkpoint(tmp_path / "beside")
    target = model_spec(config)
    StoredWeights.open(directory, config, target)  # the head beside it is nothing unexpected
    [head], own = read_mtp(directory, config, target, 3)
    assert jax.tree.map(lambda decl: decl.shape, head.declare()) == jax.tree.map(np.shape, own["heads"][0])

    names = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} & set(tensors)
    alone = {name: tensors[name] for name in names}
    alone |= {f"model.layers.0.{name}": tensors[written.stored(name)] for name in written.of_block(fixture)}
    alone |= {f"model.layers.0.{name}": zeros for name, zeros in written.silent(fixture).items()}
    (tmp_path / "alone").mkdir()
    save_file(alone, tmp_path / "alone" / "model.safetensors")
    one = model_spec(config | {"num_hidden_layers": 1} | dict(written.alone))
    layer = checkpoint.load(tmp_path / "alone", one, dtype=jnp.float32, layout="separate", hf_config=config)

    random = np.random.default_rng(3)
    T, E = 40, target.hidden_size  # more tokens than a window has
    tokens, features = random.integers(0, target.vocab_size, T), random.standard_normal((T, E))
    table = tensors["model.embed_tokens.weight"].astype(np.float64)
    offset, eps = fixture.norm_offset, target.norm.eps  # type: ignore[attr-defined]

    def normed(x: np.ndarray, name: str) -> np.ndarray:
        return rms_norm(x, tensors[f"{name}.weight"].astype(np.float64) + offset, eps)

    of_embedding, of_feature, join, *last = written.parts
    joined = np.concatenate([normed(table[tokens], of_embedding), normed(features, of_feature)], axis=1)
    x = joined @ tensors[f"{join}.weight"].astype(np.float64).T
    positions = jnp.arange(1, T + 1, dtype=jnp.int32)
    block = jax.jit(lambda layer, x: run_layers(layer, one, x, positions, (), dense_attend)[0])
    after = np.asarray(block(layer, jnp.asarray(x, jnp.float32)), np.float64)
    # ERNIE's has no norm of its own, and was trained on what is before the model's.
    expected = normed(after, last[0] if last else "model.norm")
    following = expected if last else after
    assert head.depths == (() if last else (target.num_layers,))
    lm_head = tensors.get("lm_head.weight", table).astype(np.float64)

    params = layer | {DRAFT: jax.tree.map(jnp.asarray, own)}

    @jax.jit
    def thought(params: Params, tokens: jax.Array, features: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        hidden, after, _ = head.apply(params, tokens, positions, features, (), dense_attend, ALONE)
        return hidden, after, head.logits(params, hidden, target, target, ALONE)

    hidden, feature, logits = thought(params, jnp.asarray(tokens, jnp.int32), jnp.asarray(features, jnp.float32))
    np.testing.assert_allclose(feature, following, rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(hidden, expected, rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(logits, expected @ lm_head.T, rtol=2e-4, atol=5e-4)


def test_heads_that_share_all_but_their_blocks(tmp_path: Path) -> None:
    fixture = WRITTEN["qwen3_5"].beside(Fixture.load("qwen3_5"))
    start = "mtp.layers.0."
    another = {name.replace(".0.", ".1.", 1): shape for name, shape in fixture.shapes.items() if name.startswith(start)}
    config = fixture.config | {"mtp_num_hidden_layers": 2}
    fixture = replace(fixture, config=config, shapes=fixture.shapes | another)
    directory, target = fixture.write_checkpoint(tmp_path / "two"), model_spec(config)
    [_], _ = read_mtp(directory, config, target, 1)
    heads, own = read_mtp(directory, config, target, 3)
    assert [head.number for head in heads] == [0, 1]
    first, second = own["heads"]
    np.testing.assert_array_equal(first["fc"], second["fc"])
    assert (first["layers"][0]["o"] != second["layers"][0]["o"]).any()

    more = replace(fixture, shapes=fixture.shapes | {"mtp.embed_tokens.weight": [139, 48]})
    directory = more.write_checkpoint(tmp_path / "more")
    with pytest.raises(ValueError, match=r"unexpected tensor mtp\.embed_tokens\.weight"):
        read_mtp(directory, config, target, 1)


def test_a_model_whose_blocks_are_of_another_kind_is_refused(tmp_path: Path) -> None:
    fixture = Fixture.load("afmoe")
    config = fixture.config | {"num_nextn_predict_layers": 1}
    with pytest.raises(ValueError, match="not those of AfmoeForCausalLM"):
        read_mtp(tmp_path, config, model_spec(config), 1)
