"""Engines whose matrices are int8: one text whatever multiplies and on every mesh, and weights that are replaced."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvllm.models import checkpoint
from jaxvllm.models.families import model_spec
from jaxvllm.models.forms import Forms, Matrix
from jaxvllm.models.forms.int8 import Int8
from tests.engine.tiny import greedy_tokens, random_prompts, tiny_llm
from tests.models.dense import dense_logits

PROMPTS = random_prompts(3, 20, seed=7)


@pytest.fixture(scope="module")
def best_tokens(tiny_checkpoint: Path) -> list[list[int]]:
    """What each prompt goes on with, by the layers without pages or an engine."""
    spec = model_spec(checkpoint.read_config(tiny_checkpoint))
    params = checkpoint.load(tiny_checkpoint, spec, dtype=jnp.float32, layout="separate", forms=Forms(layers=Int8()))
    logits = jax.jit(lambda tokens: dense_logits(params, spec, tokens))
    found = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(8):
            padded = np.zeros(32, np.int32)
            padded[: len(tokens)] = tokens
            tokens.append(int(np.asarray(logits(padded))[len(tokens) - 1].argmax()))
        found.append(tokens[len(prompt) :])
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"mesh": "2x1x2", "attention_backend": "reference"}],
    ids=["kernels", "stages"],
)
def test_the_same_tokens(options: dict[str, Any], tiny_checkpoint: Path, best_tokens: list[list[int]]) -> None:
    with tiny_llm(tiny_checkpoint, quantization="int8", dtype="float32", **options) as llm:
        assert greedy_tokens(llm, PROMPTS, 8) == best_tokens
        held = jax.tree.leaves(llm.weights["layers"], is_leaf=lambda node: isinstance(node, Matrix))
        assert any(isinstance(node, Matrix) and isinstance(node.form, Int8) for node in held)
        if options:
            return
        # Weights of a checkpoint are rounded as at the start, and a tree like the engine's is taken as it is.
        other = jax.tree.map(lambda array: array * 0, llm.weights)
        llm.update_weights(other)
        assert greedy_tokens(llm, PROMPTS, 8) != best_tokens
        llm.update_weights(tiny_checkpoint)
        assert greedy_tokens(llm, PROMPTS, 8) == best_tokens


def test_an_unknown_quantization_is_refused(tiny_checkpoint: Path) -> None:
    with pytest.raises(TypeError, match="quantization='int8'"):
        tiny_llm(tiny_checkpoint, quantization="awq")
