"""The experts that tokens have chosen, as completions tell them."""

import base64
import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from jaxvllm import LLM, SamplingParams
from jaxvllm.engine.outputs import CompletionOutput
from jaxvllm.server.protocol.generate import GenerateRequest, generate_choice
from jaxvllm.worker import wire
from tests.engine.tiny import GREEDY, assert_idle, tiny_llm
from tests.models.fixture import Fixture

FIXTURE = Fixture.load("qwen2_moe")  # with layers without experts between
TOLD: dict[str, Any] = dict(enable_return_routed_experts=True, count_expert_loads=True)
SHORT = replace(GREEDY, max_tokens=6)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FIXTURE.write_checkpoint(tmp_path_factory.mktemp("routed"))


@pytest.fixture(scope="module", params=["1x1", "1x3x2"])
def telling(request: pytest.FixtureRequest, directory: Path) -> Iterator[LLM]:
    options = TOLD | {"mesh": request.param, "enable_expert_parallel": request.param != "1x1"}
    with tiny_llm(directory, max_model_len=FIXTURE.max_model_len, **options) as llm:
        yield llm
        assert_idle(llm)


def experts_of(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[NDArray[Any]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    found = []
    for output in outputs:
        for completion in output.outputs:
            experts = completion.routed_experts
            assert experts is not None and experts.dtype == np.uint8
            assert len(experts) == len(output.prompt_token_ids) + len(completion.token_ids) - 1
            found.append(experts)
    return found


def test_each_token_is_told_once_with_the_experts_that_were_counted(telling: LLM) -> None:
    before = telling.expert_loads()
    outputs = telling.generate(FIXTURE.prompts, SHORT, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [tokens[:6] for tokens in FIXTURE.greedy]
    told = np.concatenate([output.outputs[0].routed_experts for output in outputs])
    loads = telling.expert_loads()
    assert told.shape[1] == len(loads) < 4  # the layers that have experts
    for place, (layer, counted) in enumerate(loads.items()):
        expected = np.bincount(told[:, place].ravel(), minlength=len(counted))
        np.testing.assert_array_equal(counted - before[layer], expected)


def test_they_are_the_same_whether_a_token_was_sampled_or_given(telling: LLM) -> None:
    prompt = FIXTURE.prompts[1]
    [sampled] = experts_of(telling, [prompt], SHORT)
    [output] = telling.generate([prompt], SHORT, use_tqdm=False)
    whole = [*prompt, *output.outputs[0].token_ids]
    given = experts_of(telling, [whole[:count] for count in range(1, len(whole))], replace(SHORT, max_tokens=1))
    for count, experts in enumerate(given, 1):
        np.testing.assert_array_equal(experts, sampled[:count])


def test_several_completions_and_a_pause_change_nothing(telling: LLM) -> None:
    prompt, engine = FIXTURE.prompts[2], telling.engine
    params = replace(SHORT, temperature=1.0, seed=3, n=2)
    expected = experts_of(telling, [prompt], params)
    engine.submit(engine.check("paused", prompt, params))
    for _ in range(5):
        engine.step()
    telling.pause("keep")
    telling.release_kv()
    telling.wake_up()
    *_, last = [output for _ in iter(lambda: engine.has_work, False) for output in engine.step()]
    for completion, experts in zip(last.outputs, expected, strict=True):
        np.testing.assert_array_equal(completion.routed_experts, experts)


def test_they_cross_the_wire_and_http() -> None:
    experts = np.arange(24, dtype=np.uint16).reshape(4, 3, 2)
    output = CompletionOutput(0, "", [5], finish_reason="length", routed_experts=experts)
    sent = wire.encode(output)
    received = msgspec.msgpack.decode(sent, type=CompletionOutput, dec_hook=wire._decode_array)
    assert received.routed_experts is not None and received.routed_experts.dtype == np.uint16
    np.testing.assert_array_equal(received.routed_experts, experts)
    body = GenerateRequest.model_validate({"token_ids": [1], "sampling_params": {}})
    file = io.BytesIO(base64.b64decode(generate_choice(received, body)["routed_experts"]))
    np.testing.assert_array_equal(np.load(file, allow_pickle=False), experts)


def test_models_without_experts_and_stages_are_refused(tiny_checkpoint: Path, directory: Path) -> None:
    with pytest.raises(ValueError, match="enable_return_routed_experts needs a model whose layers"):
        tiny_llm(tiny_checkpoint, enable_return_routed_experts=True)
    with pytest.raises(NotImplementedError, match="all layers on one device"):
        tiny_llm(directory, max_model_len=FIXTURE.max_model_len, mesh="2x1x1", enable_return_routed_experts=True)
