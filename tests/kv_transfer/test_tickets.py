"""Tickets: every field is looked at before anything follows it, and a ticket is for one prompt."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from jaxvllm.core.request import GenerationRequest, Prompt
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.engine.request_rules import RequestRules
from jaxvllm.kv_transfer.tickets import Ticket, WrongTicket, prompt_digest
from jaxvllm.server.protocol.fields import KVTransferParams

SECRET = "the secret of this test"
TOKENS = np.arange(20, dtype=np.int32)
TICKET = Ticket("engine", "0" * 32, "10.0.0.1", 7000, 16, prompt_digest(TOKENS[:16], "salt"), 1 << 40)
RULES = RequestRules(100, (), 50, takes_priorities=False, has_peers=True)


def check(params: Any, tokens: np.ndarray = TOKENS, salt: str | None = "salt") -> None:
    prompt = Prompt(None, tokens, salt)
    RULES.check(GenerationRequest("r", prompt, SamplingParams(max_tokens=1), kv_transfer_params=params))


def test_a_ticket_is_taken_as_it_was_given() -> None:
    params = TICKET.signed(SECRET)
    check(params)
    assert Ticket.read(params) == TICKET
    assert TICKET.is_signed(params, SECRET) and not TICKET.is_signed(params, SECRET + "!")


def test_a_ticket_survives_its_way_over_http() -> None:
    params = KVTransferParams.model_validate(TICKET.signed(SECRET)).model_dump(exclude_none=True)
    check(params)
    assert Ticket.read(params) == TICKET and TICKET.is_signed(params, SECRET)


TEXTS = ("remote_engine_id", "remote_request_id", "remote_host", "remote_prompt", "signature")
NUMBERS = ("remote_port", "remote_num_tokens", "remote_expires")


@pytest.mark.parametrize("name", TEXTS + NUMBERS)
def test_a_value_that_no_engine_gives_is_refused_by_its_name(name: str) -> None:
    wrong: Mapping[bool, list[Any]] = {
        True: ["", "é", "x" * 1025, "a b", "a\n", "\0", "\ud800", 7, None, True, ["0" * 64], {}],
        False: [-1, 1 << 60, True, 1.0, "1", None, [], float("nan")],
    }
    for value in wrong[name in TEXTS]:
        with pytest.raises(WrongTicket, match=rf"kv_transfer_params\.{name} must be") as refusal:
            check(TICKET.signed(SECRET) | {name: value})
        assert refusal.value.param == "kv_transfer_params"
    left = TICKET.signed(SECRET)
    del left[name]
    with pytest.raises(WrongTicket, match=name):
        check(left)


@pytest.mark.parametrize("params", [[], "do_remote_prefill", 1])
def test_what_is_no_object_is_refused(params: Any) -> None:
    with pytest.raises(ValueError, match="must be an object"):
        check(params)


def test_a_ticket_of_another_prompt_or_salt_is_refused() -> None:
    params = TICKET.signed(SECRET)
    check(params, TOKENS[:17])
    for tokens, salt in ((TOKENS[:15], "salt"), (TOKENS + 1, "salt"), (TOKENS, None), (TOKENS, "other")):
        with pytest.raises(WrongTicket, match="another prompt or cache_salt"):
            check(params, tokens, salt)
