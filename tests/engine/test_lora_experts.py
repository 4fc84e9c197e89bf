"""Adapters of experts in an engine: each request gets the tokens of its merged weights, on every kind of mesh."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from jaxvllm import LLM, LoRARequest
from tests.conftest import Compilations
from tests.engine.tiny import GREEDY, assert_idle, greedy_tokens, merged_tokens, one_program, tiny_llm
from tests.models.adapters import FusedAdapter, RandomAdapter
from tests.models.fixture import Fixture
from tests.quick import programs_in_advance

FIXTURE = Fixture.load("qwen3_moe")
# Experts one by one beside the router and attention, and parameters of all experts.
ADAPTERS = (RandomAdapter(FIXTURE, seed=1, rank=2), FusedAdapter(FIXTURE, seed=2, rank=3))
PROMPTS = [list(prompt) for prompt in FIXTURE.prompts[:6]]
WHO = (1, 0, 2, 1, 2, 0)
OPTIONS = dict(enable_lora=True, max_loras=2, max_lora_rank=8)


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest | None]:
    paths = [one.write(tmp_path_factory.mktemp("adapter")) for one in ADAPTERS]
    return [None if who == 0 else LoRARequest(f"adapter {who}", who, str(paths[who - 1])) for who in WHO]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FIXTURE.write_checkpoint(tmp_path_factory.mktemp("model"))


def tokens_of(llm: LLM, requests: list[LoRARequest | None]) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=requests)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    return merged_tokens(checkpoint, [FIXTURE.weights(), *(one.merged() for one in ADAPTERS)], PROMPTS, WHO)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mesh": "1x2"},
        pytest.param(
            {"mesh": "1x2", "enable_expert_parallel": True, "attention_backend": "reference"}, marks=pytest.mark.slow
        ),
    ],
    ids=["alone", "parts", "whole"],
)
def test_each_request_has_the_tokens_of_its_merged_weights(
    options: dict[str, object],
    checkpoint: Path,
    requests: list[LoRARequest | None],
    expected: list[list[int]],
    compilations: Callable[[], AbstractContextManager[Compilations]],
) -> None:
    bursts = nullcontext() if not options else one_program()
    with programs_in_advance(), bursts, tiny_llm(checkpoint, **OPTIONS, **options) as llm:
        base = greedy_tokens(llm, PROMPTS)
        assert greedy_tokens(llm, PROMPTS) == base
        assert all((mine == theirs) == (who == 0) for mine, theirs, who in zip(expected, base, WHO, strict=True))
        with compilations() as seen:
            assert tokens_of(llm, requests) == expected
        assert seen.count == 0, seen.names
        assert_idle(llm)
