"""Endpoints that are there with --dev-endpoints alone."""

import json
from typing import Any

from jaxvllm.server.config import ServerConfig

PATH = "/reset_prefix_cache"
DEVELOPMENT = ServerConfig(dev_endpoints=True)
BODY: dict[str, Any] = dict(prompt="A bear sat by the river. " * 10, max_tokens=4, temperature=0, cache_salt="dev")


def test_it_is_off_by_default(server):
    assert server.client.post(PATH).status_code == 404


def test_no_prefix_is_found_after_a_reset(server):
    def cached() -> int:
        return server.answer("/v1/completions", **BODY)["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert (cached(), cached() > 16) == (0, True)
    response = server.ask(DEVELOPMENT, PATH)
    assert (response.status_code, response.content) == (200, b"")
    assert (cached(), cached() > 16) == (0, True)


def test_running_requests_go_on(server):
    body = BODY | {"max_tokens": 100, "ignore_eos": True}
    expected = server.answer("/v1/completions", **body)["choices"][0]["text"]
    with server.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        lines = response.iter_lines()
        text = [next(lines)]
        assert server.ask(DEVELOPMENT, PATH).status_code == 200
        text += lines
    assert joined(text) == expected
    assert server.answer("/v1/completions", **body)["choices"][0]["text"] == expected


def joined(lines: list[str]) -> str:
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def test_a_web_page_may_not(server):
    response = server.ask(DEVELOPMENT, PATH, headers={"origin": "http://page.example"})
    assert response.status_code == 403
