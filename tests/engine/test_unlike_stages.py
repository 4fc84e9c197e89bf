"""Stages whose layers are not alike: dense layers before those with experts, and states mixed with attention.

The tokens are those of transformers, as on one device.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from jaxvllm import LLM
from sharding.mesh import MeshShape
from tests.engine.tiny import GREEDY, assert_idle, few_pages, greedy_tokens, one_program, tiny_llm
from tests.models.fixture import Fixture

# A step with prompts is two microbatches, which begin where states allow it: see `Pipeline.begins`.
SIZES: dict[str, Any] = dict(
    max_num_seqs=8, row_buckets=(8,), max_num_batched_tokens=128, token_buckets=(128,), num_pages=129, dtype="float32"
)
# Two dense layers in one stage, and two with experts in the other. Two short convolutions and attention, and then one
# of each. Four states of a token, layers that read others, and embeddings of layers. Choices of an index that others
# read. The gated delta rule has stages in test_states.py, with drafts. Windows and Gemma 4 have them in
# test_pipeline.py.
CASES = [
    ("deepseek_v3", "2x1x1"),
    ("lfm2", "2x1x2"),
    ("gemma3n", "2x1x1"),
    ("glm_moe_dsa", "2x1x1"),
    *(
        pytest.param(case, marks=pytest.mark.slow)
        for case in (
            ("deepseek_v3", "2x2x1"),  # replicas that share experts, which only their second stages have
            ("kimi_linear", "3x1x1"),
            ("jamba", "2x1x2"),
            ("nemotron_h", "2x1x1"),  # the first stage has no attention
            ("longcat_flash", "4x1x2"),  # pairs of layers in two stages each, with latent attention on two devices
        )
    ),
]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def staged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fixture, LLM]]:
    name, mesh = request.param
    fixture = Fixture.load(name)
    directory = fixture.write_checkpoint(tmp_path_factory.mktemp(name))
    options = SIZES | {"mesh": mesh, "max_model_len": fixture.max_model_len}
    options["enable_expert_parallel"] = MeshShape.parse(mesh).data > 1
    # A program costs three to five seconds. That of rows which decode, whose tokens are its rows, is compiled once.
    with nullcontext() if name == "lfm2" else one_program(128, 8), tiny_llm(directory, **options) as llm:
        yield fixture, llm


def test_the_tokens_are_those_of_transformers(staged: tuple[Fixture, LLM]) -> None:
    fixture, llm = staged
    assert greedy_tokens(llm, fixture.prompts) == fixture.greedy
    # After a cached prefix, and alone.
    for prompt, expected in list(zip(fixture.prompts, fixture.greedy, strict=True))[-2:]:
        [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == expected and output.num_cached_tokens
    assert_idle(llm)


# With attention alone, and with states too. What else layers keep is the pages' own, and computed anew as these are.
@pytest.mark.parametrize("staged", CASES[:2], ids="-".join, indirect=True)
def test_also_after_preemptions(staged: tuple[Fixture, LLM]) -> None:
    fixture, llm = staged
    before = llm.engine.stats().num_preemptions
    with few_pages(llm, 9):
        assert greedy_tokens(llm, fixture.prompts) == fixture.greedy
    assert llm.engine.stats().num_preemptions > before
    assert_idle(llm)
