"""Vectors of prompts are the hidden states of the model, in whatever chunks, company, mesh or cache they come."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from jaxvllm import LLM, EngineConfig, PoolingParams
from jaxvllm.core.pooler import Pooler, Pooling
from jaxvllm.engine.pooling import read_pooler
from jaxvllm.models import checkpoint
from jaxvllm.models.families import model_spec
from jaxvllm.runtime.multihost.calls import Call, Read
from jaxvllm.runtime.readouts import DEVICE_READOUTS
from jaxvllm.runtime.runner import Runner
from tests.engine.tiny import (
    GREEDY,
    MAX_MODEL_LEN,
    Recomputation,
    assert_idle,
    few_pages,
    greedy_tokens,
    one_program,
    random_prompts,
    tiny_llm,
)
from tests.jax_cache import same_programs_once
from tests.models.fixture import Fixture

PROMPTS = random_prompts(12, longest=90, seed=7)
RAW = PoolingParams(use_activation=False)


def vectors(llm: LLM, prompts: Sequence[Sequence[int]], params: PoolingParams = RAW) -> NDArray[np.float32]:
    """f32[prompts, E]"""
    outputs = llm.embed([list(one) for one in prompts], pooling_params=params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [list(one) for one in prompts]
    return np.array([output.outputs.embedding for output in outputs], np.float32)


def unprojected(logits: NDArray[np.float32], head: NDArray[np.float32]) -> NDArray[np.float64]:
    """The hidden states f64[N, E] whose product with `head` f32[V, E] are the logits f32[N, V]; V is larger than E."""
    found, *_ = np.linalg.lstsq(head.astype(np.float64), logits.T.astype(np.float64))
    return found.T


@pytest.fixture(scope="module")
def mean_llm(tiny_checkpoint: Path) -> Iterator[LLM]:
    with tiny_llm(tiny_checkpoint, pooler_config='{"pooling_type": "MEAN"}') as llm:
        yield llm
        assert_idle(llm)


@pytest.fixture(scope="module")
def hidden(recomputation: Recomputation, tiny_checkpoint: Path) -> list[NDArray[np.float64]]:
    """The hidden states f64[T, E] of each prompt, by dense attention over all of it."""
    spec = model_spec(checkpoint.read_config(tiny_checkpoint), MAX_MODEL_LEN)
    head = np.asarray(checkpoint.load(tiny_checkpoint, spec, dtype=np.float32, layout="separate")["lm_head"])
    head = head if head.shape[1] == spec.hidden_size else head.T
    return [unprojected(recomputation.logits(one[:1], [*one[1:], 0]), head) for one in PROMPTS]


def test_the_last_hidden_state_is_that_of_transformers(tmp_path: Path) -> None:
    """The checkpoint is one of a model that was saved without its LM head, as embedding models are."""
    fixture = Fixture.load("qwen3")
    tensors = fixture.weights()
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    expected = unprojected(fixture.logits, head)
    directory = replace(fixture, config=fixture.config | {"architectures": ["Qwen3Model"]}).write_checkpoint(tmp_path)
    save_file({name.removeprefix("model."): array for name, array in tensors.items()}, directory / "model.safetensors")
    with one_program(), tiny_llm(directory, max_model_len=None) as llm:
        np.testing.assert_allclose(vectors(llm, fixture.prompts), expected, atol=1e-4)
        normalized = vectors(llm, fixture.prompts, PoolingParams())
        similar = (normalized * expected).sum(1) / np.linalg.norm(expected, axis=1)
        np.testing.assert_allclose(similar, 1, atol=1e-6)


def test_each_prompt_has_its_last_hidden_state(shared_llm: LLM, hidden: list[NDArray[np.float64]]) -> None:
    shared_llm.reset_prefix_cache()
    expected = [states[-1] for states in hidden]
    np.testing.assert_allclose(vectors(shared_llm, PROMPTS), expected, atol=1e-4)
    outputs = shared_llm.embed(PROMPTS, pooling_params=RAW, use_tqdm=False)
    page = shared_llm.config.page_size
    assert [output.num_cached_tokens for output in outputs] == [(len(one) - 1) // page * page for one in PROMPTS]
    np.testing.assert_allclose([output.outputs.embedding for output in outputs], expected, atol=1e-4)


def test_each_prompt_has_the_mean_of_its_hidden_states(mean_llm: LLM, hidden: list[NDArray[np.float64]]) -> None:
    expected = [states.mean(0) for states in hidden]
    for _ in range(2):  # the second time its pages are cached, and yet its hidden states are all needed
        np.testing.assert_allclose(vectors(mean_llm, PROMPTS), expected, atol=1e-4)
    outputs = mean_llm.embed(PROMPTS[:3], use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [0] * 3


@pytest.mark.parametrize("kind", ["LAST", "MEAN"])
def test_vectors_are_made_beside_generation_and_after_preemption(
    kind: str, shared_llm: LLM, mean_llm: LLM, hidden: list[NDArray[np.float64]]
) -> None:
    llm = mean_llm if kind == "MEAN" else shared_llm
    engine = llm.engine
    asked = PROMPTS[:4]
    alone = greedy_tokens(llm, asked, 30)
    pooling = engine.pooler.resolve(RAW)
    with few_pages(llm, 10):
        for number, prompt in enumerate(PROMPTS):
            engine.submit(engine.check(f"v{number}", prompt, Pooling.sampling_params(), pooling=pooling))
            if number < len(asked):
                engine.submit(engine.check(f"t{number}", prompt, replace(GREEDY, max_tokens=30)))
        found, preempted = {}, 0
        while engine.has_work:
            for output in engine.step():
                if output.finished:
                    found[output.request_id] = output
                    assert output.metrics is not None
                    preempted += output.metrics.num_preemptions
    assert_idle(llm)
    assert preempted, "10 pages hold all of these requests at once: nothing was preempted"
    assert [found[f"t{number}"].outputs[0].token_ids for number in range(len(asked))] == alone
    expected = [states.mean(0) if kind == "MEAN" else states[-1] for states in hidden]
    got = [found[f"v{number}"].pooled for number in range(len(PROMPTS))]
    np.testing.assert_allclose(np.array(got), expected, atol=1e-4)
    assert all(not found[f"v{number}"].outputs[0].token_ids for number in range(len(PROMPTS)))


@pytest.mark.parametrize(("mesh", "kind"), [("1x4", "MEAN"), ("2x2x1", "LAST")])
def test_vectors_are_the_same_on_meshes(
    mesh: str, kind: str, tiny_checkpoint: Path, hidden: list[NDArray[np.float64]]
) -> None:
    config = json.dumps({"seq_pooling_type": kind})
    options: dict[str, Any] = {"mesh": mesh, "pooler_config": config, "compilation_cache": None}
    # Nothing is decoded, and the replicas have the same programs.
    with same_programs_once(), one_program(), tiny_llm(tiny_checkpoint, **options) as llm:
        expected = [states.mean(0) if kind == "MEAN" else states[-1] for states in hidden]
        np.testing.assert_allclose(vectors(llm, PROMPTS), expected, atol=1e-4)


def test_a_prompt_may_be_as_long_as_the_model(shared_llm: LLM) -> None:
    [whole] = random_prompts(1, longest=1, seed=1)
    whole = (whole * MAX_MODEL_LEN)[:MAX_MODEL_LEN]
    assert vectors(shared_llm, [whole]).shape == (1, shared_llm.engine.pooler.size)
    with pytest.raises(ValueError, match="max_model_len 128"):
        shared_llm.embed([[*whole, 5]], use_tqdm=False)
    [kept] = shared_llm.embed([[7, *whole]], pooling_params=PoolingParams(truncate_prompt_tokens=-1), use_tqdm=False)
    assert kept.prompt_token_ids == whole


def test_nothing_is_read_when_nobody_asks(shared_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Call] = []
    make = Runner.make
    monkeypatch.setattr(Runner, "make", lambda self, call: (calls.append(call), make(self, call))[1])
    greedy_tokens(shared_llm, PROMPTS[:3], 4)
    assert calls and not any(isinstance(call, Read) for call in calls)
    vectors(shared_llm, [PROMPTS[0]])  # a prompt of several chunks, of which each is read
    assert {DEVICE_READOUTS[call.readout].name for call in calls if isinstance(call, Read)} == {"pooled"}


def test_wrong_requests_are_refused_and_leave_nothing(shared_llm: LLM) -> None:
    size = shared_llm.engine.pooler.size
    for params, told in (
        (PoolingParams(dimensions=size + 1), "exceeds"),
        (PoolingParams(dimensions=size - 1), "no is_matryoshka"),
    ):
        with pytest.raises(ValueError, match=told):
            shared_llm.embed([[5]], pooling_params=params, use_tqdm=False)
    with pytest.raises(ValueError, match="2 pooling_params for 1 prompts"):
        shared_llm.embed([[5]], pooling_params=[RAW, RAW], use_tqdm=False)
    with pytest.raises(ValueError, match="prompt 1: "):
        shared_llm.embed([[5], []], use_tqdm=False)
    for wrong in ({"dimensions": 0}, {"use_activation": 1}, {"truncate_prompt_tokens": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            PoolingParams(**wrong)  # type: ignore[arg-type]
    assert_idle(shared_llm)


def test_a_vector_is_cut_before_it_gets_length_1() -> None:
    pooler = Pooler("MEAN", 4, matryoshka=(2, 3), dimensions=3)
    total = np.array([2.0, 4.0, 4.0, 100.0], np.float32)
    np.testing.assert_allclose(pooler.resolve(PoolingParams()).finish(total, 2), np.array([1, 2, 2]) / 3)
    np.testing.assert_allclose(pooler.resolve(PoolingParams(2, False)).finish(total, 2), [1, 2])
    np.testing.assert_allclose(Pooler("LAST", 4).resolve(PoolingParams(4, False)).finish(total, 2), total)
    with pytest.raises(ValueError, match=r"may have \[2, 3\]"):
        pooler.resolve(PoolingParams(1))
    assert Pooler("LAST", 4, matryoshka=True).resolve(PoolingParams(1)).dimensions == 1
    assert np.isfinite(Pooling("LAST", 4, normalizes=True).finish(np.zeros(4, np.float32), 1)).all()


POOLING = {"word_embedding_dimension": 32, "pooling_mode_cls_token": False}


@pytest.mark.parametrize(
    ("pooling", "modules", "expected"),
    [
        ({"pooling_mode_lasttoken": True}, ["Transformer", "Pooling", "Normalize"], ("LAST", True)),
        ({"pooling_mode_mean_tokens": True}, ["Transformer", "Pooling"], ("MEAN", False)),
        ({"pooling_mode": "mean"}, ["Transformer", "Pooling", "Normalize"], ("MEAN", True)),
        ({}, ["Transformer", "Pooling"], ("MEAN", False)),
        ({"pooling_mode_max_tokens": True}, ["Transformer", "Pooling"], "pooling_mode_max_tokens"),
        ({"pooling_mode": ["cls", "mean"]}, ["Transformer", "Pooling"], "cls, mean"),
        ({"pooling_mode": "mean"}, ["Transformer", "Pooling", "Dense"], "Dense"),
    ],
)
def test_the_files_of_sentence_transformers_say_how(
    tmp_path: Path, pooling: dict[str, Any], modules: list[str], expected: Any
) -> None:
    spec = model_spec(Fixture.load("llama").config)
    listed = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(modules)
    ]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(POOLING | pooling))
    config = EngineConfig().pooler
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            read_pooler(config, {}, spec, tmp_path)
    else:
        pooler = read_pooler(config, {}, spec, tmp_path)
        assert (pooler.kind, pooler.normalizes) == expected
    chosen = EngineConfig(pooler_config='{"pooling_type": "LAST", "use_activation": false}').pooler
    pooler = read_pooler(chosen, {"matryoshka_dimensions": [8, 16]}, spec, tmp_path)
    assert (pooler.kind, pooler.normalizes, pooler.matryoshka) == ("LAST", False, (8, 16))


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ('{"pooling_type": "CLS"}', "sees only itself"),
        ('{"pooling_type": "MAX"}', "LAST or MEAN, not 'MAX'"),
        ('{"seq_pooling_type": "LAST", "pooling_type": "MEAN"}', "differ"),
        ('{"task": "classify"}', "task must be embed"),
        ('{"pool": 1}', "has no 'pool'"),
        ('{"dimensions": 0}', "dimensions"),
        ("[]", "must be a JSON object"),
    ],
)
def test_a_wrong_pooler_config_says_so(value: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        EngineConfig(pooler_config=value)
    assert EngineConfig.from_options(override_pooler_config='{"pooling_type": "MEAN"}').pooler.kind == "MEAN"
