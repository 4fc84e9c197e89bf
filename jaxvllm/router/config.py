"""`RouterConfig`: the options of a router, validated once and never changed."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from jaxvllm.core.routing import POLICIES


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """The options of a router."""

    backend: tuple[str, ...] = ()  # URLs of servers that do all of a request
    prefill: tuple[str, ...] = ()  # URLs of servers that compute prompts; needs decode, too
    decode: tuple[str, ...] = ()  # URLs of servers that go on from these prompts
    host: str = "127.0.0.1"  # address to listen on
    port: int = 8100  # 0: any that is free
    routing_policy: str = "least-load"  # which server gets a request: least-load, or session (header X-Session-ID)
    probe_seconds: float = 1.0  # between two looks at whether a server is ready
    prefill_timeout: float = 120.0  # seconds that a prompt may take; then its whole request goes to a decode server
    max_body_bytes: int = 8 << 20  # a longer body is refused

    def __post_init__(self) -> None:
        if bool(self.prefill) != bool(self.decode):
            raise ValueError("prefill and decode servers need each other: give --prefill URL and --decode URL")
        if bool(self.backend) == bool(self.decode):
            raise ValueError("give servers: --backend URL, or --prefill URL and --decode URL, but not both kinds")
        for url in (*self.backend, *self.prefill, *self.decode):
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"a server is http://HOST:PORT, not {url!r}")
        known = [name for name in POLICIES if name != "prefix"]  # which needs the servers' KV events
        if self.routing_policy not in known:
            raise ValueError(f"routing_policy must be one of {', '.join(known)}, not {self.routing_policy!r}")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be from 0 to 65535, not {self.port}")
        for name in ("probe_seconds", "prefill_timeout", "max_body_bytes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
