"""Adapters of experts in an engine: each request gets the tokens of its merged weights, on every kind of mesh.

The experts are as they are, or kept in few bits, and may move between devices.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxvllm import LLM, LoRARequest
from tests.conftest import Compilations
from tests.engine.tiny import GREEDY, assert_idle, greedy_tokens, merged_tokens, one_program, tiny_llm
from tests.models.adapters import FusedAdapter, RandomAdapter
from tests.models.fixture import Fixture
from tests.models.published.test_mxfp4 import MXFP4_PACKED, NUMBERS
from tests.models.published.written import resized, write_model
from tests.quick import programs_in_advance

# With sizes that the groups of MXFP4 divide.
FIXTURE = resized(
    resized(Fixture.load("qwen3_moe"), {48: 64}, hidden_size=64), {24: 32}, ".experts.", moe_intermediate_size=32
)
# Experts one by one beside the router and attention, and parameters of all experts.
ADAPTERS = (RandomAdapter(FIXTURE, seed=1, rank=2), FusedAdapter(FIXTURE, seed=2, rank=3))
PROMPTS = [list(prompt) for prompt in FIXTURE.prompts[:6]]
WHO = (1, 0, 2, 1, 2, 0)
OPTIONS = dict(enable_lora=True, max_loras=2, max_lora_rank=8)


def in_int8(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights as an engine in int8 has them."""

    def rounded(weight: np.ndarray) -> np.ndarray:
        sizes = np.abs(weight).max(-1, keepdims=True) / 127
        return (np.round(weight / sizes) * sizes).astype(np.float32)

    return {name: rounded(weight) if name.endswith("_proj.weight") else weight for name, weight in weights.items()}


def in_mxfp4(weights: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The weights with experts in MXFP4, and the tensors of a checkpoint that stores them so."""
    values, stored = dict(weights), dict(weights)
    for name in [name for name in weights if ".experts." in name]:
        groups = stored.pop(name).reshape(len(weights[name]), -1, 32)
        exponents = np.ceil(np.log2(np.abs(groups).max(-1) / 6))
        steps = 2.0 ** exponents[..., None].astype(np.float32)
        codes = np.abs(groups[..., None] / steps[..., None] - NUMBERS).argmin(-1).astype(np.uint8)
        values[name] = (NUMBERS[codes] * steps).reshape(weights[name].shape)
        codes = codes.reshape(weights[name].shape)
        stored[name.replace(".weight", ".weight_packed")] = codes[:, 0::2] | codes[:, 1::2] << 4
        stored[name.replace(".weight", ".weight_scale")] = (exponents + 127).astype(np.uint8)
    return values, stored


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest | None]:
    paths = [one.write(tmp_path_factory.mktemp("adapter")) for one in ADAPTERS]
    return [None if who == 0 else LoRARequest(f"adapter {who}", who, str(paths[who - 1])) for who in WHO]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FIXTURE.write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = MXFP4_PACKED | {"ignore": ["re:.*self_attn.*", "re:.*mlp.gate$", "re:.*layers.1.mlp.*", "lm_head"]}
    config = FIXTURE.config | {"quantization_config": settings}
    return write_model(tmp_path_factory.mktemp("mxfp4"), config, in_mxfp4(FIXTURE.weights())[1])


def tokens_of(llm: LLM, requests: list[LoRARequest | None]) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=requests)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[str, list[list[int]]]:
    """By what the weights are kept in."""
    plain = FIXTURE.weights()
    bases = {"float32": plain, "int8": in_int8(plain), "mxfp4": in_mxfp4(plain)[0]}
    merged = [[base, *(one.merged(base) for one in ADAPTERS)] for base in bases.values()]
    who = [3 * number + of for number in range(3) for of in WHO]
    tokens = merged_tokens(checkpoint, [weights for three in merged for weights in three], PROMPTS * 3, who)
    return {name: tokens[6 * number :][:6] for number, name in enumerate(bases)}


def expert_dtypes(llm: LLM) -> set[str]:
    [holder, *_] = llm.engine.holders
    layers = holder.params["layers"]
    own = layers if isinstance(layers, dict) else layers[0]
    return {leaf.dtype.name for leaf in jax.tree.leaves(own["experts_down"])}


@pytest.mark.parametrize(
    ("kept_in", "options"),
    [
        ("float32", {}),
        ("int8", {"mesh": "2x1x2", "quantization": "int8"}),
        pytest.param(
            "float32",
            {"mesh": "1x2", "enable_expert_parallel": True, "attention_backend": "reference"},
            marks=pytest.mark.slow,
        ),
        pytest.param("float32", {"mesh": "2x2x1", "enable_expert_parallel": True}, marks=pytest.mark.slow),
    ],
    ids=["alone", "parts on stages, in int8", "whole", "shared on stages"],
)
def test_each_request_has_the_tokens_of_its_merged_weights(
    kept_in: str,
    options: dict[str, object],
    checkpoint: Path,
    requests: list[LoRARequest | None],
    expected: dict[str, list[list[int]]],
    compilations: Callable[[], AbstractContextManager[Compilations]],
) -> None:
    bursts = nullcontext() if not options else one_program()
    with programs_in_advance(), bursts, tiny_llm(checkpoint, **OPTIONS, **options) as llm:
        assert (kept_in in expert_dtypes(llm)) and (kept_in == "float32" or len(expert_dtypes(llm)) == 2)
        base = greedy_tokens(llm, PROMPTS)
        assert greedy_tokens(llm, PROMPTS) == base
        own = expected[kept_in]
        assert all((mine == theirs) == (who == 0) for mine, theirs, who in zip(own, base, WHO, strict=True))
        with compilations() as seen:
            assert tokens_of(llm, requests) == own
        assert seen.count == 0, seen.names
        assert_idle(llm)


# Replicas share the experts, which are in MXFP4, but for stages, whose stacks of layers XLA would copy.
@pytest.mark.parametrize(
    "options",
    [
        {"mesh": "2x2"},
        pytest.param({"mesh": "2x2", "all2all_backend": "ragged_all_to_all"}, marks=pytest.mark.slow),
        pytest.param({"mesh": "2x1x2"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_adapters_follow_experts_that_move(
    options: dict[str, Any], packed: Path, requests: list[LoRARequest | None], expected: dict[str, list[list[int]]]
) -> None:
    eplb = {"num_redundant_experts": 2, "step_interval": 6, "window_size": 4}
    options = {**OPTIONS, **options, "enable_expert_parallel": True, "enable_eplb": True, "eplb_config": eplb}
    with (
        one_program(),
        tiny_llm(packed, **options, speculation=False, enable_prefix_caching=False) as llm,
    ):
        assert ("uint8" in expert_dtypes(llm)) == (options["mesh"] == "2x2")
        for _ in range(3):
            num_placements = llm.engine.stats().num_expert_placements
            assert tokens_of(llm, requests) == expected["mxfp4"]
            assert llm.engine.stats().num_expert_placements > num_placements
        llm.update_weights(packed)  # whose experts are not where the adapters were
        assert tokens_of(llm, requests) == expected["mxfp4"]
        assert_idle(llm)
