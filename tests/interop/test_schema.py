"""schemathesis reads /openapi.json and sends what it allows, and what it does not: no 5xx, no undocumented status."""

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable

from tests.faults.server import KEY, Server
from tests.waiting import PATIENCE

EXAMPLES = 10


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_every_endpoint(server: Server, mode: str) -> None:
    # Imported here: all processes of a run collect this file, and one of them runs it.
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.generation import GenerationMode
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    checks = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
    base = f"http://127.0.0.1:{server.port}"
    headers = {"authorization": f"Bearer {KEY}"}
    schema = schemathesis.openapi.from_dict(httpx.get(f"{base}/openapi.json", headers=headers, timeout=PATIENCE).json())
    schema.config.update(base_url=base)
    tried = []
    for found in schema.get_all_operations():
        operation = found.ok()

        @given(case=operation.as_strategy(generation_mode=GenerationMode(mode)))
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.generate],
        )
        def check(case: schemathesis.Case) -> None:
            case.call_and_validate(checks=checks, headers=headers, timeout=PATIENCE)

        try:
            check()
        except Unsatisfiable:  # nothing about it can be wrong
            continue
        except Exception as error:
            error.add_note(f"{mode} data of {operation.label}")
            raise
        tried.append(operation.label)
    assert {"POST /v1/chat/completions", "POST /v1/messages", "POST /tokenize"} <= set(tried)
