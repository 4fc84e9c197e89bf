"""`Server`: the address of the server that a client uses, and the flags for it."""

import argparse
import os
from dataclasses import dataclass, field
from urllib.parse import urlsplit

HOST = "127.0.0.1"
PORT = 8000
KEY_VARIABLE = "OPENAI_API_KEY"


@dataclass(frozen=True)
class Server:
    """An OpenAI-compatible server. `base_url` has no /v1 at its end."""

    base_url: str
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        address = urlsplit(self.base_url)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise ValueError(f"the base URL must be like http://{HOST}:{PORT}, not {self.base_url}")
        try:
            _ = address.port
        except ValueError as error:
            raise ValueError(f"the base URL {self.base_url} has a wrong port: {error}") from None
        object.__setattr__(self, "base_url", self.base_url.rstrip("/").removesuffix("/v1").rstrip("/"))
        if self.api_key and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ValueError("the API key must be printable ASCII: it is sent in a header")

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    @classmethod
    def from_flags(cls, args: argparse.Namespace) -> "Server":
        host = f"[{args.host}]" if ":" in args.host else args.host
        return cls(args.base_url or f"http://{host}:{args.port}", args.api_key or os.environ.get(KEY_VARIABLE))


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Adds `--base-url`, `--host`, `--port`, `--api-key` and `--model`."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--base-url", "--url", metavar="URL", help=f"address of the server (default: http://{HOST}:{PORT})"
    )
    group.add_argument("--host", default=HOST, help="instead of --base-url (default: %(default)s)")
    group.add_argument("--port", type=int, default=PORT, help="instead of --base-url (default: %(default)s)")
    group.add_argument("--api-key", metavar="KEY", help=f"default: ${KEY_VARIABLE}")
    group.add_argument("--model", "--model-name", metavar="NAME", help="default: the first that the server lists")
