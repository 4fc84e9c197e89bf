"""The plain-JAX heads of the demo model draft as they were trained, learn, and are stored as vLLM reads them."""

import json
from functools import partial
from itertools import repeat
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from tools import demo_model
from tools.demo_acceptance import Continuation, Score, eagle3_guesses, medusa_guesses, scores
from tools.demo_batches import Batch
from tools.demo_heads import (
    EAGLE3,
    EMBEDDING,
    MEDUSA,
    Eagle3Shape,
    MedusaShape,
    eagle3_draft,
    eagle3_features,
    eagle3_pass,
    eagle3_unrolled,
    features_before,
    load_eagle3,
    load_medusa,
    medusa_logits,
    save_eagle3,
    save_medusa,
)
from tools.demo_model import DEMO, ModelShape, decode, load, logits
from tools.train_demo_heads import ASSETS, Target, eagle3_loss, medusa_loss, path_weights, train

pytestmark = pytest.mark.usefixtures("quick_programs")

TARGET = ModelShape(hidden=16, layers=3, heads=2, kv_heads=1, head_size=8, ffn=16)
HEAD = Eagle3Shape(hidden=16, heads=4, kv_heads=2, head_size=8, ffn=8, draft_vocab=32, aux_layers=(1, 2, 3))
MEDUSAS = MedusaShape(hidden=16, heads=2)
# One program each compiles sooner than their many operations.
residual_states = jax.jit(demo_model.residual_states, static_argnums=0)
unroll = jax.jit(eagle3_unrolled, static_argnums=(0, 6))
DRAFT_IDS = np.sort(np.random.default_rng(3).permutation(2048)[:32])


@pytest.fixture(scope="module")
def target() -> Target:
    """A model that is sure of what it says, though it never learnt anything."""
    params = TARGET.init(1)
    return Target(TARGET, params | {EMBEDDING: 40 * params[EMBEDDING]})


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(ASSETS / "demo" / "tokenizer.json"))


def test_an_unrolled_guess_is_a_pass_over_real_and_drafted_features(target: Target) -> None:
    """Each guess of the training's unrolled form equals the simple loop of an engine, whatever else is in the row."""
    params = HEAD.init(2, target.params, DRAFT_IDS)
    tokens = jnp.asarray(np.random.default_rng(4).integers(0, 2048, (1, 13)), jnp.int32)
    segments = jnp.asarray([[1] * 5 + [2] * 8])
    states, _ = residual_states(TARGET, target.params, tokens, segments)
    unrolled = unroll(HEAD, params, target.embedding, tokens, segments, states, 4)
    own = tokens[0, 5:]
    # The second document alone has other positions than after the first one. RoPE sees their differences only.
    alone, _ = residual_states(TARGET, target.params, own[None], jnp.ones_like(own[None]))
    real = features_before(eagle3_features(HEAD, params, [state[0] for state in alone]))
    for last in (1, 2, 4):
        features = real
        for at in range(last, last + 4):
            scored, x = eagle3_pass(HEAD, params, target.embedding, own, features)
            np.testing.assert_allclose(scored[at], unrolled[at - last][0, 5 + at], rtol=2e-4, atol=2e-4)
            # A drafted token has no feature of the target's. What stands after it changes nothing before it.
            features = features.at[at + 1 :].set(x[at])


def test_a_draft_is_the_best_of_each_pass(target: Target) -> None:
    params = HEAD.init(2, target.params, DRAFT_IDS)
    known = np.random.default_rng(5).integers(0, 2048, 9).tolist()
    drafted = eagle3_draft(HEAD, params, DRAFT_IDS, target.embedding, known, _states(target, known), 3)
    assert len(drafted) == 3
    assert set(drafted) <= set(DRAFT_IDS.tolist())
    # The same tokens, seen by the unrolled form as a text that is there already.
    tokens = jnp.asarray([known + drafted])
    states = [jnp.concatenate([state, jnp.zeros((4, 16))])[None] for state in _states(target, known)]
    unrolled = unroll(HEAD, params, target.embedding, tokens, jnp.ones_like(tokens), states, 3)
    assert drafted == [int(DRAFT_IDS[jnp.argmax(unrolled[step][0, 8 + step])]) for step in range(3)]


def _states(target: Target, known: list[int]) -> list[jax.Array]:
    """The target's states of all tokens but the last, which is sampled and not computed."""
    tokens = jnp.asarray([known[:-1]])
    states, _ = residual_states(TARGET, target.params, tokens, jnp.ones_like(tokens))
    return [state[0] for state in states]


def test_untrained_medusa_heads_repeat_the_lm_head(target: Target) -> None:
    tokens = jnp.asarray(np.random.default_rng(6).integers(0, 2048, (1, 7)), jnp.int32)
    _, last = residual_states(TARGET, target.params, tokens, jnp.ones_like(tokens))
    for scored in medusa_logits(MEDUSAS, MEDUSAS.init(), target.embedding, last):
        np.testing.assert_allclose(
            scored, logits(TARGET, target.params, tokens, jnp.ones_like(tokens)), rtol=1e-5, atol=1e-5
        )


def test_a_guess_counts_as_much_as_the_path_to_it() -> None:
    """Compared with a loop: own words times 0.8 for each earlier draft, 0.2 for each that the target would refuse."""
    rng = np.random.default_rng(7)
    tokens = jnp.asarray(rng.integers(0, 3, (2, 12)))
    segments = jnp.asarray([[1] * 5 + [2] * 7, [1] * 12])
    scored = jnp.asarray(rng.standard_normal((2, 12, 3)))
    weights = jnp.asarray(rng.choice([0.0, 0.2, 1.0], (2, 12)))
    paths = path_weights(scored, tokens, segments, weights)
    for step, path in enumerate(paths):
        for row in range(2):
            for at in range(12):
                expected = float(weights[row, at])
                for drafted in range(at - step + 1, at + 1):
                    if drafted < 1 or segments[row, drafted] != segments[row, drafted - 1]:
                        expected = 0.0
                        break
                    agreed = int(jnp.argmax(scored[row, drafted - 1])) == int(tokens[row, drafted])
                    expected *= 0.8 * (1.0 if agreed else 0.2)
                assert float(path[row, at]) == pytest.approx(expected), (step, row, at)


def test_both_heads_learn(target: Target, tmp_path: Path) -> None:
    """Steps over one batch lower both losses, and the file that a run leaves has its last parameters."""
    tokens = np.random.default_rng(8).integers(0, 2048, (2, 17), np.int32)
    batch = Batch(tokens, np.ones_like(tokens), np.ones((2, 16), np.float32))
    first = HEAD.init(2, target.params, DRAFT_IDS)
    started = np.asarray(first["fc.weight"])
    eagle3 = partial(eagle3_loss, target, HEAD, DRAFT_IDS)
    losses = train(repeat(batch), eagle3, first, 16, lambda params: save_eagle3(tmp_path, HEAD, params, DRAFT_IDS))
    assert losses[-1] < 0.8 * losses[0]
    assert np.abs(np.asarray(load_eagle3(tmp_path, HEAD)[0]["fc.weight"]) - started).max() > 0.001
    saved: list[int] = []
    losses = train(
        repeat(batch), partial(medusa_loss, target, MEDUSAS), MEDUSAS.init(), 41, lambda params: saved.append(1)
    )
    assert losses[-1] < 0.95 * losses[0]
    assert len(saved) == 9  # Every fifth step, and the last one.


def test_a_stored_eagle3_head_has_the_names_and_shapes_of_its_format(target: Target, tmp_path: Path) -> None:
    params = HEAD.init(2, target.params, DRAFT_IDS)
    save_eagle3(tmp_path, HEAD, params, DRAFT_IDS)
    stored = load_file(tmp_path / "model.safetensors")
    d2t, t2d = stored.pop("d2t"), stored.pop("t2d")
    assert {name: value.shape for name, value in stored.items()} == HEAD.tensors()
    assert {value.dtype for value in stored.values()} == {np.dtype(ml_dtypes.bfloat16)}
    assert (d2t.dtype, t2d.dtype, t2d.shape) == (np.int64, np.bool_, (2048,))
    np.testing.assert_array_equal(np.flatnonzero(t2d), np.arange(32) + d2t)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert (config["draft_vocab_size"], config["vocab_size"]) == (32, 2048)
    again, _ = load_eagle3(tmp_path, HEAD)
    for name, value in params.items():
        np.testing.assert_array_equal(again[name], value.astype(jnp.bfloat16).astype(jnp.float32))


def test_stored_medusa_heads_have_the_names_and_shapes_of_their_format(tmp_path: Path) -> None:
    save_medusa(tmp_path, MEDUSAS, MEDUSAS.init())
    stored = load_file(tmp_path / "model.safetensors")
    assert {name: value.shape for name, value in stored.items()} == {
        "blocks.0.layers.0.weight": (16, 16),
        "blocks.0.layers.0.bias": (16,),
        "blocks.1.layers.0.weight": (16, 16),
        "blocks.1.layers.0.bias": (16,),
    }
    assert json.loads((tmp_path / "config.json").read_text())["original_lm_head"] is True
    assert load_medusa(tmp_path, MEDUSAS).keys() == stored.keys()


def test_a_draft_is_right_up_to_its_first_wrong_token() -> None:
    """Token p is p, and the guess of token p + 1 as drafted token s + 1 is right where p + s is no multiple of 5."""

    def guess(tokens: jax.Array) -> list[jax.Array]:
        return [jnp.where((jnp.arange(tokens.shape[1]) + step) % 5 == 0, 0, tokens + 1) for step in range(3)]

    [score] = scores(guess, [Continuation("story", np.arange(12, dtype=np.int32), prompt=4)])
    assert score.right.tolist() == [3, 0, 2, 3, 1, 2, 0, 0]
    assert score.possible.tolist() == [6, 6, 5, 4, 3, 2, 1, 0]
    # The steps begin after the tokens number 0, 3 and 6 of the continuation with two drafts, else 0, 4 and 6.
    assert score.tokens_per_step(2) == (7, 3)
    assert score.tokens_per_step(3) == (7, 3)
    assert score.tokens_per_step(0) == (7, 7)
    assert Score(np.asarray([0]), np.asarray([0])).tokens_per_step(2) == (0, 0)


def test_the_shipped_heads_guess_for_the_shipped_model(tokenizer: Tokenizer) -> None:
    """The first guess of both is right for many tokens of what the model says."""
    demo = Target(DEMO, load(ASSETS / "demo", DEMO))
    prompt = tokenizer.encode("<|bos|>Once upon a time", add_special_tokens=False).ids
    tokens = np.asarray([prompt + decode(DEMO, demo.params, [prompt], 48, -1)[0]], np.int32)
    params, draft_ids = load_eagle3(ASSETS / "demo-eagle3", EAGLE3)
    eagle3 = jax.jit(partial(eagle3_guesses, demo.params, params, draft_ids))(jnp.asarray(tokens))
    medusa = medusa_guesses(demo.params, load_medusa(ASSETS / "demo-medusa", MEDUSA), jnp.asarray(tokens))
    # 70% and 50% on held-out stories.
    for guessed, least in ((eagle3[0], 0.5), (medusa[0], 0.3)):
        assert np.mean(np.asarray(guessed)[0, len(prompt) : -1] == tokens[0, len(prompt) + 1 :]) > least
    # What the unrolled form guesses is what drafting one token after the other gives.
    states, _ = residual_states(DEMO, demo.params, jnp.asarray(tokens), jnp.ones_like(jnp.asarray(tokens)))
    known = tokens[0, :30].tolist()
    drafted = eagle3_draft(EAGLE3, params, draft_ids, demo.embedding, known, [one[0] for one in states], 2)
    assert drafted[0] == int(eagle3[0][0, 29])
