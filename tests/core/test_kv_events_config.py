"""`--kv-events-config`: vLLM's fields, and an error that helps for everything else."""

import pytest

from jaxvllm.config import EngineConfig
from jaxvllm.core.kv_events_config import KVEventsConfig

# What vLLM 0.32 fills in.
DEFAULTS = {
    "enable_kv_cache_events": False,
    "publisher": None,
    "endpoint": "tcp://*:5557",
    "replay_endpoint": None,
    "buffer_steps": 10_000,
    "hwm": 100_000,
    "max_queue_size": 100_000,
    "topic": "",
}


def test_the_defaults_are_those_of_vllm() -> None:
    assert vars(KVEventsConfig()) == DEFAULTS


@pytest.mark.parametrize(
    ("given", "publishes"),
    [
        ("{}", False),
        ('{"enable_kv_cache_events": true}', True),
        ('{"enable_kv_cache_events": true, "publisher": "zmq"}', True),
        ('{"enable_kv_cache_events": true, "publisher": "null"}', False),
        ('{"publisher": "zmq"}', False),
    ],
)
def test_who_publishes(given: str, publishes: bool) -> None:
    config = EngineConfig(kv_events_config=given)
    assert (config.kv_events is not None) == publishes
    again = EngineConfig(kv_events_config=config.kv_events_config)  # as it comes to the engine's process
    assert again == config


def test_a_caller_in_python_may_give_a_mapping() -> None:
    given = {"enable_kv_cache_events": True, "topic": "kv"}
    assert EngineConfig(kv_events_config=given).kv_events == KVEventsConfig(**given)  # type: ignore[arg-type]


def test_a_replica_has_ports_of_its_own() -> None:
    config = KVEventsConfig(endpoint="tcp://*:5557", replay_endpoint="ipc:///tmp/replay")
    assert config.of_replica(0) == ("tcp://*:5557", "ipc:///tmp/replay")
    assert config.of_replica(3) == ("tcp://*:5560", "ipc:///tmp/replay_dp3")
    assert KVEventsConfig(endpoint="tcp://[::]:1").of_replica(2) == ("tcp://[::]:3", None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("no", "must be a JSON object"),
        ("[]", "must be a JSON object"),
        ('{"enabled": true}', "has no 'enabled': it may have enable_kv_cache_events, "),
        ('{"enable_kv_cache_events": 1}', "enable_kv_cache_events must be True or False"),
        ('{"publisher": "kafka"}', "publisher must be null or zmq, not 'kafka'"),
        ('{"endpoint": "*:5557"}', r"endpoint must be tcp://HOST:PORT, tcp://\*:PORT or ipc://PATH"),
        ('{"endpoint": "inproc://cache"}', "endpoint must be"),
        ('{"replay_endpoint": "tcp://*:65536"}', "replay_endpoint must be"),
        ('{"endpoint": "tcp://*:0"}', "endpoint must be"),
        ('{"buffer_steps": 0}', "buffer_steps must be an integer from 1"),
        ('{"hwm": 0}', "hwm must be an integer from 1"),
        ('{"topic": 3}', "topic must be a string"),
        ('{"max_queue_size": 5}', "max_queue_size = 5 is not supported .*: leave it out"),
    ],
)
def test_what_is_wrong_is_told(given: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"kv_events_config .*{message}.*; an example: "):
        EngineConfig(kv_events_config=given)


def test_without_a_prefix_cache_there_is_nothing_to_tell() -> None:
    enabled = '{"enable_kv_cache_events": true}'
    with pytest.raises(ValueError, match="enable_prefix_caching is off: change one"):
        EngineConfig(kv_events_config=enabled, enable_prefix_caching=False)
    EngineConfig(kv_events_config="{}", enable_prefix_caching=False)
