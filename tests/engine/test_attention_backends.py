"""The whole engine on interpreted TPU and GPU kernels writes what it writes on the reference."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from jaxvllm import LLM, SamplingParams
from jaxvllm.config import EngineConfig
from jaxvllm.models import gpu_states
from jaxvllm.models.families import model_spec
from pallas_kernels.backend import BackendName
from tests.engine.tiny import GREEDY, assert_idle, one_program, tiny_llm
from tests.jax_cache import same_programs_once
from tests.models.fixture import Fixture
from tests.quick import quick_compilation

pytestmark = pytest.mark.usefixtures("interpreted_kernels")

# The GPU's matrix units take 16 bits. What either kernel writes is compared with the reference in float32.
DTYPES: dict[BackendName, str] = {"reference": "float32", "interpret": "float32", "interpret-gpu": "float16"}
PREFIX = "Once upon a time there was a little girl who lived in a small house near the forest. "
PROMPTS = [PREFIX + "One day", "The capital of France is", "Tom", PREFIX + "She had a dog"]


def answers(backend: BackendName, has_window: bool, kept: str) -> tuple[list[list[int]], np.ndarray, int]:
    """Returns what follows each prompt, all in one batch and the first once more: tokens, and best log-probabilities.

    kept: how pages hold keys and values
    The last value is how many tokens came from the cache. The model has one layer, with a window of 32 or without: each
    layer's kernels take ten seconds to compile.
    """
    # Gemma 3 is not computed in float16.
    fixture = Fixture.load("gemma3" if has_window else "qwen3")
    config = fixture.config | {"num_hidden_layers": 1} | ({"sliding_window_pattern": 2} if has_window else {})
    assert [layer.window for layer in model_spec(config, 64).layers] == [32 if has_window else None]
    shapes = {name: shape for name, shape in fixture.shapes.items() if not re.search(r"layers\.[1-6]\.", name)}
    prompts = [prompt[:40] for prompt in fixture.prompts]
    prompts = [prompts[-1], prompts[-2], prompts[-1][:33], prompts[0][:5]]
    assert max(map(len, prompts)) == 40  # beyond the window, and in several chunks
    few = dict(max_num_seqs=4, max_num_batched_tokens=16, row_buckets=(4,), token_buckets=(16,), num_pages=33)
    # What these tokens do not need is not compiled.
    options = few | dict(max_model_len=64, warm_up="background", dtype=DTYPES[backend], kv_cache_dtype=kept)
    with TemporaryDirectory() as name, quick_compilation():
        directory = replace(fixture, config=config, shapes=shapes).write_checkpoint(Path(name))
        with tiny_llm(directory, attention_backend=backend, **options) as llm:
            params = replace(GREEDY, max_tokens=4, logprobs=5)
            outputs = [
                *llm.generate(prompts, params, use_tqdm=False),
                *llm.generate(prompts[:1], params, use_tqdm=False),
            ]
            assert_idle(llm)
            completions = [output.outputs[0] for output in outputs]
            ranked = [sorted(one.logprob for one in best.values()) for of in completions for best in of.logprobs or ()]
            cached = sum(output.num_cached_tokens for output in outputs)
            return [one.token_ids for one in completions], np.array(ranked), cached


# Each of tests/pallas_kernels/attention_suite.py has both kernels with windows and without, and test_families_engine.py
# has both kinds of layers in one model.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "has_window", "kept"),
    [("interpret", True, "int8_per_token_head"), ("interpret-gpu", False, "int8_per_token_head")],
)
def test_the_engine_says_the_same(backend: BackendName, has_window: bool, kept: str) -> None:
    tokens, logprobs, cached = answers(backend, has_window, kept)
    expected_tokens, expected_logprobs, expected_cached = answers("reference", has_window, kept)
    assert (tokens, cached) == (expected_tokens, expected_cached)
    np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-4 if DTYPES[backend] == "float32" else 1e-2)
    assert cached >= 16
    assert tokens[0] == tokens[-1]


# Two layers of Mamba-2 with sizes that the kernels of states take, of three heads in one group. Of a step's 48 tokens
# some rows go by chunks and others token by token.
STATES = {"num_hidden_layers": 2, "expand": 4, "num_heads": 3, "head_dim": 64, "n_groups": 1, "state_size": 64}
MIXER: dict[str, list[int]] = {
    "A_log": [3],
    "D": [3],
    "conv1d.bias": [320],
    "conv1d.weight": [320, 1, 3],
    "dt_bias": [3],
    "in_proj.bias": [515],
    "in_proj.weight": [515, 48],
    "norm.weight": [192],
    "out_proj.bias": [48],
    "out_proj.weight": [48, 192],
}


@pytest.mark.slow
def test_states_that_a_kernel_keeps_give_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_states, "CHUNKED_STEP", 48)
    fixture = Fixture.load("mamba2")
    shapes = {name: shape for name, shape in fixture.shapes.items() if not re.search(r"layers\.[23]\.|mixer", name)}
    shapes |= {f"backbone.layers.{i}.mixer.{name}": shape for i in range(2) for name, shape in MIXER.items()}
    few = dict(max_num_seqs=4, max_num_batched_tokens=48, row_buckets=(4,), token_buckets=(48,), num_pages=33)
    prompts = [list(range(1, 36)), list(range(40, 45)), [7], list(range(1, 36))]
    found = []
    with TemporaryDirectory() as name, quick_compilation():
        directory = replace(fixture, config=fixture.config | STATES, shapes=shapes).write_checkpoint(Path(name))
        for backend in ("reference", "interpret-gpu"):
            options = few | dict(max_model_len=64, warm_up="background", dtype="float32", max_decode_burst=2)
            with tiny_llm(directory, attention_backend=backend, **options) as llm:
                outputs = llm.generate(prompts, replace(GREEDY, max_tokens=4, logprobs=1), use_tqdm=False)
                assert_idle(llm)
                found.append([output.outputs[0] for output in outputs])
    expected, got = found
    assert [one.token_ids for one in got] == [one.token_ids for one in expected]
    for one, other in zip(got, expected, strict=True):
        assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-4)


@pytest.mark.parametrize("name", ["tpu", "gpu"])
def test_another_devices_kernels_are_refused(name: BackendName) -> None:
    with pytest.raises(ValueError, match=f"attention backend {name} needs a {name.upper()}, this is a CPU: use auto"):
        LLM(attention_backend=name)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="attention_backend must be one of auto, reference, .*, not 'triton'"):
        EngineConfig(attention_backend="triton")


SMALL: dict[str, Any] = dict(
    dtype="float32",
    max_num_seqs=2,
    max_num_batched_tokens=16,
    row_buckets=(2,),
    token_buckets=(16,),
    max_model_len=64,
    num_pages=9,
    compilation_cache=None,
)


@pytest.fixture(scope="module")
def full() -> Iterator[LLM]:
    """An engine whose pages have the model's own dtype. The others share its sampler."""
    with same_programs_once(), one_program(num_rows=2), LLM(**SMALL) as llm:
        yield llm


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e5m2"])
def test_pages_of_eight_bits_take_a_quarter_of_the_memory(dtype: str, full: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=1)
    with one_program(num_rows=2), LLM(kv_cache_dtype=dtype, **SMALL) as small:
        sizes = [
            sum(one.size * one.dtype.itemsize for one in llm.engine.replicas[0].runner.page_like)
            for llm in (small, full)
        ]
        assert sizes[0] * 4 == sizes[1]
        coarse, exact = (llm.generate(PROMPTS, params, use_tqdm=False) for llm in (small, full))
    for one, other in zip(coarse, exact, strict=True):
        # Coarser keys and values, nearly the same beliefs: a wrong layout or a missing cast yields noise.
        chances = [np.exp(output.outputs[0].cumulative_logprob) for output in (one, other)]
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert abs(chances[0] - chances[1]) < 0.1, chances  # 0.044 at most when this was written
