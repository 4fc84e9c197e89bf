"""The fixtures of tools/make_fixtures.py: tiny models of each family and what transformers makes of them."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chex
import numpy as np
from safetensors.numpy import save_file

from tests.models.seeded_weights import seeded_weights

FIXTURES = Path(__file__).parent.parent / "fixtures"
NAMES = tuple(sorted(file.parent.name for file in FIXTURES.glob("*/expected.json")))


@dataclass(frozen=True)
class Fixture:
    """One tiny model, its prompts, and what is expected after each."""

    name: str
    config: dict[str, Any]
    max_model_len: int  # the length that decides RoPE scalings here
    prompts: list[list[int]]
    greedy: list[list[int]]  # the next 24 tokens, EOS or not
    logits: np.ndarray  # f32[prompts, V], at the last position of each prompt
    shapes: dict[str, list[int]]
    seed: int
    norm_offset: float

    @classmethod
    def load(cls, name: str) -> "Fixture":
        directory = FIXTURES / name
        expected = json.loads((directory / "expected.json").read_text())
        with np.load(directory / "expected.npz") as arrays:
            logits = arrays["logits"]
        config = json.loads((directory / "config.json").read_text())
        return cls(name=name, config=config, logits=logits, **expected)

    def weights(self) -> dict[str, np.ndarray]:
        """The tensors of the checkpoint, float32."""
        return seeded_weights(self.shapes, self.seed, self.norm_offset)

    def write_checkpoint(self, directory: Path) -> Path:
        """Writes config.json and model.safetensors, which the real loader can read."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config))
        save_file(self.weights(), directory / "model.safetensors")
        return directory

    def check(self, run: Callable[[np.ndarray], Any], vocab_size: int) -> None:
        """Compares `run`, which returns the logits [T, V or more] of tokens i32[T], with what is expected."""
        for prompt, greedy, expected in zip(self.prompts, self.greedy, self.logits, strict=True):
            # Padded to one length, so that `run` compiles once: what comes after cannot change what was.
            padded = np.zeros(self.max_model_len, np.int32)
            padded[: len(prompt) + len(greedy)] = prompt + greedy
            logits = np.asarray(run(padded))[len(prompt) - 1 :, :vocab_size][: len(greedy)]
            chex.assert_trees_all_close(logits[0], expected, atol=1e-4, rtol=0)
            # Fed with the expected tokens at once: each must be the best after those before it.
            assert logits.argmax(-1).tolist() == greedy
