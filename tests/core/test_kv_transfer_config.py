"""What a user may ask of KV that travels. What is wrong is told at the start, by the name of its field."""

import json
from typing import Any

import pytest

from jaxvllm.core.kv_transfer_config import SECRET, KVTransferConfig

LONG = "a secret of some length"
WRONG: list[Any] = [["host"], {"a": 1}, 7, True, 1.5, [], ["x"] * 1000]


def peer(**extra: Any) -> dict[str, Any]:
    return {"kv_connector": "peer", "kv_connector_extra_config": {"secret": LONG} | extra}


@pytest.mark.parametrize("name", ["kv_connector", "kv_role", "engine_id", "kv_ip", "kv_connector_extra_config"])
@pytest.mark.parametrize("value", WRONG, ids=lambda value: str(value)[:12])
def test_a_field_of_another_type_is_told(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^kv_transfer_config .*{name}"):
        KVTransferConfig.read(json.dumps(peer() | {name: value}))


@pytest.mark.parametrize(
    "name", ["secret", "transport", "cpu_bytes_to_use", "device_bytes_to_use", "hold_seconds", "silence_seconds"]
)
@pytest.mark.parametrize("value", [["tcp"], {"a": 1}, True, [], "", None], ids=str)
def test_an_option_of_another_type_is_told(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        KVTransferConfig.read(peer(**{name: value}))


@pytest.mark.parametrize("path", [["x"], 7, "", None, "a\0b", {}])
def test_a_storage_path_of_another_type_is_told(path: Any) -> None:
    config = {"kv_connector": "files", "kv_connector_extra_config": {"shared_storage_path": path}}
    with pytest.raises(ValueError, match="shared_storage_path"):
        KVTransferConfig.read(config)


@pytest.mark.parametrize("value", ["[" * 100_000, "null", "1", "", [], None, 7])
def test_what_is_no_object_is_told(value: Any) -> None:
    with pytest.raises(ValueError, match="must be a JSON object"):
        KVTransferConfig.read(value)


@pytest.mark.parametrize("secret", ["s", "x" * 15, "\udc80" * 20, 1234567890123456])
def test_a_secret_that_can_be_guessed_is_refused_and_not_told(secret: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="openssl rand -hex 32") as refusal:
        KVTransferConfig.read(peer(secret=secret))
    assert str(secret) not in str(refusal.value) or secret == "s"
    if secret == "s":
        monkeypatch.setenv(SECRET, secret)
        with pytest.raises(ValueError, match="at least 16 bytes"):
            KVTransferConfig.read({"kv_connector": "peer"})


@pytest.mark.parametrize("address", ["0.0.0.0", "*", "::", "", "a b", "é", "host\n", "x" * 300])
def test_a_peer_listens_at_one_interface(address: str) -> None:
    with pytest.raises(ValueError, match="kv_ip must be the name or address of one interface"):
        KVTransferConfig.read(peer() | {"kv_ip": address})


def test_names_of_vllm_are_known() -> None:
    config = KVTransferConfig.read({"kv_connector": "OffloadingConnector", "kv_role": "producer"})
    assert (config.kv_connector, config.kv_role) == ("host", "kv_producer")
    assert KVTransferConfig.read(str(config)) == config
