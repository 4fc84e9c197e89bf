"""Engines whose model has experts: one text whether devices have a part of each expert or some of them whole."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from jaxvllm import LLM
from tests.engine.tiny import GREEDY, assert_idle, greedy_tokens, one_program, tiny_llm
from tests.models.fixture import Fixture

# A gated expert beside the others, and layers without experts between.
FIXTURE = Fixture.load("qwen2_moe")
WITH_BIASES = Fixture.load("gpt_oss")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield FIXTURE.write_checkpoint(tmp_path_factory.mktemp("experts"))


def test_experts_with_biases_on_devices(tmp_path: Path) -> None:
    options = {"max_model_len": WITH_BIASES.max_model_len, "mesh": "1x2", "enable_expert_parallel": True}
    options |= {"count_expert_loads": True, "enable_prefix_caching": False}
    with one_program(), tiny_llm(WITH_BIASES.write_checkpoint(tmp_path), **options) as llm:
        assert not any(loads.any() for loads in llm.expert_loads().values())
        assert greedy_tokens(llm, WITH_BIASES.prompts) == WITH_BIASES.greedy
        num_tokens = sum(map(len, [*WITH_BIASES.prompts, *WITH_BIASES.greedy])) - len(WITH_BIASES.prompts)
        assert {loads.sum() for loads in llm.expert_loads().values()} == {3 * num_tokens}  # each has chosen three
        assert_idle(llm)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("1x3x2", {"enable_expert_parallel": True}),  # three replicas share six experts
        ("1x2", {"quantization": "int8"}),
    ],
)
def test_experts_on_devices(mesh: str, options: dict[str, object], directory: Path) -> None:
    with one_program(), tiny_llm(directory, max_model_len=FIXTURE.max_model_len, mesh=mesh, **options) as llm:
        tokens = greedy_tokens(llm, FIXTURE.prompts)
        if "quantization" not in options:
            assert tokens == FIXTURE.greedy
        else:  # the matrices are rounded, so the tokens are others, but as many
            assert list(map(len, tokens)) == list(map(len, FIXTURE.greedy)) and tokens != FIXTURE.greedy
        assert_scored_as_sampled(llm)
        assert_same_bits_alone(llm)
        assert_idle(llm)


def assert_scored_as_sampled(llm: LLM) -> None:
    """Asserts that a prompt's tokens are scored as when they are sampled, beside a prompt of which only one is read."""
    prompt, other = FIXTURE.prompts[:2]
    sampled = replace(GREEDY, max_tokens=6, logprobs=0)
    [output] = llm.generate([prompt], sampled, use_tqdm=False)
    tokens, logprobs = output.outputs[0].token_ids, output.outputs[0].logprobs
    assert logprobs is not None
    prompts, scored = [other, [*prompt, *tokens]], replace(GREEDY, max_tokens=1)
    _, output = llm.generate(prompts, [scored, replace(scored, prompt_logprobs=0)], use_tqdm=False)
    assert output.prompt_logprobs is not None
    pairs = zip(tokens, logprobs, output.prompt_logprobs[-len(tokens) :], strict=True)
    for token, before, after in pairs:
        assert after is not None
        assert after[token].logprob == pytest.approx(before[token].logprob, abs=1e-4)


def assert_same_bits_alone(llm: LLM) -> None:
    """Asserts that a prompt's log-probabilities have the same bits whatever shares its steps."""
    params = replace(GREEDY, max_tokens=4, logprobs=0)

    def sums(prompts: list[list[int]]) -> list[float | None]:
        return [output.outputs[0].cumulative_logprob for output in llm.generate(prompts, params, use_tqdm=False)]

    prompts = FIXTURE.prompts[:3]
    assert sums(prompts) == [sums([prompt])[0] for prompt in prompts]


def test_experts_that_cannot_be_divided_are_refused(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="6 experts do not divide over 4 devices: use a mesh of 1x1, 1x2, or"):
        LLM(str(directory), mesh="1x4", enable_expert_parallel=True)
    dense = Fixture.load("qwen3").write_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="enable_expert_parallel needs a model with experts, and this one has none"):
        LLM(str(dense), enable_expert_parallel=True)
