"""Trains the heads that draft for the embedded demo model: `python -m tools.train_demo_heads --head eagle3`.

The defaults reproduce the files in `jaxvllm/assets`: questions come from a fixed seed, answers and labels are the
target's own, and nothing is downloaded. `--head medusa` trains the other head. `--evaluate` prints, as Markdown,
how many drafted tokens of both heads and of the draft model the target accepts on held-out documents.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from tools.demo_answers import answered
from tools.demo_batches import Batch, Packer
from tools.demo_corpus import TRAINING_SEED
from tools.demo_heads import (
    EAGLE3,
    EMBEDDING,
    MEDUSA,
    Eagle3Shape,
    MedusaShape,
    eagle3_unrolled,
    medusa_logits,
    save_eagle3,
    save_medusa,
)
from tools.demo_model import DEMO, ModelShape, Params, load, residual_states
from tools.demo_optimizer import Moments, start, update
from tools.train_demo_model import ASSETS, schedule

STEPS = {"eagle3": 1600, "medusa": 500}
# How many drafted tokens the EAGLE-3 head is trained to guess, one from the other.
UNROLL = 5
# A later guess matters only where the earlier ones were accepted.
LATER_WEIGHT = 0.8
# The weight of a guess after tokens that the target itself would not have chosen: a draft there was refused before.
ASTRAY_WEIGHT = 0.2
COUNTED_BATCHES = 50

type Loss = Callable[[Params, jax.Array, jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class Target:
    """The model that checks the guesses."""

    shape: ModelShape
    params: Params

    @property
    def embedding(self) -> jax.Array:
        """The embedding f32[V, E], which is the LM head, too."""
        return self.params[EMBEDDING]


def later(values: jax.Array, distance: int) -> jax.Array:
    """Returns the values [B, T, ...] of the positions `distance` later. The last ones are zeros."""
    if distance == 0:
        return values
    return jnp.concatenate([values[:, distance:], jnp.zeros_like(values[:, :distance])], 1)


def path_weights(scored: jax.Array, tokens: jax.Array, segments: jax.Array, weights: jax.Array) -> list[jax.Array]:
    """Returns for s = 0, 1, ..., UNROLL - 1 how much position p's guess of token p + 1 counts f32[B, T] as draft s + 1.

    `scored` f32[B, T, V] are the target's logits, `weights` f32[B, T] those of the packer.
    """
    # Whether token p is what the target would have chosen after token p - 1.
    chosen = jnp.argmax(scored[:, :-1], -1) == tokens[:, 1:]
    follows = jnp.pad(jnp.where(chosen, 1.0, ASTRAY_WEIGHT), ((0, 0), (1, 0)))
    same = jnp.pad(segments[:, 1:] == segments[:, :-1], ((0, 0), (1, 0)))
    on_path = jnp.where(same, follows, 0.0)
    path = weights
    paths = [path]
    for step in range(1, UNROLL):
        moved = jnp.pad(on_path, ((0, 0), (step - 1, 0)))[:, : tokens.shape[1]]
        path = path * moved * LATER_WEIGHT
        paths.append(path)
    return paths


def cross_entropy(scored: jax.Array, labels: jax.Array) -> jax.Array:
    """Computes the cross entropy [...] of logits [..., N] against probabilities [..., N], whose sum may be below 1."""
    return jnp.sum(labels * (jax.nn.logsumexp(scored, -1, keepdims=True) - scored), -1)


def eagle3_loss(
    target: Target, shape: Eagle3Shape, draft_ids: np.ndarray,
    params: Params, tokens: jax.Array, segments: jax.Array, weights: jax.Array,
) -> jax.Array:  # fmt: skip
    """Computes the weighted mean cross entropy of tokens i32[B, T + 1] against the target, in nats.

    Only the probabilities of the draft vocabulary are labels: a position counts as much as the target expects a word
    of it.
    """
    tokens, segments = tokens[:, :-1], segments[:, :-1]
    states, last = residual_states(target.shape, target.params, tokens, segments)
    scored = last @ target.embedding.T
    labels = jax.nn.softmax(scored, -1)[..., draft_ids]
    guesses = eagle3_unrolled(shape, params, target.embedding, tokens, segments, states, UNROLL)
    paths = path_weights(scored, tokens, segments, weights)
    total = sum(jnp.sum(cross_entropy(guess, labels) * path) for guess, path in zip(guesses, paths, strict=True))
    return total / jnp.maximum(sum(jnp.sum(path) for path in paths), 1.0)


def medusa_loss(
    target: Target, shape: MedusaShape, params: Params, tokens: jax.Array, segments: jax.Array, weights: jax.Array
) -> jax.Array:
    """Computes the weighted mean cross entropy of tokens i32[B, T + 1] against the target, in nats."""
    tokens, segments = tokens[:, :-1], segments[:, :-1]
    _, last = residual_states(target.shape, target.params, tokens, segments)
    scored = last @ target.embedding.T
    labels = jax.nn.softmax(scored, -1)
    guesses = medusa_logits(shape, params, target.embedding, last)
    paths = path_weights(scored, tokens, segments, weights)
    total, count = jnp.float32(0), jnp.float32(0)
    for head, guess in enumerate(guesses):
        # Head i at position p guesses what the target chooses after position p + 1 + i.
        path = later(paths[head + 1], head + 1)
        total += jnp.sum(cross_entropy(guess, later(labels, head + 1)) * path)
        count += jnp.sum(path)
    return total / jnp.maximum(count, 1.0)


def _batches(tokenizer: Tokenizer) -> Iterator[Batch]:
    return Packer(tokenizer).batches(answered(ASSETS / "demo", TRAINING_SEED))


def frequent_tokens(tokenizer: Tokenizer, size: int) -> np.ndarray:
    """Returns the ids i64[size] of the most frequent tokens, ascending, by their weight in the target's words."""
    counts = np.zeros(tokenizer.get_vocab_size())
    for batch in islice(_batches(tokenizer), COUNTED_BATCHES):
        np.add.at(counts, batch.tokens[:, 1:].ravel(), batch.weights.ravel())
    return np.sort(np.argsort(-counts, kind="stable")[:size])


@partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def _step(
    loss: Loss, params: Params, moments: Moments, tokens: jax.Array, segments: jax.Array, weights: jax.Array,
    step: jax.Array, scale: jax.Array,
) -> tuple[Params, Moments, jax.Array]:  # fmt: skip
    value, gradients = jax.value_and_grad(loss)(params, tokens, segments, weights)
    return *update(params, gradients, moments, step, scale), value


def train(
    batches: Iterator[Batch], loss: Loss, params: Params, steps: int, save: Callable[[Params], None]
) -> list[float]:
    """Trains for `steps` batches and returns the losses. Saves at every eighth and at the end."""
    moments = start(params)
    print(f"{sum(value.size for value in params.values()):,} parameters, {steps} steps", flush=True)
    began, values = time.monotonic(), []
    for number, batch in enumerate(islice(batches, steps)):
        scale = jnp.float32(schedule(number, steps))
        arrays = map(jnp.asarray, (batch.tokens, batch.segments, batch.weights))
        params, moments, value = _step(loss, params, moments, *arrays, jnp.float32(number + 1), scale)
        values.append(value)
        if (number + 1) % 25 == 0:
            recent = float(np.mean(jax.device_get(values[-25:])))
            print(f"step {number + 1} loss {recent:.4f} seconds {time.monotonic() - began:.0f}", flush=True)
        if (number + 1) % max(1, steps // 8) == 0 or number + 1 == steps:
            save(params)
    return [float(value) for value in values]


def main() -> None:
    """Trains one head or evaluates all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--head", choices=list(STEPS), default="eagle3")
    parser.add_argument("--steps", type=int, help="batches of 2048 tokens (default: as shipped)")
    parser.add_argument("--output", type=Path, default=ASSETS, help="folder of the two heads")
    parser.add_argument("--evaluate", action="store_true", help="evaluate what is on disk instead of training")
    options = parser.parse_args()
    if options.evaluate:
        from tools.demo_acceptance import report

        print(report(ASSETS, options.output))
        return
    tokenizer = Tokenizer.from_file(str(ASSETS / "demo" / "tokenizer.json"))
    target = Target(DEMO, load(ASSETS / "demo", DEMO))
    steps, folder = options.steps or STEPS[options.head], options.output / f"demo-{options.head}"
    if options.head == "eagle3":
        ids = frequent_tokens(tokenizer, EAGLE3.draft_vocab)
        first = EAGLE3.init(TRAINING_SEED, target.params, ids)
        loss = partial(eagle3_loss, target, EAGLE3, ids)
        train(_batches(tokenizer), loss, first, steps, lambda params: save_eagle3(folder, EAGLE3, params, ids))
    else:
        loss = partial(medusa_loss, target, MEDUSA)
        train(_batches(tokenizer), loss, MEDUSA.init(), steps, lambda params: save_medusa(folder, MEDUSA, params))


if __name__ == "__main__":
    main()
