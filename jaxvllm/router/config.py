"""`RouterConfig`: the options of a router, validated once and never changed."""

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from jaxvllm.core.routing import POLICIES
from jaxvllm.server.http.http_config import HttpConfig

_ENDPOINT = re.compile(r"(tcp://[^\s:*]+:\d{1,5}|ipc://\S+)")


@dataclass(frozen=True, kw_only=True)
class RouterConfig(HttpConfig):
    """The options of a router. The options of HTTP are a server's."""

    backend: tuple[str, ...] = ()  # URLs of servers that do all of a request
    prefill: tuple[str, ...] = ()  # URLs of servers that compute prompts; needs decode, too
    decode: tuple[str, ...] = ()  # URLs of servers that go on from these prompts
    port: int = 8100  # port to listen on; 0: any free port, which is printed
    routing_policy: str = "least-load"  # least-load, session (header X-Session-ID), or prefix (needs kv_events)
    kv_events: tuple[str, ...] = ()  # of each server, in their order: ENDPOINT or ENDPOINT,REPLAY_ENDPOINT
    probe_seconds: float = 1.0  # between two looks at whether a server is ready
    prefill_timeout: float = 120.0  # seconds that a prompt may take; then its whole request goes to a decode server

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.prefill) != bool(self.decode):
            raise ValueError("prefill and decode servers need each other: give --prefill URL and --decode URL")
        if bool(self.backend) == bool(self.decode):
            raise ValueError("give servers: --backend URL, or --prefill URL and --decode URL, but not both kinds")
        for url in self.servers:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"a server is http://HOST:PORT, not {url!r}")
        if self.routing_policy not in POLICIES:
            raise ValueError(f"routing_policy must be one of {', '.join(POLICIES)}, not {self.routing_policy!r}")
        self._check_kv_events()
        for name in ("probe_seconds", "prefill_timeout"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")

    @property
    def servers(self) -> tuple[str, ...]:
        """The URLs of all servers."""
        return (*self.backend, *self.prefill, *self.decode)

    @property
    def event_endpoints(self) -> dict[str, tuple[str, str | None]]:
        """The addresses of each server's KV events, and of a replay of missed ones, by the server's URL."""
        split = (value.partition(",") for value in self.kv_events)
        pairs = ((endpoint, replay or None) for endpoint, _, replay in split)
        return dict(zip(self.servers, pairs, strict=True))

    def _check_kv_events(self) -> None:
        needed = len(self.servers) if self.routing_policy == "prefix" else 0
        if len(self.kv_events) != needed:
            why = f"has {len(self.kv_events)} endpoints for {needed} servers"
            if not needed:
                why = f"is for the routing_policy prefix, and this is {self.routing_policy}"
            raise ValueError(f"kv_events {why}: give the endpoint of each server's KV events with prefix, else none")
        for value in self.kv_events:
            for endpoint in value.split(","):
                if not _ENDPOINT.fullmatch(endpoint):
                    raise ValueError(f"kv_events are tcp://HOST:PORT, or two of these with a comma, not {value!r}")
