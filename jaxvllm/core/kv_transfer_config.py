"""The options of KV that travels, by vLLM's names."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Self, get_args

from jaxvllm.core.value_checks import check_members, integer, number, shown

Connector = Literal["host", "files", "peer"]
Transport = Literal["tcp", "device"]  # how pages cross between peers
Role = Literal["kv_producer", "kv_consumer", "kv_both"]
# vLLM's connectors that do the same, and other common ways to say a role.
_CONNECTORS: Mapping[str, Connector] = {
    "OffloadingConnector": "host",
    "SharedStorageConnector": "files",
    "ExampleConnector": "files",
    "NixlConnector": "peer",
}
_ROLES: Mapping[str, Role] = {"producer": "kv_producer", "consumer": "kv_consumer", "both": "kv_both"}
# The options of each connector: the name in `kv_connector_extra_config`, and whether it must be there.
_EXTRA: Mapping[Connector, Mapping[str, bool]] = {
    "host": {"cpu_bytes_to_use": False},
    "files": {"shared_storage_path": True},
    "peer": {
        "secret": True,
        "transport": False,
        "cpu_bytes_to_use": False,
        "device_bytes_to_use": False,
        "hold_seconds": False,
        "silence_seconds": False,
    },
}
SECRET = "JAXVLLM_KV_SECRET"  # the variable of the environment that may have it instead
# Whoever has the secret may have an engine connect to any address, and one that is guessed is had.
LEAST_SECRET_BYTES = 16
# What tickets and addresses may hold.
ENGINE_ID = re.compile(r"[!-~]{1,256}")
HOST = re.compile(r"[0-9A-Za-z._:%\[\]-]{1,255}")
# Names of all interfaces at once, at which no other engine can reach this one.
_ALL_INTERFACES = ("*", "0.0.0.0", "::", "[::]")
# Fields of vLLM that are no choice here: the values that change nothing, and what to tell who gives another.
_NO_CHOICE: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "kv_buffer_device": ((None, "cpu", "cuda", "tpu"), "pages wait where the connector keeps them"),
    "kv_buffer_size": ((None, 1e9), "the connector says how much it keeps"),
    "kv_connector_module_path": ((None,), "a connector of one's own is given to `Engine` from Python"),
    "kv_parallel_size": ((None, 1), "engines find each other by the requests' parameters"),
    "kv_rank": ((None, 0), "engines find each other by the requests' parameters"),
    "enable_permute_local_kv": ((None, False), "pages travel in one layout"),
    "kv_load_failure_policy": ((None, "recompute"), "what does not come is computed"),
}
DEFAULT_HOST_BYTES = 4 << 30
DEFAULT_DEVICE_BYTES = 1 << 30


@dataclass(frozen=True)
class KVTransferConfig:
    """The connector that keeps or carries pages, and its options. Raises ValueError for values out of range."""

    kv_connector: Connector
    kv_role: Role = "kv_both"  # producer: saves pages; consumer: loads them
    engine_id: str | None = None  # None: a random one
    kv_ip: str = "127.0.0.1"  # peer: what it listens on, and what other engines call it
    kv_port: int = 0  # peer; 0: any port that is free
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, synonyms in (("kv_connector", _CONNECTORS), ("kv_role", _ROLES)):
            if isinstance(given := getattr(self, name), str):
                object.__setattr__(self, name, synonyms.get(given, given))
        for name, allowed in (("kv_connector", get_args(Connector)), ("kv_role", get_args(Role))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {shown(getattr(self, name))}")
        if self.engine_id is not None and not _matches(ENGINE_ID, self.engine_id):
            raise ValueError(f"engine_id must be 1 to 256 visible ASCII characters, not {shown(self.engine_id)}")
        extra, known = self.kv_connector_extra_config, _EXTRA[self.kv_connector]
        if not isinstance(extra, Mapping):
            raise ValueError(f"kv_connector_extra_config must be a JSON object, not {shown(extra)}")
        for name in extra:
            if name not in known:
                listed = ", ".join(known)
                raise ValueError(
                    f"kv_connector_extra_config of {self.kv_connector} has no {shown(name)}: it has {listed}"
                )
        if self.kv_connector == "peer" and "secret" not in extra and SECRET in os.environ:
            extra = {**extra, "secret": os.environ[SECRET]}
            object.__setattr__(self, "kv_connector_extra_config", extra)
        for name, is_needed in known.items():
            if is_needed and extra.get(name) in (None, ""):
                variable = f", or {SECRET} in the environment" if name == "secret" else ""
                raise ValueError(f"kv_connector_extra_config of {self.kv_connector} needs {name}{variable}")
        if "secret" in extra:
            _check_secret(extra["secret"])
        if "shared_storage_path" in extra:
            path = extra["shared_storage_path"]
            if not isinstance(path, str) or "\0" in path:
                raise ValueError(f"shared_storage_path must be the path of a directory, not {shown(path)}")
        integer("kv_port", self.kv_port, 0, 65535)
        if not _matches(HOST, self.kv_ip) or self.kv_ip in _ALL_INTERFACES:
            raise ValueError(
                f"kv_ip must be the name or address of one interface, which other engines reach, not "
                f"{shown(self.kv_ip)}: leave it out for this host alone"
            )
        for name in ("hold_seconds", "silence_seconds"):
            if name in extra:
                number(name, extra[name], 0.1, 86400)
        for name in ("cpu_bytes_to_use", "device_bytes_to_use"):
            if name in extra:
                integer(name, extra[name], 1, 1 << 50)
        if extra.get("transport", "tcp") not in get_args(Transport):
            listed = ", ".join(get_args(Transport))
            raise ValueError(f"transport must be one of {listed}, not {shown(extra['transport'])}")

    @property
    def saves(self) -> bool:
        return self.kv_role != "kv_consumer"

    @property
    def loads(self) -> bool:
        return self.kv_role != "kv_producer"

    @property
    def leaves_engine(self) -> bool:
        """Whether pages reach other engines, or this one's next start, so that they must tell their model."""
        return self.kv_connector != "host"

    @property
    def stays_on_devices(self) -> bool:
        """Whether pages that are kept for others stay in the memory of the devices."""
        return self.kv_connector_extra_config.get("transport") == "device"

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that pages beside the pool may take, of the host or of the devices together."""
        if self.stays_on_devices:
            return int(self.kv_connector_extra_config.get("device_bytes_to_use", DEFAULT_DEVICE_BYTES))
        return int(self.kv_connector_extra_config.get("cpu_bytes_to_use", DEFAULT_HOST_BYTES))

    @property
    def storage_path(self) -> str:
        """The directory of pages in files."""
        return str(self.kv_connector_extra_config["shared_storage_path"])

    @classmethod
    def read(cls, value: object) -> Self:
        """Reads a mapping or a JSON object. Raises ValueError for anything else, and for unknown names."""
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                pass
        try:
            if not isinstance(value, Mapping):
                raise ValueError(f"must be a JSON object, not {shown(value)}")
            names = [one.name for one in fields(cls)]
            check_members(value, names, _NO_CHOICE)
            if value.get("kv_connector") is None:
                raise ValueError(f"needs kv_connector: one of {', '.join(get_args(Connector))}")
            return cls(**{name: one for name, one in value.items() if name in names and one is not None})
        except ValueError as error:
            example = '{"kv_connector": "host", "kv_role": "kv_both"}'
            raise ValueError(f"kv_transfer_config {error}; an example: {example}") from error

    def __str__(self) -> str:
        return json.dumps(asdict(self))


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _check_secret(value: object) -> None:
    """Raises ValueError, which does not tell the secret, for one that is too short or no text."""
    advice = "make one with `openssl rand -hex 32`"
    if not isinstance(value, str):
        raise ValueError(f"secret must be a string, not {type(value).__name__}: {advice}")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise ValueError(f"secret must be valid UTF-8: {advice}") from None
    if size < LEAST_SECRET_BYTES:
        raise ValueError(f"secret must have at least {LEAST_SECRET_BYTES} bytes, not {size}: {advice}")
