"""What a server tells of itself, and the files of the playground."""

import re
from pathlib import Path

import httpx
import pytest

import jaxvllm
from jaxvllm.server.routes import playground
from jaxvllm.server.routes.info import Load, ModelCard, ModelList
from tests.waiting import PATIENCE, wait_until

PLAYGROUND = Path(playground.__file__).parents[1] / "playground"


def test_models(server):
    listed = server.client.get("/v1/models").json()
    ModelList.model_validate(listed)
    [card] = listed["data"]
    assert (card["id"], card["root"], card["max_model_len"]) == ("demo", "demo", 512)
    assert server.client.get("/v1/models/demo").json() == card
    assert card["parent"] is None
    [permission] = card["permission"]
    assert permission["id"].startswith("modelperm-")
    assert permission == {  # vLLM's, to the letter
        "id": permission["id"],
        "created": card["created"],
        "object": "model_permission",
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    ModelCard.model_validate(card)
    response = server.client.get("/v1/models/a/b")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_models_for_the_client_of_anthropic(server):
    header = {"anthropic-version": "2023-06-01"}
    listed = server.client.get("/v1/models", headers=header).json()
    [model] = listed["data"]
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "demo", "demo")
    assert (model["id"], model["type"], model["display_name"]) == ("demo", "model", "demo")
    assert server.client.get("/v1/models/demo", headers=header).json() == model
    missing = server.client.get("/v1/models/a/b", headers=header)
    assert (missing.status_code, missing.json()["type"], missing.json()["error"]["type"]) == (
        404,
        "error",
        "not_found_error",
    )


def test_claude_code_finds_a_server_before_its_first_request(server):
    response = server.client.head("/")
    assert (response.status_code, response.content) == (200, b"")


def test_health_and_readiness(server):
    assert server.client.get("/health").content == b""
    response = server.client.get("/ready")
    assert (response.status_code, response.json()["status"]) == (200, "ready")


def test_version(server):
    assert server.client.get("/version").json() == {"version": jaxvllm.__version__}


def test_load(server):
    body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 40}  # 8 at a time
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # closes the response when it is dropped
        next(lines)
        load = server.client.get("/load").json()
    Load.model_validate(load)
    assert load["server_load"] == 1
    server.until_idle()
    assert server.client.get("/load").json()["server_load"] == 0


def test_metrics(server):
    response = server.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    assert "jaxvllm:" in response.text


@pytest.mark.parametrize("path", ["/nothing", "/v1", "/v1/complete", "/playground", "/redoc", "/playground/static/a/b"])
def test_a_path_that_is_not_there(server, path):
    for response in (server.client.get(path), server.post(path, prompt="a")):
        assert response.status_code == 404
        assert response.json()["error"]["type"] == "not_found_error"


def test_a_method_that_is_not_there(server):
    response = server.client.get("/v1/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_head_answers_as_get_does_without_the_body(server):
    """Load balancers, link checkers and `curl -I` ask so. The listed paths are all GET endpoints of the application."""
    document = server.client.get("/openapi.json").json()
    listed = [path for path, methods in document["paths"].items() if "get" in methods]
    assert not any("head" in methods for methods in document["paths"].values())  # docs/http.md has each endpoint once
    assert {"/", "/health", "/live", "/ready", "/v1/models", "/playground/state"} <= set(listed)
    paths = [path.replace("{name}", "demo" if path.startswith("/v1/models") else "main.js") for path in listed]
    stored = server.answer("/v1/responses", input="Hello", max_output_tokens=1)["id"]
    for path in [*(path.replace("{response_id}", stored) for path in paths), "/docs", "/openapi.json"]:
        get, head = server.client.get(path), server.client.head(path)
        assert (get.status_code, head.status_code, head.content) == (200, 200, b""), path
        assert head.headers.get("content-type") == get.headers.get("content-type")
        if path not in ("/metrics", "/load", "/playground/state"):  # their length is never twice the same
            assert head.headers["content-length"] == str(len(get.content)), path
    assert server.client.head("/nothing").status_code == 404
    response = server.client.head("/v1/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")


# ---- the playground ----


def test_the_page_and_its_files(server):
    page = server.client.get("/")
    assert page.text == (PLAYGROUND / "index.html").read_text()
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    for path in PLAYGROUND.iterdir():
        response = server.client.get(f"/playground/static/{path.name}")
        assert response.content == path.read_bytes()
        assert response.headers["content-security-policy"].startswith("default-src 'self';")
        assert response.headers["x-content-type-options"] == "nosniff"


def test_the_page_names_only_files_that_are_there(server):
    names = re.findall(r'(?:href|src)="([^"]+)"', (PLAYGROUND / "index.html").read_text())
    assert len(names) >= 3
    assert [server.client.get(f"/{name}").status_code for name in names] == [200] * len(names)


def test_a_browser_asks_whether_a_file_has_changed(server):
    first = server.client.get("/")
    assert first.headers["cache-control"] == "no-cache"
    again = server.client.get("/", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert server.client.get("/", headers={"if-none-match": '"old"'}).status_code == 200


@pytest.mark.parametrize("name", ["nothing.js", "..", "%2e%2e", "..%2fapp.py", "%2e%2e%2fapp.py", "index.html%00", "."])
def test_no_other_file_is_served(server, name):
    assert server.client.get(f"/playground/static/{name}").status_code == 404


def test_what_the_engine_is_doing(server):
    prompt = "A frog lived in a pond. " * 12
    body = {"prompt": prompt, "max_tokens": 400, "ignore_eos": True, "stream": True, "request_id": "frog", "n": 2}

    def while_both_run():
        with server.client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            while server.llm.num_requests:
                state = server.client.get("/playground/state").json()
                if state["stats"]["running"] == 2:
                    return state
        return None  # they ended before this test saw them

    state = wait_until(while_both_run)
    assert state["page_size"] == 16
    [replica] = state["replicas"]
    assert len(replica["states"]) == 200
    assert set(replica["states"]) <= {0, 1, 2, 3}
    assert replica["states"].count(3) == 1
    assert len(replica["requests"]) == 2
    for request in replica["requests"]:
        assert request["id"].startswith("frog")
        assert len(request["shared"]) >= 1  # the prompt's pages, which both completions read
        assert set(request["shared"]) < set(request["pages"])
        assert 16 * (len(request["pages"]) - 2) < request["tokens"] <= 16 * len(request["pages"])
        assert {replica["states"][page] for page in request["pages"]} == {1}
    assert state["stats"]["pages"] == 199
    assert state["stats"]["pages_owned"] == replica["states"].count(1)
    assert state["stats"]["running"] == 2
    step = state["steps"][-1]
    assert step["decode"] + step["prefill"] <= step["bucket"]
    assert step["host_ms"] > 0 < step["device_ms"]
    assert len(state["steps"]) <= 256


def test_many_who_look_ask_the_engine_once(server, monkeypatch):
    monkeypatch.setattr(playground, "FRESH_SECONDS", 60)

    async def run() -> int:
        asked = []
        pages = server.llm.pages
        server.llm.pages = lambda: asked.append(1) or pages()
        try:
            async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:
                for _ in range(6):
                    assert (await client.get("/playground/state")).status_code == 200
        finally:
            del server.llm.pages
        return len(asked)

    assert server.portal.call(run) <= 1
