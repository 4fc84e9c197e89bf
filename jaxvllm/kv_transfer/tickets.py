"""Tickets: what a producer's answer says about its pages, signed, so that a consumer contacts no address of a stranger.

They travel in `kv_transfer_params` through whatever proxy is between the engines, which passes them on unread. The
names are those of vLLM's connectors, so its disaggregated proxies do it, too.
"""

import hashlib
import hmac
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from jaxvllm.core.errors import ParameterError
from jaxvllm.core.kv_transfer_config import ENGINE_ID, HOST
from jaxvllm.core.request import TokenIds
from jaxvllm.core.value_checks import MAX_INT32, shown

# The first answer of the pair says this, and the second request says it back.
_OF_CONSUMER = {"do_remote_prefill": True, "do_remote_decode": False}
# What each field must look like. All of it is ASCII, as everything is that a message, a log or an address may hold.
_TEXTS: Mapping[str, tuple[re.Pattern[str], str]] = {
    "remote_engine_id": (ENGINE_ID, "1 to 256 visible ASCII characters"),
    "remote_request_id": (re.compile(r"[0-9a-f]{32}"), "32 hexadecimal digits"),
    "remote_host": (HOST, "the name or address of a host"),
    "remote_prompt": (re.compile(r"[0-9a-f]{64}"), "64 hexadecimal digits"),
    "signature": (re.compile(r"[0-9a-f]{64}"), "64 hexadecimal digits"),
}
_NUMBERS: Mapping[str, tuple[int, int]] = {
    "remote_port": (1, 65535),
    "remote_num_tokens": (1, MAX_INT32),
    "remote_expires": (0, 1 << 53),
}
NAME = "kv_transfer_params"


class WrongTicket(ParameterError):
    """Parameters that are no ticket, or that are a ticket for something else."""

    def __init__(self, text: str):
        super().__init__(f"{NAME}{text}", NAME)


@dataclass(frozen=True)
class Ticket:
    """The pages of one prompt, which an engine holds for whoever shows this. Raises WrongTicket for impossible values.

    `remote_request_id` is a name that nobody can guess, and not the id that a client may have chosen.
    """

    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    remote_num_tokens: int  # whose pages there are, from the start of the prompt on
    remote_prompt: str  # the `prompt_digest` of these tokens
    remote_expires: int  # Unix time, seconds: nobody is asked for these pages any more

    def __post_init__(self) -> None:
        for field in fields(self):
            check_field(field.name, getattr(self, field.name))

    def signed(self, secret: str) -> dict[str, Any]:
        """Returns it as the `kv_transfer_params` of an answer."""
        # Proxies of vLLM expect a list of blocks. Pages are found by their hashes here, so it is empty.
        known = _OF_CONSUMER | asdict(self) | {"remote_block_ids": [], "tp_size": 1}
        return known | {"signature": self.signature(secret)}

    def signature(self, secret: str) -> str:
        """Returns 64 hexadecimal digits that only somebody with the secret can make for this ticket."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()

    @classmethod
    def read(cls, params: Mapping[str, Any]) -> Self:
        """Reads the `kv_transfer_params` of a request. Raises WrongTicket, which names the field that is not right.

        Whether the signature is right is another question: see `is_signed`.
        """
        check_field("signature", params.get("signature"))
        return cls(**{field.name: params.get(field.name) for field in fields(cls)})  # type: ignore[arg-type]

    def is_signed(self, params: Mapping[str, Any], secret: str) -> bool:
        """Returns whether the `kv_transfer_params` that this was read from were signed by an engine with the same
        secret.
        """
        return same_text(params["signature"], self.signature(secret))

    def check_prompt(self, token_ids: TokenIds, salt: str | None) -> None:
        """Raises WrongTicket where it was not made for a prompt that begins like this one, with the same salt."""
        count = self.remote_num_tokens
        if count > len(token_ids) or not same_text(self.remote_prompt, prompt_digest(token_ids[:count], salt)):
            raise WrongTicket(
                " belong to another prompt or cache_salt: pass on those of the first answer to the same prompt"
            )


def prompt_digest(token_ids: TokenIds, salt: str | None) -> str:
    """Returns 64 hexadecimal digits that differ for other tokens and for other salts, as page hashes do."""
    seed = hashlib.sha256(b"" if salt is None else b"salt:" + salt.encode()).digest()
    return hashlib.sha256(seed + token_ids.tobytes()).hexdigest()


def check_field(name: str, value: object) -> None:
    """Raises WrongTicket for a value that the field `name` of a ticket cannot have."""
    if name in _TEXTS:
        pattern, rule = _TEXTS[name]
        is_right = isinstance(value, str) and pattern.fullmatch(value) is not None
    else:
        low, high = _NUMBERS[name]
        rule = f"an integer from {low} to {high}"
        is_right = type(value) is int and low <= value <= high
    if not is_right:
        raise WrongTicket(f".{name} must be {rule}, not {shown(value)}: pass on those of the first answer")


def same_text(one: str, other: str) -> bool:
    """Returns whether two texts are equal, in a time that tells nothing about the place where they differ."""
    return hmac.compare_digest(one.encode(errors="replace"), other.encode(errors="replace"))


def wants_remote_decode(params: Mapping[str, Any] | None) -> bool:
    """Returns whether a request with these parameters only computes its prompt, for another engine to go on."""
    return params is not None and params.get("do_remote_decode") is True


def wants_remote_prefill(params: Mapping[str, Any] | None) -> bool:
    """Returns whether another engine has computed the prompt of a request with these parameters."""
    return params is not None and params.get("do_remote_prefill") is True
