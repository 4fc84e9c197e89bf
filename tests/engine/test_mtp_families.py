"""Models with experts, latent attention or states say the same with MTP drafts, which are what the head's formula says.

The tokens are those of transformers, which reads no MTP layer.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxvllm.models import checkpoint
from jaxvllm.models.decoder import forward
from jaxvllm.models.families import model_spec
from jaxvllm.models.heads.head import DRAFT
from jaxvllm.models.heads.mtp import MtpHead
from jaxvllm.models.heads.mtp_files import read_mtp
from jaxvllm.models.params import Params
from jaxvllm.models.spec import ModelSpec
from jaxvllm.runtime.proposers.autoregressive import AutoregressiveProposer
from jaxvllm.runtime.proposers.proposer import Drafts, Known
from sharding.axis import ALONE
from tests.engine.tiny import all_drafts_or_none, assert_idle, choose_drafts, few_pages, greedy_tokens, tiny_llm
from tests.models.dense import dense_attend, dense_recur
from tests.models.fixture import Fixture
from tests.models.heads.written_mtp import WRITTEN
from tests.quick import quick_engines

MOST = 128  # tokens of a request


@pytest.fixture(autouse=True, scope="module")
def quick_programs() -> Iterator[None]:
    with quick_engines(have_states=True):
        yield


@dataclass(frozen=True)
class Dense:
    """A model and its head over whole sequences, without pages."""

    spec: ModelSpec
    head: MtpHead
    params: Params

    @classmethod
    def load(cls, directory: Path) -> "Dense":
        config = checkpoint.read_config(directory)
        spec = model_spec(config, MOST)
        params = checkpoint.load(directory, spec, dtype=jnp.float32, layout="separate")
        [head], own = read_mtp(directory, config, spec, 1)
        return cls(spec, head, params | {DRAFT: jax.tree.map(jnp.asarray, own)})

    def features(self, sequences: np.ndarray) -> np.ndarray:
        """The features [N, T, E] that the head sees beside the tokens [N, T]: what the model thought before each."""

        def of_one(tokens: jax.Array) -> jax.Array:
            hidden, _ = forward(self.params, self.spec, tokens, jnp.arange(MOST), (), dense_attend, ALONE, dense_recur)
            return jnp.concatenate([hidden[:1], hidden[:-1]])

        return np.asarray(jax.jit(lambda all: jax.lax.map(of_one, all))(sequences))

    def logits(self, sequences: np.ndarray, features: np.ndarray) -> np.ndarray:
        """The logits [N, T, V] of the first draft after each token."""

        def of_one(given: tuple[jax.Array, jax.Array]) -> jax.Array:
            hidden, _, _ = self.head.apply(self.params, given[0], jnp.arange(MOST), given[1], (), dense_attend, ALONE)
            return self.head.logits(self.params, hidden, self.spec, self.spec, ALONE)

        return np.asarray(jax.jit(lambda all: jax.lax.map(of_one, all))((sequences, features)))


def teach(directory: Path, fixture: Fixture, kind: str, sequences: np.ndarray, features: np.ndarray) -> None:
    """Fits what joins token and feature, so that the head is often right about these sequences, and often wrong."""
    written, tensors = WRITTEN[kind], load_file(directory / "model.safetensors")
    of_embedding, of_feature, join, _ = written.parts

    def normed(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True)) * (tensors[f"{name}.weight"] + fixture.norm_offset)

    embedding = tensors["model.embed_tokens.weight"][sequences]
    seen = np.concatenate([normed(embedding, of_embedding), normed(features, of_feature)], axis=-1)
    lengths = [len(prompt) + len(answer) for prompt, answer in zip(fixture.prompts, fixture.greedy, strict=True)]
    known = [slice(length - len(fixture.greedy[0]), length - 1) for length in lengths]
    seen = np.concatenate([row[where] for row, where in zip(seen, known, strict=True)])
    following = np.concatenate([row[1:][where] for row, where in zip(sequences, known, strict=True)])
    wanted = 4 * tensors["lm_head.weight"][following]
    tensors[f"{join}.weight"] = np.ascontiguousarray(np.linalg.lstsq(seen, wanted, rcond=1e-2)[0].T, np.float32)
    for name in tensors:
        if name.startswith(written.block) and name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] *= 0.3
    save_file(tensors, directory / "model.safetensors")


# By two replicas, in which every device has the whole head. `test_shared_experts.py` has a draft model beside experts
# that get the tokens of all replicas.
APART = {"mesh": "2x1", "enable_expert_parallel": True, "all2all_backend": "deepep_low_latency"}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("qwen3_next", {}, id="qwen3_next"),
        *(pytest.param(k, {}, id=k, marks=pytest.mark.slow) for k in ("mimo_v2", "longcat_flash")),
        pytest.param("deepseek_v3", APART, id="deepseek_v3-2x1-apart", marks=pytest.mark.slow),
    ],
)
def test_tokens_and_drafts(kind: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fixture = WRITTEN[kind].beside(Fixture.load(kind))
    directory = fixture.write_checkpoint(tmp_path)
    sequences = np.zeros((len(fixture.prompts), MOST), np.int32)
    for row, prompt, answer in zip(sequences, fixture.prompts, fixture.greedy, strict=True):
        row[: len(prompt) + len(answer)] = [*prompt, *answer]
    features = Dense.load(directory).features(sequences)
    teach(directory, fixture, kind, sequences, features)
    logits = Dense.load(directory).logits(sequences, features)
    drafted: dict[tuple[int, ...], int] = {}

    def keep(history: np.ndarray, lengths: np.ndarray, drafts: np.ndarray, counts: np.ndarray) -> None:
        for row, length, draft, count in zip(history, lengths, drafts, counts, strict=True):
            if count:
                drafted[tuple(row[:length].tolist())] = int(draft[0])

    propose = AutoregressiveProposer.propose

    def kept(self: AutoregressiveProposer, known: Known, num_drafts: int) -> tuple[Any, Drafts]:
        pages, drafts = propose(self, known, num_drafts)
        counts = jnp.minimum(drafts.counts, known.room)
        jax.debug.callback(keep, known.state["history"][known.slots], known.lengths, drafts.tokens, counts)
        return pages, drafts

    monkeypatch.setattr(AutoregressiveProposer, "propose", kept)
    choose_drafts(monkeypatch)
    config = {"method": "mtp", "num_speculative_tokens": 2}
    options = {"compilation_cache": None, "num_pages": 129, "speculative_config": config} | options
    with all_drafts_or_none(bursts=False), tiny_llm(directory, **options) as llm:
        assert greedy_tokens(llm, fixture.prompts) == fixture.greedy
        for replica in llm.engine.replicas:
            assert 0 < replica.num_accepted.sum() < replica.num_drafted.sum()
        jax.effects_barrier()
        compared = 0
        for sequence, of_sequence in zip(sequences.tolist(), logits, strict=True):
            for length in range(1, MOST):
                draft = drafted.pop(tuple(sequence[:length]), None)
                second, first = np.sort(of_sequence[length - 1])[-2:]
                if draft is not None and first - second > 1e-3:
                    assert draft == of_sequence[length - 1].argmax()
                    compared += 1
        assert compared > 20 and not drafted
        with few_pages(llm, 14):
            assert greedy_tokens(llm, fixture.prompts) == fixture.greedy
        assert_idle(llm)
