"""The messages between a server and the headless hosts that run engines for it, and the key that both need."""

import hashlib
import os
from collections.abc import Mapping

import msgspec
import zmq
from zmq.utils import z85

SECRET_VARIABLE = "JAXVLLM_DP_SECRET"
# Shorter secrets could be guessed by trying.
MIN_SECRET_CHARS = 16


class NodeMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A message. Its class name comes first on the wire."""


# ---- from the host to the server ----


class Join(NodeMessage, frozen=True):
    """The first message: the host runs engines with the numbers from `start_rank` on."""

    start_rank: int
    size: int


class Ended(NodeMessage, frozen=True):
    """Says that the process of the start number `start` has ended, or could not be started, and how."""

    start: int
    text: str
    was_killed: bool


# ---- from the server to the host ----


class Launch(NodeMessage, frozen=True):
    """Starts the process of engine `rank`, with `model` devices, which connects to `url` by `key`."""

    start: int
    rank: int
    model: int
    url: str
    key: bytes


class Kill(NodeMessage, frozen=True):
    """Kills the process of the start number `start`, if it runs."""

    start: int


encode = msgspec.msgpack.Encoder().encode
decode_from_host = msgspec.msgpack.Decoder(Join | Ended).decode
decode_from_server = msgspec.msgpack.Decoder(Launch | Kill).decode


def read_secret(environment: Mapping[str, str] = os.environ) -> str:
    """Returns the secret that the server and its headless hosts share. Raises ValueError when there is none."""
    secret = environment.get(SECRET_VARIABLE, "")
    if len(secret) < MIN_SECRET_CHARS:
        raise ValueError(
            f"replicas on other hosts need a secret: set {SECRET_VARIABLE} to the same random text on all of them, of "
            f"at least {MIN_SECRET_CHARS} characters (`openssl rand -hex 32` makes one)"
        )
    return secret


def server_keys(secret: str) -> tuple[bytes, bytes]:
    """Returns the server's public and private key of CurveZMQ.

    Both sides derive them. A process that does not know the secret knows neither key, so it can neither greet the
    server, nor answer in its place, nor read what is said.
    """
    derived = hashlib.scrypt(secret.encode(), salt=b"jaxvllm data parallel", n=2**14, r=8, p=1, dklen=32)
    private = z85.encode(derived)
    return zmq.curve_public(private), private
