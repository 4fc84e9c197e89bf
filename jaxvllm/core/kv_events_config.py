"""The options of the publication of KV events, by vLLM's names."""

import json
import re
from dataclasses import asdict, dataclass, fields
from typing import Literal, Self

from jaxvllm.core.value_checks import boolean, check_members, integer, json_members

_TCP = re.compile(r"tcp://(.+):(\d{1,5})")
_MAX_QUEUE_SIZE = 100_000  # vLLM's default


@dataclass(frozen=True)
class KVEventsConfig:
    """The addresses at which KV events are published, and the number that is kept.

    Raises ValueError for what cannot be.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None  # None: zmq if events are enabled
    endpoint: str = "tcp://*:5557"  # of replica 0; the port of each other replica is as much higher as its number
    replay_endpoint: str | None = None  # where missed batches may be asked for; None: nowhere
    buffer_steps: int = 10_000  # batches that are kept for that
    hwm: int = 100_000  # batches that wait for one subscriber; the rest is lost for a slower one
    max_queue_size: int = _MAX_QUEUE_SIZE  # no choice here: a batch goes to the socket at once
    topic: str = ""  # begins every message, so that a subscriber can choose

    def __post_init__(self) -> None:
        boolean("enable_kv_cache_events", self.enable_kv_cache_events)
        if self.publisher not in (None, "null", "zmq"):
            raise ValueError(f"publisher must be null or zmq, not {self.publisher!r}")
        integer("buffer_steps", self.buffer_steps, 1, 10**7)
        integer("hwm", self.hwm, 1, 10**7)
        if not isinstance(self.topic, str):
            raise ValueError(f"topic must be a string, not {self.topic!r}")
        if self.max_queue_size != _MAX_QUEUE_SIZE:
            raise ValueError(
                f"max_queue_size = {self.max_queue_size!r} is not supported (a batch goes to the socket at once): "
                "leave it out"
            )
        for name, value in (("endpoint", self.endpoint), ("replay_endpoint", self.replay_endpoint)):
            if value is not None:
                _check_endpoint(name, value)

    @classmethod
    def read(cls, value: object) -> Self:
        """Reads a mapping or a JSON object. Raises ValueError for anything else, and for unknown names."""
        try:
            members = json_members(value)
            check_members(members, [field.name for field in fields(cls)])
            return cls(**members)
        except ValueError as error:
            example = '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}'
            raise ValueError(f"kv_events_config {error}; an example: {example}") from error

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    @property
    def publishes(self) -> bool:
        """Whether there is anything to publish."""
        return self.enable_kv_cache_events and self.publisher != "null"

    def of_replica(self, rank: int) -> tuple[str, str | None]:
        """Returns the endpoints of the replica `rank`. As in vLLM its ports are those of the config plus `rank`."""
        replay = self.replay_endpoint
        return _of_replica(self.endpoint, rank), None if replay is None else _of_replica(replay, rank)


def _check_endpoint(name: str, value: object) -> None:
    is_path = isinstance(value, str) and value.startswith("ipc://") and len(value) > len("ipc://")
    match = _TCP.fullmatch(value) if isinstance(value, str) else None
    if not is_path and (match is None or not 0 < int(match[2]) < 2**16):
        raise ValueError(f"{name} must be tcp://HOST:PORT, tcp://*:PORT or ipc://PATH, not {value!r}")


def _of_replica(endpoint: str, rank: int) -> str:
    match = _TCP.fullmatch(endpoint)
    if match is not None:
        return f"tcp://{match[1]}:{int(match[2]) + rank}"
    return f"{endpoint}_dp{rank}" if rank else endpoint
