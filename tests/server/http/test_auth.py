"""Nothing is open but what is listed, and a key is never told."""

import asyncio
import logging

import httpx
import pytest
from starlette.responses import PlainTextResponse

from jaxvllm.config import EngineConfig
from jaxvllm.server.app import create_app
from jaxvllm.server.config import ServerConfig
from jaxvllm.server.http.auth import OPEN_PATHS, Auth
from jaxvllm.server.http.http_config import read_keys
from jaxvllm.server.http.http_door import guarded
from jaxvllm.server.service import Service
from jaxvllm.worker.async_llm import AsyncLLM

KEYS = ("first-key", "second-key")


def ask(path, *, method="GET", headers=(), keys=KEYS, open_metrics=False):
    """The answer of an application that has every path, behind `Auth`."""

    async def run():
        app = Auth(PlainTextResponse("inside"), keys, open_metrics)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.request(method, path, headers=dict(headers))

    return asyncio.run(run())


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer first-key"},
        {"Authorization": "bearer  second-key "},
        {"x-api-key": "second-key"},
        {"x-api-key": "wrong", "Authorization": "Bearer first-key"},
    ],
)
def test_any_key_opens_every_path(headers):
    assert ask("/v1/models", headers=headers).text == "inside"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "first-key"},
        {"Authorization": "Basic first-key"},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer first"},
        {"Authorization": "Bearer first-key2"},
        {"Authorization": "Bearer first-key second-key"},
        {"x-api-key": ""},
        {"api-key": "first-key"},
        {"x-api-key": "fírst-key".encode()},
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_anything_else_does_not(headers, method):
    response = ask("/v1/models", method=method, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert error["code"] == "invalid_api_key" and set(error) == {"message", "type", "param", "code"}


def test_anthropics_path_answers_in_anthropics_shape():
    body = ask("/v1/messages", method="POST").json()
    assert body["type"] == "error" and body["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("path", [*sorted(OPEN_PATHS), "/playground/static/main.js"])
def test_open_paths(path):
    assert ask(path).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "OPTIONS"])
def test_open_paths_are_to_be_read_only(method):
    assert ask("/health", method=method).status_code == 401


@pytest.mark.parametrize("headers", [{"content-length": "5"}, {"transfer-encoding": "chunked"}])
def test_nobody_reads_a_body_of_a_stranger(headers):
    assert ask("/health", headers=headers).status_code == 401
    assert ask("/health", headers={"content-length": "0"}).status_code == 200
    assert ask("/live").status_code == ask("/ready").status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/docs",
        "/openapi.json",
        "/no/such/path",
        "/metrics",
        "/health/",
        "/HEALTH",
        "/health/../v1/models",
        "/playground/state",
        "/playground/static",
        "/playground/static/../state",
        "/playground/static/%2e%2e/state",
        "/v1/models?path=/health",
    ],
)
def test_every_other_path_is_closed(path):
    assert ask(path).status_code == 401


def paths_of(routes):
    for route in routes:
        if hasattr(route, "original_router"):  # FastAPI's of an included router
            yield from paths_of(route.original_router.routes)
        else:
            yield route.path


def test_of_all_routes_that_there_are_only_these_are_open():
    config = ServerConfig()
    app = create_app(Service(AsyncLLM.from_config(EngineConfig()), config))

    async def without_a_key(path):
        transport = httpx.ASGITransport(guarded(app, config, KEYS))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return (await client.get(path.replace("{name}", "index.html"))).status_code

    paths = set(paths_of(app.routes))
    assert {"/docs", "/openapi.json", "/metrics", "/v1/chat/completions", "/v1/messages"} <= paths
    is_open = {path for path in paths if asyncio.run(without_a_key(path)) != 401}
    assert is_open == OPEN_PATHS | {"/playground/static/{name}"}


def test_what_changes_the_server_for_everybody_needs_an_admin_key(tmp_path, monkeypatch):
    monkeypatch.setattr(AsyncLLM, "started", lambda llm: asyncio.sleep(0))
    config = ServerConfig(
        api_key=("user",),
        admin_api_key=("admin",),
        dev_endpoints=True,
        enable_elastic_ep=True,
        lora_directory=str(tmp_path),
    )
    llm = AsyncLLM.from_config(EngineConfig(enable_lora=True))
    app, usual = (create_app(Service(llm, one)) for one in (config, ServerConfig()))

    async def status(path, key):
        app_with_keys = guarded(app, config, read_keys(config, {}))
        transport = httpx.ASGITransport(app_with_keys, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            headers = {"Authorization": f"Bearer {key}"}
            found = await client.get(path, headers=headers)
            return (found if found.status_code != 405 else await client.post(path, headers=headers)).status_code

    paths = set(paths_of(app.routes)) - set(paths_of(usual.routes))
    assert {"/pause", "/sleep", "/weight_info", "/v1/load_lora_adapter", "/scale_elastic_ep"} <= paths
    for path in sorted(paths):
        assert [asyncio.run(status(path, key)) for key in ("none", "user")] == [401, 403], path
    # An admin's body is read, and an admin's key opens all else.
    assert [asyncio.run(status(path, "admin")) for path in ("/v1/load_lora_adapter", "/openapi.json")] == [400, 200]


def test_metrics_are_open_by_choice():
    assert ask("/metrics", open_metrics=True).status_code == 200
    assert ask("/v1/models", open_metrics=True).status_code == 401


def test_no_keys_no_lock():
    assert ask("/v1/models", keys=()).status_code == 200


def test_websockets_are_closed():
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(Auth(PlainTextResponse("inside"), ())({"type": "websocket", "path": "/health"}, None, send))
    assert sent == [{"type": "websocket.close"}]


def test_keys_come_from_three_places(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\n\n  of-file  \nof-line\n")
    config = ServerConfig(api_key=("of-line",), api_key_file=str(file))
    assert read_keys(config, {"JAXVLLM_API_KEY": "of-environment"}) == ("of-line", "of-environment", "of-file")
    assert read_keys(ServerConfig(), {"VLLM_API_KEY": "of-vllm"}) == ("of-vllm",)
    admin, environment = ServerConfig(admin_api_key=("admin",)), {"JAXVLLM_ADMIN_API_KEY": "other"}
    assert read_keys(admin, environment) == admin.admin_keys(environment) == ("admin", "other")
    assert config.admin_keys({}) == ()
    with pytest.raises(ValueError, match="admin_api_key has an empty value"):
        ServerConfig(admin_api_key=("",))  # as a shell writes a variable that is not set
    assert read_keys(ServerConfig(), {}) == ()


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), (b"# none\n", "has no key"), (b"\xff\xfe", "not UTF-8"), (b"secret key\n", "a space")],
)
def test_a_bad_file_never_opens_the_server(tmp_path, content, message):
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=message) as refusal:
        read_keys(ServerConfig(api_key_file=str(file)), {})
    assert "secret" not in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_key_is_in_no_representation_and_no_log(caplog):
    caplog.set_level(logging.DEBUG)
    assert ask("/v1/models", headers={"x-api-key": "not-a-key"}).status_code == 401
    assert ask("/v1/models", headers={"x-api-key": "first-key"}).status_code == 200
    assert "first-key" not in repr(ServerConfig(api_key=("first-key",)))
    assert "first-key" not in caplog.text and "not-a-key" not in caplog.text
