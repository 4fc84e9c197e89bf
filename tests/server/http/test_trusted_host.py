"""Which names a server without a key answers to."""

import asyncio

import httpx
import pytest
from starlette.responses import PlainTextResponse

from jaxvllm.server.config import ServerConfig
from jaxvllm.server.http.http_door import guarded


def status(asked, keys=(), is_local=True, path="/", **config):
    async def run():
        app = guarded(PlainTextResponse("here"), ServerConfig(**config), keys, is_local)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            response = await client.get(path, headers={"host": asked})
            if response.status_code != 200:
                assert response.json()["error"]["type"] == "permission_error"
            return response.status_code

    return asyncio.run(run())


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:8000",
        "app.localhost:1",
        "127.0.0.1",
        "127.0.0.1:8000",
        "127.1.2.3",
        "[::1]:8000",
        "[::1]",
        "host.docker.internal:8000",
        "",
    ],
)
def test_names_of_this_machine(host):
    assert status(host) == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "10.0.0.1",
        "[::2]:1",
    ],
)
def test_other_names(host):
    assert status(host) == 403
    assert status(host, keys=["key"]) == 200  # which a page from elsewhere does not have
    assert status(host, is_local=False) == 200  # reachable by intention
    assert status(host, allowed_host=("*",)) == 200


def test_names_by_choice():
    assert status("My.Host:8000", allowed_host=("my.host", "other")) == 200
    assert status("localhost", allowed_host=("my.host",)) == 200
    assert status("my.host", host="my.host") == 200
    assert status("my.host.evil", allowed_host=("my.host",)) == 403
