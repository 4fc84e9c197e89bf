"""Endpoints that are there with --dev-endpoints alone."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import ml_dtypes  # noqa: F401  # NumPy has no bfloat16 without it
import pytest
from safetensors.numpy import load_file, save_file

from jaxvllm.server.config import ServerConfig
from tests.router.test_kills import ENGINE, is_ready, running
from tests.waiting import PATIENCE, wait_until

DEMO = Path(__file__).parent.parent.parent / "jaxvllm/assets/demo"
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


@pytest.mark.parametrize("query", ["", "?reset_running_requests=true&reset_external=true"])
def test_running_requests_go_on(server, query):
    body = BODY | {"max_tokens": 100, "ignore_eos": True}
    expected = server.answer("/v1/completions", **body)["choices"][0]["text"]
    with server.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        lines = response.iter_lines()
        text = [next(lines)]
        assert server.ask(DEVELOPMENT, PATH + query).status_code == 200
        text += lines
    assert joined(text) == expected
    assert server.answer("/v1/completions", **body)["choices"][0]["text"] == expected


def test_what_is_reset_is_a_yes_or_no(server):
    response = server.ask(DEVELOPMENT, PATH + "?reset_external=maybe")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "reset_external"


def joined(lines: list[str]) -> str:
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


@pytest.mark.slow
def test_pages_in_host_memory_are_reset_on_request(tmp_path):
    """All the way: HTTP in two processes, the one that holds the engine, and the engine in another."""
    kept = ["--kv-transfer-config", '{"kv_connector": "host"}', "--dev-endpoints", "--api-server-count", "2"]
    with running(tmp_path / "log", "serve", *ENGINE, *kept) as server:
        wait_until(lambda: is_ready(server.url), (tmp_path / "log").read_text)

        def cached() -> int:
            body = BODY | {"model": "demo"}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE).json()
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        def reset(query: str = "") -> int:
            return httpx.post(f"{server.url}{PATH}{query}", timeout=PATIENCE).status_code

        assert cached() == 0
        assert reset("?reset_external=true") == 200
        assert cached() == 0
        assert reset() == 200
        wait_until(lambda: reset() == 200 and cached() > 16)  # once the page is saved
        assert reset("?reset_external=true&reset_running_requests=true") == 200
        assert cached() == 0


def test_a_web_page_may_not(server):
    response = server.ask(DEVELOPMENT, PATH, headers={"origin": "http://page.example"})
    assert response.status_code == 403


def test_weights_are_replaced_by_those_of_a_directory(server, tmp_path):
    path = "/update_weights_from_disk"
    assert server.client.post(path, json={"model_path": "/x"}).status_code == 404  # it is off by default
    body = BODY | {"cache_salt": "weights"}
    before = server.answer("/v1/completions", **body)["choices"][0]["text"]
    for wrong in ("here", str(tmp_path / "nowhere")):
        response = server.ask(DEVELOPMENT, path, model_path=wrong)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "model_path"), response.text
    page = {"origin": "http://page.example"}
    assert server.ask(DEVELOPMENT, path, headers=page, model_path=str(DEMO)).status_code == 403
    assert server.answer("/v1/completions", **body)["choices"][0]["text"] == before
    tensors = load_file(DEMO / "model.safetensors")
    tensors["model.norm.weight"] = -tensors["model.norm.weight"]  # the least likely tokens are the most likely
    save_file(tensors, tmp_path / "model.safetensors")
    named = {"model_path": str(tmp_path), "weight_version": "turned"}
    assert server.ask(DEVELOPMENT, path, **named).json() == {"success": True, "message": ""}
    assert server.ask(DEVELOPMENT, INFO, "GET").json() == {"weight_version": "turned"}
    answer = server.answer("/v1/completions", **body)
    assert answer["choices"][0]["text"] != before
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert server.ask(DEVELOPMENT, path, model_path=str(DEMO)).status_code == 200
    assert server.answer("/v1/completions", **body)["choices"][0]["text"] == before


INFO = "/weight_info"


def test_vllms_endpoint_takes_a_directory_and_keeps_what_runs(server):
    path = "/update_weights"
    assert server.client.post(path, json={"model_path": "/x"}).status_code == 404  # it is off by default
    assert server.client.get(INFO).status_code == 404
    response = server.ask(DEVELOPMENT, path, model_path=str(DEMO), kv="keep", weight_version="seven")
    assert response.json() == {"weight_version": "seven"}
    first = server.ask(DEVELOPMENT, path, model_path=str(DEMO)).json()  # it gets a name of its own
    assert first == server.ask(DEVELOPMENT, INFO, "GET").json() != {"weight_version": "seven"}
    body = BODY | {"max_tokens": 100, "ignore_eos": True, "cache_salt": "vllm"}
    expected = server.answer("/v1/completions", **body)["choices"][0]["text"]
    with server.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        lines = response.iter_lines()
        text = [next(lines)]
        assert server.ask(DEVELOPMENT, path, model_path=str(DEMO), kv="keep").status_code == 200
        text += lines
    assert joined(text) == expected


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/update_weights", {"update_info": {"names": []}}, "update_info", "send tensors from one GPU to another"),
        ("/update_weights", {"kv": "keep"}, "model_path", "model_path is missing"),
        ("/update_weights", {"model_path": str(DEMO), "kv": "reset"}, "kv", "drop"),
        ("/update_weights", {"model_path": str(DEMO), "weight_version": ""}, "weight_version", "at least 1"),
        ("/start_weight_update", {}, None, "send tensors from one GPU to another"),
        ("/init_weight_transfer_engine", {"init_info": {}}, None, "give its directory as model_path"),
        ("/finish_weight_update", {"weight_version": "x"}, None, "send tensors from one GPU to another"),
    ],
)
def test_what_is_no_directory_is_refused(server, path, body, param, message):
    response = server.ask(DEVELOPMENT, path, **body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), response.text
    assert message in error["message"]


LONG: dict[str, Any] = dict(prompt="A bear sat by the river. ", max_tokens=450, temperature=0, ignore_eos=True)


@pytest.fixture
def frozen(server: Any) -> Iterator[Callable[[], None]]:
    """Freezes what runs at once. To make an application, as an endpoint needs here, may take longer than an answer."""
    yield partial(server.portal.call, server.llm.pause, "keep")
    server.portal.call(server.llm.wake_up)


def test_pauses_are_off_by_default(server):
    for path in ("/pause", "/resume", "/sleep", "/wake_up", "/release_kv_cache_memory", "/abort_requests"):
        assert server.client.post(path).status_code == 404
    assert server.client.get("/is_paused").status_code == 404
    assert server.client.get("/is_sleeping").json() == {"is_sleeping": False}
    assert server.ask(DEVELOPMENT, "/sleep", headers={"origin": "http://page.example"}).status_code == 403


def test_kept_streams_go_on(server, frozen):
    expected = server.answer("/v1/completions", **LONG)["choices"][0]["text"]
    with server.client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
        lines = response.iter_lines()
        text = [next(lines)]
        frozen()
        assert server.ask(DEVELOPMENT, "/pause?mode=keep").json() == {"status": "paused"}
        assert any("owned" in pool.states for pool in server.portal.call(server.llm.pages))
        assert server.ask(DEVELOPMENT, "/is_sleeping", "GET").json() == {"is_sleeping": True}
        assert server.ask(DEVELOPMENT, "/release_kv_cache_memory").json() == {"status": "kv_cache_released"}
        refused = server.ask(DEVELOPMENT, "/resume")
        assert (refused.status_code, "call wake_up" in refused.text) == (409, True)
        assert server.ask(DEVELOPMENT, "/wake_up?tags=kv_cache").json() == {"status": "awake", "tags": ["kv_cache"]}
        text += lines
    assert joined(text) == expected
    assert server.ask(DEVELOPMENT, "/is_paused", "GET").json() == {"is_paused": False}


def test_an_aborted_answer_says_so_and_others_wait(server, frozen):
    expected = server.answer("/v1/completions", **LONG)["choices"][0]["text"]
    events = []
    with server.client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
        lines = response.iter_lines()
        events.append(next(lines))
        frozen()
        assert server.ask(DEVELOPMENT, "/sleep?level=1").json() == {"status": "sleeping", "level": 1}
        events += lines
    last = [json.loads(line[6:]) for line in events if line.startswith("data: {")][-1]["choices"][0]
    assert last["finish_reason"] == "abort"
    assert expected.startswith(joined(events))

    async def wake() -> Any:
        # It comes while the engine sleeps, and is computed when it is awake.
        stream = await server.llm.submit(LONG["prompt"])
        assert server.llm.num_requests == 1
        assert await server.llm.wake_up(["scheduling"]) is False
        assert await server.llm.wake_up() is True
        return [output async for output in stream][-1]

    assert server.portal.call(wake).finished
    assert server.ask(DEVELOPMENT, "/wake_up?tags=other").status_code == 400
    assert server.ask(DEVELOPMENT, "/sleep?level=3").status_code == 400


@pytest.mark.parametrize("asked", ["the id", "all", "another"])
def test_requests_are_aborted_by_the_id_of_their_answer(server, frozen, asked):
    expected = server.answer("/v1/completions", **LONG)["choices"][0]["text"]
    body, named = LONG | {"stream": True}, {"x-request-id": "one"}
    with server.client.stream("POST", "/v1/completions", json=body, headers=named) as response:
        lines = response.iter_lines()
        events = [next(lines)]
        frozen()
        given = json.loads(events[0][6:])["id"]
        ids = {"the id": [given, "unknown"], "all": None, "another": [f"{given}-other", given[:-1]]}[asked]
        assert server.ask(DEVELOPMENT, "/abort_requests", request_ids=[]).json()["aborted"] == 0
        answer = server.ask(DEVELOPMENT, "/abort_requests", request_ids=ids).json()
        assert server.ask(DEVELOPMENT, "/resume").status_code == 200
        events += lines
    last = [json.loads(line[6:]) for line in events if line.startswith("data: {")][-1]["choices"][0]
    is_ended = asked != "another"
    assert answer == {"status": "aborted", "aborted": int(is_ended)}
    assert last["finish_reason"] == ("abort" if is_ended else "length")
    assert expected.startswith(joined(events)) and (joined(events) == expected) != is_ended


def test_weights_get_another_name_and_prefixes_stay(server):
    body = BODY | {"cache_salt": "named"}
    server.answer("/v1/completions", **body)
    answer = server.ask(DEVELOPMENT, "/update_weight_version", new_version="step-7")
    assert answer.json() == {"success": True, "message": "", "new_version": "step-7"}
    assert server.ask(DEVELOPMENT, "/weight_info", "GET").json() == {"weight_version": "step-7"}
    assert server.answer("/v1/completions", **body)["usage"]["prompt_tokens_details"]["cached_tokens"] > 16
    assert server.ask(DEVELOPMENT, "/update_weight_version", new_version="").status_code == 400
    back = {"new_version": "default", "abort_all_requests": True}
    assert server.ask(DEVELOPMENT, "/update_weight_version", **back).status_code == 200


def test_a_pause_waits_for_answers(server, frozen):
    expected = server.answer("/v1/completions", **LONG)["choices"][0]["text"]
    with server.client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
        lines = response.iter_lines()
        text = [next(lines)]
        frozen()
        assert server.ask(DEVELOPMENT, "/pause?mode=wait").json() == {"status": "paused"}
        text += lines
        assert joined(text) == expected
    assert server.ask(DEVELOPMENT, "/resume").status_code == 200
