"""Pages of other origins may use a server only when its operator names them."""

import asyncio
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse

from jaxvllm.cli.serve import _configs, _parser
from jaxvllm.server.config import ServerConfig
from jaxvllm.server.http.http_door import guarded

ORIGIN = "https://app.example"
PREFLIGHT = {
    "Origin": ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


def ask(
    config: ServerConfig,
    method: str,
    headers: dict[str, str],
    *,
    keys: tuple[str, ...] = (),
    is_local: bool = False,
    host: str = "server",
) -> httpx.Response:
    """The answer of an application that has every path, behind the guards of a server."""

    async def run() -> httpx.Response:
        app: Any = guarded(PlainTextResponse("inside"), config, keys, is_local)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=f"http://{host}") as client:
            return await client.request(method, "/v1/models", headers=headers)

    return asyncio.run(run())


def cors_headers(response: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name.startswith("access-control")}


def test_no_page_may_read_anything_by_default() -> None:
    for method, headers in (("GET", {"Origin": ORIGIN}), ("OPTIONS", PREFLIGHT)):
        assert cors_headers(ask(ServerConfig(), method, headers)) == {}


@pytest.mark.parametrize("origins", [(ORIGIN,), ("*",), ("https://other.example", ORIGIN)])
def test_a_preflight_needs_no_key_and_the_request_does(origins: tuple[str, ...]) -> None:
    config = ServerConfig(allowed_origins=origins)
    allowed = ask(config, "OPTIONS", PREFLIGHT, keys=("secret",))
    assert allowed.status_code == 200 and "inside" not in allowed.text
    assert allowed.headers["access-control-allow-origin"] in ("*", ORIGIN)
    assert "POST" in allowed.headers["access-control-allow-methods"]
    assert "authorization" in allowed.headers["access-control-allow-headers"].lower()
    # The page may read that it has no key.
    refused = ask(config, "GET", {"Origin": ORIGIN}, keys=("secret",))
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] in ("*", ORIGIN)
    answer = ask(config, "GET", {"Origin": ORIGIN, "Authorization": "Bearer secret"}, keys=("secret",))
    assert answer.text == "inside" and answer.headers["access-control-allow-origin"] in ("*", ORIGIN)
    assert "X-Request-Id" in answer.headers["access-control-expose-headers"]


def test_other_origins_methods_and_headers_are_refused() -> None:
    config = ServerConfig(allowed_origins=(ORIGIN,), allowed_methods=("GET",), allowed_headers=("X-Mine",))
    for changed in (
        {"Origin": "https://evil.example"},
        {"Access-Control-Request-Method": "POST"},
        {"Access-Control-Request-Method": "GET", "Access-Control-Request-Headers": "authorization"},
    ):
        assert ask(config, "OPTIONS", PREFLIGHT | changed).status_code == 400
    good = {"Access-Control-Request-Method": "GET", "Access-Control-Request-Headers": "x-mine"}
    assert ask(config, "OPTIONS", PREFLIGHT | good).status_code == 200
    assert "access-control-allow-origin" not in ask(config, "GET", {"Origin": "https://evil.example"}).headers


def test_credentials_are_an_option() -> None:
    headers = {"Origin": ORIGIN, "Cookie": "a=b"}
    assert (
        "access-control-allow-credentials" not in ask(ServerConfig(allowed_origins=(ORIGIN,)), "GET", headers).headers
    )
    answer = ask(ServerConfig(allowed_origins=("*",), allow_credentials=True), "GET", headers)
    assert answer.headers["access-control-allow-credentials"] == "true"
    assert answer.headers["access-control-allow-origin"] == ORIGIN, "no browser takes * together with credentials"


def test_no_origin_opens_a_local_server_to_other_names_of_it() -> None:
    """A name that was pointed at 127.0.0.1 is refused even before a preflight."""
    config = ServerConfig(allowed_origins=("*",))
    for method, headers in (("GET", {"Origin": ORIGIN}), ("OPTIONS", PREFLIGHT)):
        refused = ask(config, method, headers, is_local=True, host="evil.example")
        assert refused.status_code == 403 and not cors_headers(refused)
        assert ask(config, method, headers, is_local=True, host="localhost").status_code == 200


@pytest.mark.parametrize(
    "argv",
    [
        ["--allowed-origins", ORIGIN, "http://localhost:3000"],
        ["--allowed-origins", ORIGIN, "--allowed-origins", "http://localhost:3000"],
        ["--allowed-origins", f'["{ORIGIN}", "http://localhost:3000"]'],
    ],
)
def test_a_list_may_be_json_as_in_vllm(argv: list[str]) -> None:
    _, config, _ = _configs(_parser().parse_args(["demo", *argv, "--allowed-methods", '["GET"]']))
    assert config.allowed_origins == (ORIGIN, "http://localhost:3000") and config.allowed_methods == ("GET",)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--allowed-origins", "[5]"], r"--allowed-origins must be strings, or a JSON list of strings, not \[5\]"),
        (["--allowed-origins", "[x"], r"--allowed-origins \[x is not valid JSON"),
        (["--allowed-origins", "https://app.example/"], "without a path"),
        (["--allowed-origins", "https://App.example"], "as browsers send it"),
        (["--allowed-origins", "app.example"], "allowed_origins has 'app.example'"),
        (["--allowed-origins", ""], "allowed_origins has an empty value"),
        (["--allowed-methods", "GET"], "allowed_methods has no effect without allowed_origins"),
        (["--allow-credentials"], "allow_credentials has no effect without allowed_origins"),
    ],
)
def test_wrong_options_are_told(argv: list[str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        _configs(_parser().parse_args(["demo", *argv]))
