"""Trains the embedded demo model and its draft: `python -m tools.train_demo_model`.

The defaults reproduce the files in `jaxvllm/assets`: corpus, tokenizer and weights come from fixed seeds, and
nothing is downloaded. `--model draft` trains the draft with the tokenizer that the demo model saved.
`--evaluate` prints held-out losses, rates and samples of the models on disk, as Markdown.
"""

import argparse
import math
import time
from functools import partial
from itertools import islice
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from tools.demo_batches import Packer
from tools.demo_corpus import TRAINING_SEED, Corpus
from tools.demo_model import DEMO, DRAFT, ModelShape, Params, logits, save
from tools.demo_optimizer import Moments, start, update
from tools.demo_tokenizer import train_tokenizer

ASSETS = Path(__file__).resolve().parent.parent / "jaxvllm" / "assets"
SHAPES = {"demo": DEMO, "draft": DRAFT}
FOLDERS = {"demo": "demo", "draft": "demo-draft"}
STEPS = {"demo": 5000, "draft": 2500}
TOKENIZER_DOCUMENTS = 20_000
WARM_UP_STEPS = 40


def loss(shape: ModelShape, params: Params, tokens: jax.Array, segments: jax.Array, weights: jax.Array) -> jax.Array:
    """Computes the weighted mean cross entropy, in nats, of tokens i32[B, T + 1] given those before them."""
    scored = logits(shape, params, tokens[:, :-1], segments[:, :-1])
    chosen = jnp.take_along_axis(scored, tokens[:, 1:, None], -1)[..., 0]
    return jnp.sum((jax.nn.logsumexp(scored, -1) - chosen) * weights) / jnp.maximum(jnp.sum(weights), 1.0)


@partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def _step(
    shape: ModelShape, params: Params, moments: Moments, tokens: jax.Array, segments: jax.Array, weights: jax.Array,
    step: jax.Array, schedule: jax.Array,
) -> tuple[Params, Moments, jax.Array]:  # fmt: skip
    value, gradients = jax.value_and_grad(partial(loss, shape))(params, tokens, segments, weights)
    return *update(params, gradients, moments, step, schedule), value


def schedule(step: int, steps: int) -> float:
    """Returns the share of the learning rate at a step: linear warm-up, then a cosine to 2%."""
    if step < WARM_UP_STEPS:
        return (step + 1) / WARM_UP_STEPS
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - WARM_UP_STEPS) / (steps - WARM_UP_STEPS)))


def train(shape: ModelShape, tokenizer: Tokenizer, steps: int, folder: Path) -> None:
    """Trains for `steps` batches and saves the checkpoint, also at every quarter so that a stopped run leaves one."""
    params = shape.init(TRAINING_SEED)
    moments = start(params)
    print(f"{sum(value.size for value in params.values()):,} parameters, {steps} steps", flush=True)
    batches = Packer(tokenizer).batches(Corpus(TRAINING_SEED).part(held_out=False))
    began, seen, recent = time.monotonic(), 0, []
    for number, batch in enumerate(islice(batches, steps)):
        scale = jnp.float32(schedule(number, steps))
        arrays = map(jnp.asarray, (batch.tokens, batch.segments, batch.weights))
        params, moments, value = _step(shape, params, moments, *arrays, jnp.float32(number + 1), scale)
        seen += int((batch.segments[:, 1:] > 0).sum())
        recent.append(value)
        if (number + 1) % 25 == 0:
            seconds = time.monotonic() - began
            mean = float(np.mean(jax.device_get(recent)))
            speed = f"tokens {seen} seconds {seconds:.0f} ({seen / seconds:.0f}/s)"
            print(f"step {number + 1} loss {mean:.4f} {speed}", flush=True)
            recent = []
        if (number + 1) % (steps // 4) == 0:
            save(folder, shape, params, tokenizer)


def main() -> None:
    """Trains or evaluates one model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=list(SHAPES), default="demo")
    parser.add_argument("--steps", type=int, help="batches of 2048 tokens (default: as shipped)")
    parser.add_argument("--output", type=Path, default=ASSETS, help="folder of the two checkpoints")
    parser.add_argument("--evaluate", action="store_true", help="evaluate what is on disk instead of training")
    options = parser.parse_args()
    folder = options.output / FOLDERS[options.model]
    if options.evaluate:
        from tools.demo_evaluation import report

        print(report(SHAPES[options.model], folder))
        return
    if options.model == "draft":
        tokenizer = Tokenizer.from_file(str(options.output / FOLDERS["demo"] / "tokenizer.json"))
    else:
        sample = islice(Corpus(TRAINING_SEED).part(held_out=False), TOKENIZER_DOCUMENTS)
        tokenizer = train_tokenizer(document.text for document in sample)
    train(SHAPES[options.model], tokenizer, options.steps or STEPS[options.model], folder)


if __name__ == "__main__":
    main()
