"""Tickets: what a producer's answer says about its pages, signed, so that a consumer contacts no address of a stranger.

They travel in `kv_transfer_params` through whatever proxy is between the engines, which passes them on unread. The
names are those of vLLM's connectors, so its disaggregated proxies do it, too.
"""

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

# The first answer of the pair says this, and the second request says it back.
_OF_CONSUMER = {"do_remote_prefill": True, "do_remote_decode": False}


class WrongTicket(ValueError):
    """Parameters that no engine with the same secret has signed."""


@dataclass(frozen=True)
class Ticket:
    """The pages of one prompt, which an engine holds for whoever shows this."""

    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    remote_num_tokens: int  # whose pages there are, from the start of the prompt on

    def signed(self, secret: str) -> dict[str, Any]:
        """Returns it as the `kv_transfer_params` of an answer."""
        # Proxies of vLLM expect a list of blocks. Pages are found by their hashes here, so it is empty.
        known = _OF_CONSUMER | asdict(self) | {"remote_block_ids": [], "tp_size": 1}
        return known | {"signature": self.signature(secret)}

    def signature(self, secret: str) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()

    @classmethod
    def read(cls, params: Mapping[str, Any], secret: str) -> Self:
        """Reads the `kv_transfer_params` of a request. Raises WrongTicket unless `signed` made them with `secret`."""
        given = {name: params.get(name) for name in cls.__dataclass_fields__}
        wrong = [name for name, value in given.items() if type(value) not in (str, int)]
        if wrong:
            raise WrongTicket(f"kv_transfer_params have no proper {wrong[0]}: pass on those of the first answer")
        ticket = cls(**given)  # type: ignore[arg-type]  # the signature is what counts
        signature = params.get("signature")
        if not isinstance(signature, str) or not hmac.compare_digest(signature, ticket.signature(secret)):
            raise WrongTicket("kv_transfer_params are not signed by an engine with the same secret")
        return ticket


def wants_remote_decode(params: Mapping[str, Any] | None) -> bool:
    """Whether a request with these parameters only computes its prompt, for another engine to go on."""
    return params is not None and params.get("do_remote_decode") is True


def wants_remote_prefill(params: Mapping[str, Any] | None) -> bool:
    """Whether another engine has computed the prompt of a request with these parameters."""
    return params is not None and params.get("do_remote_prefill") is True
