"""Trains the two small models of the tests, one with experts and one with states: `python -m tools.train_test_models`.

Both have the demo model's tokenizer and learn from its short documents, through the project's own decoder. The defaults
reproduce `tests/assets/experts` and `tests/assets/states`: weights and corpus come from fixed seeds, and nothing is
downloaded. A model is trained so far that it writes English: then its greedy tokens are what a served model's are, its
tokens choose every expert, its drafts are sometimes right, and its prompts share prefixes. Random weights have none of
this.
"""

import argparse
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from jaxvllm.models import checkpoint
from jaxvllm.models.decoder import forward, project_logits
from jaxvllm.models.experts import ExpertsFfn
from jaxvllm.models.families import find_family, model_spec
from jaxvllm.models.layer_input import LayerInput
from jaxvllm.models.ops import OneOf
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.state_memory import StateMemory
from jaxvllm.models.weight_names import Source, outer_sources
from sharding.axis import ALONE
from tools.demo_corpus import EVALUATION_SEED, TRAINING_SEED, Corpus
from tools.demo_model import MAX_POSITIONS, Params, bfloat16, write_json, write_weights
from tools.demo_optimizer import Moments, start, update
from tools.demo_tokenizer import BOS, END, PAD, VOCAB_SIZE, token_id
from tools.train_demo_model import ASSETS as DEMO_ASSETS
from tools.train_demo_model import schedule

ASSETS = Path(__file__).resolve().parent.parent / "tests" / "assets"
# The documents that are short English text.
KINDS = ("story", "story_request", "facts", "plain")
ROWS, ROW = 8, 128  # of a batch, and the tokens of each
# Tokens that a state takes in together, as in a page. With all 128 of a row, a step took over 0.7 s of the CPU (three
# layers), and with 16 it takes 0.1 s (two layers).
RUN = 16
HELD_OUT_BATCHES = 8
# How much an even load of the experts counts beside the cross entropy (arXiv 2101.03961, 2.2, has 0.01).
BALANCE = 0.02
PROMPTS = ("Once upon a time", "<|user|>Tell me a story.<|end|><|assistant|>", "One day")

SHARED = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": MAX_POSITIONS, "tie_word_embeddings": True,
    "attention_bias": False, "torch_dtype": "bfloat16",
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "experts": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **SHARED, "num_hidden_layers": 2,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
        "intermediate_size": 96, "rope_theta": 10000.0,
    },
    "states": {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", **SHARED, "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"], "intermediate_size": 192,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 24, "linear_value_head_dim": 24,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    },
}  # fmt: skip
# They took 82 and 45 s of the CPU, an AMD EPYC, compilation included. Held-out losses are 0.89 and 1.24 nats, and the
# entropy of single tokens is 5.74.
STEPS = {"experts": 600, "states": 300}


@jax.custom_vjp
def with_loss(x: jax.Array, loss: jax.Array) -> jax.Array:
    """Returns x. Its gradient is that of the function it is part of, to which `loss` f32[] has been added."""
    return x


with_loss.defvjp(lambda x, loss: (x, None), lambda _, gradient: (gradient, jnp.float32(1)))


@dataclass(frozen=True)
class TrainableExperts(ExpertsFfn):
    """The same experts as a function that can be differentiated: each computes every token.

    The loop over groups of rows has no gradient, since its length depends on the rows. The router is trained towards an
    even load, too.
    """

    @classmethod
    def of(cls, experts: ExpertsFfn) -> Self:
        """Returns the trainable form of experts without biases and without any beside them."""
        assert experts.shared is None and not experts.bias and experts.activation == "silu"
        return cls(**vars(experts))

    def apply(self, weights: Any, x: jax.Array, given: LayerInput) -> jax.Array:
        chosen, counts = self.router.choose(weights, x, given.backend)
        is_chosen = jax.nn.one_hot(chosen, self.num_held)  # [T, top_k, X]
        gate, up = jnp.moveaxis(jnp.einsum("te,xgfe->txgf", x, _matrices(weights["experts_gate_up"])), 2, 0)
        h = jax.nn.silu(gate) * up * jnp.einsum("tkx,tk->tx", is_chosen, counts)[..., None]
        out = jnp.einsum("txf,xef->te", h, _matrices(weights["experts_down"]))
        scores = jax.nn.softmax(self.router.logits.apply(weights, "router", x), axis=-1)
        load = is_chosen.sum(1).mean(0) / self.router.top_k
        return with_loss(out, BALANCE * self.num_held * jnp.sum(load * scores.mean(0)))


def _matrices(weight: OneOf) -> jax.Array:
    """Returns the experts of the layer that is computed: equal layers are one loop, and each has its own arrays."""
    chosen: jax.Array = jax.lax.switch(weight.index, [lambda matrix=matrix: matrix for matrix in weight.matrices])
    return chosen


def trainable(spec: ModelSpec) -> ModelSpec:
    """Returns the spec with experts that can be differentiated."""
    ffns = (layer.ffn for layer in spec.layers)
    trained = (TrainableExperts.of(ffn) if isinstance(ffn, ExpertsFfn) else ffn for ffn in ffns)
    return replace(spec, layers=tuple(replace(layer, ffn=ffn) for layer, ffn in zip(spec.layers, trained, strict=True)))


def attend(
    kv: None, given: LayerInput, q: jax.Array, k: Any, v: Any, *, scale: float, **_: Any
) -> tuple[jax.Array, None]:
    """Attends within each row of `ROW` tokens: q [T, H, D], k and v [T, K, D]."""
    q, k, v = (
        x.reshape(-1, ROW, *x.shape[1:]) for x in (q, *(jnp.repeat(x, q.shape[1] // k.shape[1], 1) for x in (k, v)))
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((ROW, ROW), bool)), scores, -1e9), -1)
    read = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    return read.reshape(-1, *read.shape[2:]), None


def recur(kv: None, given: LayerInput, weights: Any, tokens: Any) -> tuple[jax.Array, None]:
    """Lets each row of `ROW` tokens go through a state that begins empty, `RUN` tokens at a time."""
    memory = given.memory
    assert isinstance(memory, StateMemory)
    rule = memory.rule
    empty = tuple(jnp.zeros((memory.num_kv_heads, *part)) for part in rule.parts)
    runs = jax.tree.map(lambda x: x.reshape(-1, ROW // RUN, RUN, *x.shape[1:]), tokens)

    def read(runs: Any) -> jax.Array:
        return jax.lax.scan(lambda state, run: rule.take_run(weights, state, run, jnp.int32(RUN)), empty, runs)[1]

    found = jax.vmap(read)(runs)  # [B, ROW / RUN, RUN, K, ..]
    return found.reshape(-1, *found.shape[3:]), None


@dataclass(frozen=True)
class TrainedModel:
    """A model, and where each number of its checkpoint is in the tree of its parameters.

    The optimizer sees the tensors by their names in the checkpoint, which say what a matrix is. The decoder sees the
    tree.
    """

    spec: ModelSpec
    shapes: dict[str, tuple[int, ...]]  # of the tensors
    places: Any  # the tree, whose arrays i32 say where each number is among those of all tensors

    @classmethod
    def of(cls, config: dict[str, Any]) -> Self:
        """Works out the places by loading a checkpoint whose numbers are 0, 1, 2 and so on."""
        spec, family = model_spec(config), find_family(config)
        prefixes = (family.names.layer_prefix("model.", layer) for layer in range(spec.num_layers))
        sources: list[Mapping[str, tuple[Source, ...]]] = [outer_sources(spec, "model.", family.names)]
        sources += [family.layer_sources(spec, layer, prefix) for layer, prefix in enumerate(prefixes)]
        shapes = {one.name: one.shape for found in sources for parts in found.values() for one in parts}
        count = sum(map(math.prod, shapes.values()))
        assert count < 2**24, "float32 has no larger integers"
        numbered = cls._named(shapes, np.arange(count, dtype=np.float32))
        tree = checkpoint.load(ASSETS, spec, dtype=jnp.float32, layout="separate", hf_config=config, tensors=numbered)
        places = jax.tree.map(lambda x: np.asarray(x).astype(np.int32), tree)
        found = np.concatenate([x.ravel() for x in jax.tree.leaves(places)])
        assert (np.sort(found) == np.arange(count)).all(), "every number of the checkpoint has one place"
        return cls(trainable(spec), shapes, places)

    @staticmethod
    def _named(shapes: dict[str, tuple[int, ...]], numbers: Any) -> dict[str, Any]:
        parts, first = {}, 0
        for name, shape in shapes.items():
            parts[name] = numbers[first : first + math.prod(shape)].reshape(shape)
            first += math.prod(shape)
        return parts

    def tree(self, tensors: Params) -> Any:
        """Returns the parameters that the decoder reads."""
        numbers = jnp.concatenate([tensors[name].ravel() for name in self.shapes])
        return jax.tree.map(lambda places: numbers[places], self.places)

    def tensors(self, tree: Any) -> Params:
        """Returns the tensors of the checkpoint, of a tree of parameters or gradients."""
        order = np.argsort(np.concatenate([x.ravel() for x in jax.tree.leaves(self.places)]))
        return self._named(self.shapes, jnp.concatenate([x.ravel() for x in jax.tree.leaves(tree)])[order])

    def init(self, seed: int) -> Params:
        """Makes random tensors: norms of 1, matrices with variance 1 / inputs, states that last for 3 to 30 tokens."""
        rng = np.random.default_rng(seed)
        return {name: jnp.asarray(self._first(name, shape, rng), jnp.float32) for name, shape in self.shapes.items()}

    def _first(self, name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
        if "norm" in name:
            # Norms of Qwen 3.5 are stored less one, but for that of linear attention.
            return np.full(shape, 1.0 - (0 if "linear_attn" in name else getattr(self.spec.norm, "offset", 0.0)))
        if name.endswith("A_log"):
            return np.zeros(shape)
        if name.endswith("dt_bias"):
            return np.linspace(-3.5, -1.0, shape[0])
        scale = 0.02 if "embed" in name else shape[-1] ** -0.5
        # Branches that add to the residual stream start small, so that depth does not add variance.
        is_end = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
        return rng.standard_normal(shape) * scale * ((2 * self.spec.num_layers) ** -0.5 if is_end else 1.0)

    def logits(self, tree: Any, tokens: jax.Array) -> jax.Array:
        """Computes the logits f32[B, ROW, V] of rows i32[B, ROW], each a text of its own."""
        positions = jnp.tile(jnp.arange(ROW, dtype=jnp.int32), len(tokens))
        hidden, _ = forward(tree, self.spec, tokens.reshape(-1), positions, None, attend, ALONE, recur)
        return project_logits(tree, self.spec, hidden).reshape(*tokens.shape, -1)

    def loss(self, tree: Any, tokens: jax.Array) -> jax.Array:
        """Computes the mean cross entropy, in nats, of tokens i32[B, ROW + 1] given those before them."""
        scored = self.logits(tree, tokens[:, :-1])
        chosen = jnp.take_along_axis(scored, tokens[:, 1:, None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(scored, -1) - chosen)


def batches(tokenizer: Tokenizer, seed: int, *, held_out: bool) -> Iterator[np.ndarray]:
    """Yields rows of tokens i32[ROWS, ROW + 1] without end. Each begins with a document, and others follow it."""
    documents = (document for document in Corpus(seed).part(held_out) if document.kind in KINDS)
    while True:
        rows: list[list[int]] = [[] for _ in range(ROWS)]
        for row in rows:
            while len(row) < ROW + 1:
                row += tokenizer.encode(next(documents).text, add_special_tokens=False).ids
        yield np.asarray([row[: ROW + 1] for row in rows], np.int32)


def train(model: TrainedModel, tokenizer: Tokenizer, steps: int) -> Params:
    """Trains for `steps` batches of `ROWS` * `ROW` tokens and returns the tensors."""

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(
        tensors: Params, moments: Moments, tokens: jax.Array, number: jax.Array, scale: jax.Array
    ) -> tuple[Params, Moments, jax.Array]:
        value, gradients = jax.value_and_grad(model.loss)(model.tree(tensors), tokens)
        return *update(tensors, model.tensors(gradients), moments, number, scale), value

    tensors = model.init(TRAINING_SEED)
    moments, began, recent = start(tensors), time.monotonic(), []
    print(f"{sum(map(math.prod, model.shapes.values())):,} parameters, {steps} steps", flush=True)
    for number, rows in enumerate(islice(batches(tokenizer, TRAINING_SEED, held_out=False), steps)):
        scale = jnp.float32(schedule(number, steps))
        tensors, moments, value = step(tensors, moments, rows, jnp.float32(number + 1), scale)
        recent.append(float(value))
        if (number + 1) % 25 == 0:
            mean, seconds = np.mean(recent), time.monotonic() - began
            print(f"step {number + 1} loss {mean:.4f} seconds {seconds:.0f} cpu {time.process_time():.0f}", flush=True)
            recent = []
    return tensors


def report(model: TrainedModel, tree: Any, tokenizer: Tokenizer) -> str:
    """Returns the loss on held-out documents, beside the entropy of their tokens alone, and greedy texts."""
    rows = np.concatenate(list(islice(batches(tokenizer, EVALUATION_SEED, held_out=True), HELD_OUT_BATCHES)))
    loss = np.mean([float(jax.jit(model.loss)(tree, part)) for part in np.split(rows, HELD_OUT_BATCHES)])
    shares = np.bincount(rows[:, 1:].ravel(), minlength=VOCAB_SIZE) / rows[:, 1:].size
    entropy = -np.sum(shares * np.log(np.maximum(shares, 1e-12)))
    lines = [f"held-out loss {loss:.3f} nats, entropy of single tokens {entropy:.3f} nats"]
    best = jax.jit(lambda row, at: jnp.argmax(model.logits(tree, row)[0, at]))
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt).ids
        while len(ids) < 80:
            row = np.zeros((1, ROW), np.int32)
            row[0, : len(ids)] = ids
            ids.append(int(best(row, len(ids) - 1)))
        lines.append(repr(tokenizer.decode(ids, skip_special_tokens=False)))
    return "\n".join(lines)


def save(folder: Path, config: dict[str, Any], tensors: Params, tokenizer: Tokenizer) -> None:
    """Writes a Hugging Face checkpoint in bfloat16, without the tokenizer, which is the demo model's."""
    folder.mkdir(parents=True, exist_ok=True)
    kinds = {"bos_token_id": BOS, "eos_token_id": END, "pad_token_id": PAD}
    write_json(folder / "config.json", config | {kind: token_id(tokenizer, word) for kind, word in kinds.items()})
    write_weights(folder / "model.safetensors", bfloat16(tensors))


def main() -> None:
    """Trains one model, or both, and prints what they have learnt."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=list(CONFIGS), action="append", help="default: both")
    parser.add_argument("--steps", type=int, help=f"batches of {ROWS * ROW} tokens (default: as in git)")
    parser.add_argument("--output", type=Path, default=ASSETS, help="folder of the two checkpoints")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(DEMO_ASSETS / "demo" / "tokenizer.json"))
    for name in options.model or CONFIGS:
        model = TrainedModel.of(CONFIGS[name])
        tensors = train(model, tokenizer, options.steps or STEPS[name])
        save(options.output / name, CONFIGS[name], tensors, tokenizer)
        stored = {name: jnp.asarray(value, jnp.float32) for name, value in bfloat16(tensors).items()}
        print(report(model, model.tree(stored), tokenizer), flush=True)


if __name__ == "__main__":
    main()
