"""schemathesis reads /openapi.json and sends what it allows, and what it does not: no 5xx, no undocumented status."""

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.faults.server import KEY, Server
from tests.waiting import PATIENCE

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES = 15


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_every_endpoint(server: Server, mode: GenerationMode) -> None:
    base = f"http://127.0.0.1:{server.port}"
    headers = {"authorization": f"Bearer {KEY}"}
    schema = schemathesis.openapi.from_dict(httpx.get(f"{base}/openapi.json", headers=headers, timeout=PATIENCE).json())
    schema.config.update(base_url=base)
    tried = []
    for found in schema.get_all_operations():
        operation = found.ok()

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.generate],
        )
        def check(case: schemathesis.Case) -> None:
            case.call_and_validate(checks=CHECKS, headers=headers, timeout=PATIENCE)

        try:
            check()
        except Unsatisfiable:  # nothing about it can be wrong
            continue
        except Exception as error:
            error.add_note(f"{mode.value} data of {operation.label}")
            raise
        tried.append(operation.label)
    assert {"POST /v1/chat/completions", "POST /v1/messages", "POST /tokenize"} <= set(tried)
