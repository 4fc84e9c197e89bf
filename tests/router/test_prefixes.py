"""The router sends a prompt to the server that has computed its beginning before, as their KV events tell."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxvllm.core.kv_events_config import KVEventsConfig
from jaxvllm.core.lora import LoraAdapter
from jaxvllm.core.page_pool import extend_page_hashes
from jaxvllm.engine.kv_event_publisher import KVEventPublisher
from jaxvllm.router.config import RouterConfig
from jaxvllm.router.proxy import Proxy
from tests.core.test_kv_events import request_of
from tests.router.test_proxy import Server, router
from tests.waiting import until

PAGE_SIZE = 16
TEXT = "Once upon a time there was a little girl who lived in a village near the great old forest. " * 4


class Reading(Server):
    """A server whose tokens are bytes, and whose `/tokenize` may be out of order."""

    is_silent = False

    def app(self) -> Starlette:
        app = super().app()
        app.router.routes.insert(0, Route("/tokenize", self._tokenize, methods=["POST"]))
        return app

    async def _tokenize(self, request: Request) -> Response:
        asked = await request.json()
        text = asked["prompt"] if "prompt" in asked else "".join(one["content"] for one in asked["messages"])
        return JSONResponse({"detail": "no"}, 500) if self.is_silent else JSONResponse({"tokens": list(text.encode())})


def publish(
    publisher: KVEventPublisher, text: str, salt: str | None = None, adapter: LoraAdapter | None = None
) -> None:
    """Tells that the server of `publisher` has all full pages of a text."""
    salt = salt if adapter is None else adapter.salt(salt)
    request = request_of(list(text.encode()), salt, adapter=adapter)
    hashes = extend_page_hashes([], request.token_ids(), PAGE_SIZE, salt)
    publisher.log.stored(0, "full_attention", None, list(range(len(hashes))), hashes, request)
    publisher.flush()


@asynccontextmanager
async def three_servers(
    directory: Path, split: bool = False
) -> AsyncIterator[tuple[httpx.AsyncClient, list[Reading], list[KVEventPublisher], Proxy]]:
    """A client of a router before three servers, or before two that compute prompts and one that goes on."""
    servers = [Reading(name) for name in "abc"]
    publishers, endpoints = [], []
    for server in servers:
        places = {
            "endpoint": f"ipc://{directory}/{server.name}",
            "replay_endpoint": f"ipc://{directory}/{server.name}r",
        }
        config = KVEventsConfig.read({"enable_kv_cache_events": True} | places)
        publishers.append(KVEventPublisher(config, 0, PAGE_SIZE))
        endpoints.append(",".join(places.values()))
    kinds: dict[str, Any] = {"backend": tuple(servers)}
    if split:
        kinds = {"prefill": tuple(servers[:2]), "decode": tuple(servers[2:])}
    try:
        async with router(**kinds, routing_policy="prefix", kv_events=tuple(endpoints)) as (client, proxy):
            yield client, servers, publishers, proxy
    finally:
        for publisher in publishers:
            publisher.close()


async def knows(proxy: Proxy, name: str) -> None:
    """Waits until the router knows of pages of a server."""
    assert proxy._prefixes is not None
    await until(lambda: proxy._prefixes._index.num_pages(name) > 0)  # type: ignore[union-attr]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_prompt_goes_where_its_beginning_is(tmp_path: Path, path: str) -> None:
    body: dict[str, Any] = {"prompt": TEXT} if path == "/v1/completions" else {"messages": [{"content": TEXT}]}

    async def test() -> None:
        async with three_servers(tmp_path) as (client, servers, publishers, proxy):
            publish(publishers[1], TEXT[:200])
            await knows(proxy, servers[1].url)
            for _ in range(4):
                assert (await client.post(path, json=body)).json()["from"] == "b"
            publish(publishers[2], TEXT)  # has more of it
            await knows(proxy, servers[2].url)
            assert (await client.post(path, json=body)).json()["from"] == "c"
            assert (await client.post(path, json=body | {"cache_salt": "mine"})).json()["from"] == "a", "not its pages"

    asyncio.run(test())


def test_a_prompt_for_an_adapter_goes_where_its_pages_are(tmp_path: Path) -> None:
    async def test() -> None:
        async with three_servers(tmp_path) as (client, servers, publishers, proxy):

            async def place(**body: str) -> str:
                return str((await client.post("/v1/completions", json={"prompt": TEXT} | body)).json()["from"])

            # Each server has read another content under that name.
            for place_of, adapter in ((0, None), (1, LoraAdapter("sql", b"1" * 32, None))):
                publish(publishers[place_of], TEXT, adapter=adapter)
                await knows(proxy, servers[place_of].url)
            publish(publishers[2], TEXT[:100], "mine", LoraAdapter("sql", b"2" * 32, None))
            await knows(proxy, servers[2].url)
            assert [await place(model="base") for _ in range(2)] == ["a", "a"]
            assert [await place(model="sql") for _ in range(2)] == ["b", "b"]
            assert [await place(model="sql", cache_salt="mine") for _ in range(2)] == ["c", "c"]

    asyncio.run(test())


def test_a_busy_server_gets_no_more_for_its_prefix(tmp_path: Path) -> None:
    async def test() -> None:
        async with three_servers(tmp_path) as (client, servers, publishers, proxy):
            publish(publishers[0], TEXT)
            await knows(proxy, servers[0].url)
            servers[0].mode = "stalls"
            asking: list[asyncio.Task[httpx.Response]] = []
            for _ in range(12):
                asking.append(asyncio.create_task(client.post("/v1/completions", json={"prompt": TEXT})))
                await until(lambda: len(servers[0].asked) + sum(map(asyncio.Task.done, asking)) == len(asking))
            # 352 of 364 tokens are worth less than five running requests of 64 tokens, of which 12 are to be computed.
            assert [len(server.asked) for server in servers] == [5, 4, 3]
            servers[0].gate.set()
            await asyncio.gather(*asking)

    asyncio.run(test())


def test_tokens_and_prompts_of_other_kinds(tmp_path: Path) -> None:
    async def test() -> None:
        async with three_servers(tmp_path) as (client, servers, publishers, proxy):
            publish(publishers[2], TEXT)
            await knows(proxy, servers[2].url)
            for server in servers:
                server.is_silent = True
            given = await client.post("/v1/completions", json={"prompt": list(TEXT.encode())})
            assert given.json()["from"] == "c", "tokens need no tokenizer"
            others = [{"prompt": TEXT}, {"prompt": [TEXT, TEXT]}, {"prompt": []}, {"prompt": None}, {}]
            found = [(await client.post("/v1/completions", json=body)).json()["from"] for body in others]
            assert found == ["a", "b", "c", "a", "b"], "of no known prompt the server that waited longest has it"
            assert (await client.post("/v1/completions", json=[])).status_code == 500  # what the server says

    asyncio.run(test())


def test_prompts_are_computed_where_their_beginning_is(tmp_path: Path) -> None:
    async def test() -> None:
        async with three_servers(tmp_path, split=True) as (client, servers, publishers, proxy):
            publish(publishers[1], TEXT)
            await knows(proxy, servers[1].url)
            for _ in range(3):
                assert (await client.post("/v1/completions", json={"prompt": TEXT})).json()["from"] == "c"
            assert [len(server.asked) for server in servers] == [0, 3, 3]

    asyncio.run(test())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (dict(routing_policy="prefix"), "0 endpoints for 2 servers"),
        (dict(kv_events=("tcp://a:1", "tcp://b:1")), "is for the routing_policy prefix, and this is least-load"),
        (dict(routing_policy="prefix", kv_events=("tcp://a:1", "b:1")), "are tcp://HOST:PORT"),
        (dict(routing_policy="prefix", kv_events=("tcp://*:1", "tcp://b:1")), "are tcp://HOST:PORT"),
        (dict(routing_policy="prefix", kv_events=("tcp://a:1,", "tcp://b:1")), "are tcp://HOST:PORT"),
        (dict(routing_policy="closest"), "routing_policy must be one of least-load, prefix, session"),
    ],
)
def test_wrong_options_are_told(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        RouterConfig(backend=("http://a:1", "http://b:1"), **options)
