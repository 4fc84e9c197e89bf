"""Options of experts that move are read by vLLM's names, and anything else is an error that says what to write."""

import json
from dataclasses import asdict
from typing import Any

import pytest

from jaxvllm.config import EngineConfig
from jaxvllm.core.eplb_config import EplbConfig

WHOLE = {"window_size": 10, "step_interval": 30, "num_redundant_experts": 2, "log_balancedness": True}


@pytest.mark.parametrize("value", [WHOLE, json.dumps(WHOLE), WHOLE | {"policy": "default", "use_async": True}])
def test_has_vllms_names(value: object) -> None:
    assert EplbConfig.read(value) == EplbConfig(10, 30, 2, True)


def test_what_it_prints_is_what_it_reads() -> None:
    config = EplbConfig(**WHOLE)  # type: ignore[arg-type]
    assert EplbConfig.read(str(config)) == config
    assert json.loads(str(config)) == asdict(config)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("window_size", 0, "window_size must be an integer from 1 to 2147483647, not 0"),
        ("step_interval", 1.5, "step_interval must be an integer"),
        ("num_redundant_experts", -1, "num_redundant_experts must be an integer from 0 to 65536, not -1"),
        ("log_balancedness", 1, "log_balancedness must be True or False, not 1"),
        ("policy", "mine", "policy = 'mine' is not supported"),
        ("copies", 1, "has no 'copies': it may have window_size, step_interval"),
    ],
)
def test_a_wrong_value_is_named(name: str, value: Any, rule: str) -> None:
    with pytest.raises(ValueError, match=f"^eplb_config {rule}.*an example: "):
        EplbConfig.read({**WHOLE, name: value})


def test_an_engine_moves_experts_only_where_it_is_asked_to() -> None:
    assert EngineConfig(enable_expert_parallel=True).eplb is None
    assert EngineConfig(enable_expert_parallel=True, enable_eplb=True).eplb == EplbConfig()
    asked = EngineConfig.from_options(enable_expert_parallel=True, eplb=True, eplb_config=WHOLE)
    assert asked.eplb == EplbConfig.read(WHOLE) and asked.counts_loads
