"""Engines whose pages hold keys and values in eight bits: one text, whatever shares their steps and pages."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxvllm import EngineConfig
from jaxvllm.engine.page_exchange import model_name
from jaxvllm.engine.resolved_config import ResolvedConfig
from jaxvllm.models import checkpoint
from jaxvllm.models.decoder import forward, project_logits
from jaxvllm.models.families import model_spec
from jaxvllm.models.kv_scales import with_kv_scales
from sharding.axis import ALONE
from tests.engine.tiny import (
    all_drafts_or_none,
    assert_idle,
    choose_drafts,
    few_pages,
    greedy_by,
    greedy_tokens,
    one_program,
    random_prompts,
    tiny_llm,
)
from tests.models.dense import dense_attend, dense_cache
from tests.models.fixture import Fixture
from tests.models.published.written import write_model

PROMPTS = random_prompts(4, 40, seed=12, vocab_size=128)
# Of the fixture's keys and values, whose largest numbers are about three and one.
SCHEMES = {"fp8": ("float", 448, jnp.float8_e4m3fn), "int8": ("int", 127, jnp.int8)}


def calibrated(tiny_checkpoint: Path, path: Path, kind: str, largest: int) -> Path:
    """The model with scales for each KV head of each layer, and a scheme that names them."""
    shutil.copytree(tiny_checkpoint, path, dirs_exist_ok=True)
    config, tensors = checkpoint.read_config(path), load_file(tiny_checkpoint / "model.safetensors")
    rng, heads = np.random.default_rng(5), config["num_key_value_heads"]
    for layer in range(config["num_hidden_layers"]):
        for letter, most in (("k", 3), ("v", 1)):
            scales = rng.uniform(0.5, 1, (heads, 1, 1)) * most / largest
            tensors[f"model.layers.{layer}.self_attn.{letter}_scale"] = scales.astype(np.float32)
    scheme = {"num_bits": 8, "type": kind, "strategy": "attn_head", "symmetric": True, "dynamic": False}
    settings = {"quant_method": "compressed-tensors", "format": "dense", "kv_cache_scheme": scheme}
    return write_model(path, config | {"quantization_config": settings}, tensors)


def rounded(x: jax.Array, scales: jax.Array, largest: float, dtype: Any) -> jax.Array:
    """The keys or values [T, K, D] that are left of x, with scales that fit [T, K, 1]."""
    codes = jnp.clip(x / scales, -largest, largest)
    return (jnp.round(codes) if dtype == jnp.int8 else codes).astype(dtype).astype(jnp.float32) * scales


def by_head(x: jax.Array, scales: jax.Array, largest: float, dtype: Any) -> jax.Array:
    return rounded(x, scales[:, None], largest, dtype)


def by_token(x: jax.Array, scales: None, largest: float, dtype: Any) -> jax.Array:
    return rounded(x, jnp.abs(x).max(-1, keepdims=True) / largest, largest, dtype)


def recomputed(path: Path, stored: Callable[..., jax.Array]) -> list[list[int]]:
    """What each prompt goes on with where attention sees `stored` of keys and values, without pages or an engine."""
    spec = with_kv_scales(model_spec(checkpoint.read_config(path)))
    params = checkpoint.load(path, spec, dtype=jnp.float32, layout="separate")

    def attend(kv: Any, given: Any, q: Any, k: Any, v: Any, /, *, kv_scales: Any, **options: Any) -> Any:
        k, v = (x if x is None else stored(x, of) for x, of in zip((k, v), kv_scales, strict=True))
        return dense_attend(kv, given, q, k, v, **options)

    @jax.jit
    def logits(tokens: jax.Array) -> jax.Array:
        cache = dense_cache(spec, 64)
        hidden, _ = forward(params, spec, tokens, jnp.arange(64), cache, attend, ALONE)
        return project_logits(params, spec, hidden)

    return greedy_by(logits, PROMPTS, 12, room=64)


def check(path: Path, expected: list[list[int]], **options: Any) -> None:
    """The same tokens together, in chunks of 16; after cached prefixes; alone; preempted; and from host memory."""
    host = json.dumps({"kv_connector": "host"})
    with tiny_llm(path, dtype="float32", max_decode_burst=1, kv_transfer_config=host, **options) as llm:
        assert llm.engine.replicas[0].runner.page_like[0].dtype.itemsize == 1
        assert greedy_tokens(llm, PROMPTS, 12) == expected
        again = llm.generate(PROMPTS, llm.get_default_sampling_params(), use_tqdm=False)
        assert sum(output.num_cached_tokens for output in again) >= 32
        assert greedy_tokens(llm, PROMPTS, 12) == expected
        llm.reset_prefix_cache()
        assert [greedy_tokens(llm, [prompt], 12)[0] for prompt in PROMPTS] == expected
        before = llm.engine.stats().num_preemptions
        with few_pages(llm, 7):
            assert greedy_tokens(llm, PROMPTS, 12) == expected
        assert llm.engine.stats().num_preemptions > before
        assert_idle(llm)


@pytest.mark.parametrize("name", ["fp8", pytest.param("int8", marks=pytest.mark.slow)])
def test_the_scales_of_the_checkpoint(name: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    kind, largest, dtype = SCHEMES[name]
    path = calibrated(tiny_checkpoint, tmp_path, kind, largest)
    expected = recomputed(path, partial(by_head, largest=largest, dtype=dtype))
    check(path, expected)
    # Two stages, in each of which a device has the scales of its heads.
    with one_program(), tiny_llm(path, dtype="float32", mesh="2x1x2") as llm:
        assert greedy_tokens(llm, PROMPTS, 12) == expected
        if name == "int8":
            with pytest.raises(ValueError, match="the given weights: layer 0 has no scale of its keys and values"):
                llm.update_weights(load_file(tiny_checkpoint / "model.safetensors"))
            assert greedy_tokens(llm, PROMPTS, 12) == expected


@pytest.mark.parametrize("kind", [pytest.param("fp8", marks=pytest.mark.slow), "int8"])
def test_a_scale_of_each_token(kind: str, tiny_checkpoint: Path) -> None:
    _, largest, dtype = SCHEMES[kind]
    expected = recomputed(tiny_checkpoint, partial(by_token, largest=largest, dtype=dtype))
    check(tiny_checkpoint, expected, kv_cache_dtype=f"{kind}_per_token_head")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma4", "deepseek_v3", "deepseek_v32"])
def test_pages_that_are_shared_latents_and_an_index(name: str, tmp_path: Path) -> None:
    """A layer that reads another's pages has the scales of that one; latents have one scale, whatever chooses them."""
    fixture = Fixture.load(name)
    tensors, rng = fixture.weights(), np.random.default_rng(3)
    spec = model_spec(fixture.config)
    prefix = next(of for of in tensors if ".layers.0." in of).partition("layers.0.")[0]
    for number, layer in enumerate(spec.layers):
        for letter in ("k", "v") if layer.reads is None else ():
            heads = layer.attention.num_kv_heads
            scales = rng.uniform(0.004, 0.008, (heads, 1, 1)).astype(np.float32)
            tensors[f"{prefix}layers.{number}.self_attn.{letter}_scale"] = scales
    path = write_model(tmp_path, fixture.config, tensors)
    stored = partial(by_head, largest=448, dtype=jnp.float8_e4m3fn)
    with one_program(), tiny_llm(path, dtype="float32", kv_cache_dtype="fp8") as llm:
        assert greedy_tokens(llm, PROMPTS, 12) == recomputed(path, stored)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32"])
def test_a_scale_of_each_latent(name: str, tmp_path: Path) -> None:
    """A latent has one scale, that of its key, whose first part is the key of an index in V3.2."""
    path = write_model(tmp_path, (fixture := Fixture.load(name)).config, fixture.weights())
    stored = partial(by_token, largest=127, dtype=jnp.int8)
    with one_program(), tiny_llm(path, dtype="float32", kv_cache_dtype="int8_per_token_head") as llm:
        assert greedy_tokens(llm, PROMPTS, 12) == recomputed(path, stored)


@pytest.mark.slow
def test_drafts_of_a_model_with_calibrated_integers(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages of drafts have no scales. With integers in them hardly a draft would be right."""
    choose_drafts(monkeypatch)
    path = calibrated(tiny_checkpoint, tmp_path, "int", 32)  # no key or value is beyond the largest code
    drafts = json.dumps({"method": "draft_model", "model": str(tiny_checkpoint), "num_speculative_tokens": 3})
    with all_drafts_or_none(bursts=False), tiny_llm(path, speculative_config=drafts, dtype="float32") as llm:
        assert [pages.dtype for pages in llm.engine.replicas[0].runner.page_like] == [jnp.int8, jnp.float32]
        found = greedy_tokens(llm, PROMPTS, 12)
        # The rounding of the model leaves 13 of 30 right, and integers in these pages would leave 7 of 36.
        stats = llm.engine.stats()
        assert stats.num_accepted_tokens > 0.3 * stats.num_draft_tokens > 0
    assert found == recomputed(path, partial(by_head, largest=127, dtype=jnp.int8))


@pytest.mark.slow
def test_drafts_of_a_model_in_eight_bits(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_drafts(monkeypatch)
    options: dict[str, Any] = {"dtype": "float32", "kv_cache_dtype": "int8_per_token_head"}
    drafts = json.dumps({"method": "draft_model", "model": str(tiny_checkpoint), "num_speculative_tokens": 3})
    with all_drafts_or_none(bursts=False), tiny_llm(tiny_checkpoint, speculative_config=drafts, **options) as llm:
        found = greedy_tokens(llm, PROMPTS, 12)
        # Its pages and the model's hold the same, so nearly all that it guesses is right.
        stats = llm.engine.stats()
        assert stats.num_accepted_tokens > 0.8 * stats.num_draft_tokens > 0
    assert found == recomputed(tiny_checkpoint, partial(by_token, largest=127, dtype=jnp.int8))


def test_pages_of_two_kinds_are_never_mixed(tiny_checkpoint: Path) -> None:
    """On a CPU all of float8 are bytes, so that their dtype does not tell kinds apart."""
    names = []
    for kind in ("auto", "fp8", "fp8_e5m2", "fp8_per_token_head"):
        config = EngineConfig(model=str(tiny_checkpoint), kv_cache_dtype=kind, load_format="dummy")
        resolved = ResolvedConfig.of(config, checkpoint.read_config(tiny_checkpoint), "cpu")
        names.append(model_name(config, resolved, tiny_checkpoint).result())
    assert len(set(names)) == len(names)


def test_what_cannot_be_kept_is_refused_before_weights_are_read(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: Any, **options: Any) -> None:
        pytest.fail("weights are read")

    monkeypatch.setattr(checkpoint, "load", load)
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16}
    path = write_model(tmp_path, checkpoint.read_config(tiny_checkpoint) | heads, {})
    with pytest.raises(NotImplementedError, match="or a multiple of 8 KV heads on each device, not for 3: take"):
        tiny_llm(path, attention_backend="interpret", kv_cache_dtype="int8_per_token_head")


def test_integers_without_scales_are_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = calibrated(tiny_checkpoint, tmp_path, "int", 127)
    tensors = load_file(path / "model.safetensors")
    for letter in ("k", "v"):
        del tensors[f"model.layers.1.self_attn.{letter}_scale"]
    with pytest.raises(ValueError, match="layer 1 has no scale of its keys and values"):
        tiny_llm(write_model(path, checkpoint.read_config(path), tensors))
