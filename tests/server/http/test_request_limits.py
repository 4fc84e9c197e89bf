"""What no request may bring, and what it is told."""

import asyncio
import json
import threading
import time

import httpx
import numpy as np
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from jaxvllm.server.config import ServerConfig
from jaxvllm.server.http import request_limits, strict_json
from jaxvllm.server.http.http_door import guarded
from jaxvllm.server.http.request_limits import MAX_HEAD_BYTES, SMALL_BODY, RequestLimits, StrictHead
from jaxvllm.server.http.strict_json import (
    MAX_CONTAINERS,
    MAX_DEPTH,
    MAX_ITEMS,
    MAX_NAMES,
    MAX_NAMES_OF_ONE,
    JsonError,
    JsonMarks,
    check_json,
)
from tests.waiting import until

JSON = {"content-type": "application/json"}
MOST = 1000


async def echo(scope, receive, send):
    """Answers with the body."""
    await PlainTextResponse(await Request(scope, receive).body())(scope, receive, send)


def ask(content=None, headers=JSON, method="POST", path="/v1/completions"):
    async def run():
        transport = httpx.ASGITransport(StrictHead(RequestLimits(echo, MOST)))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.request(method, path, content=content, headers=headers)

    return asyncio.run(run())


async def in_parts(*parts):
    for part in parts:
        yield part


def test_a_body_arrives_whole_and_unchanged():
    body = b'{"prompt": "Gr\xc3\xbc\xc3\x9fe", "n": 1e300, "x": [], "x": null}'
    assert ask(body).content == body
    assert ask(in_parts(body[:20], b"", body[20:])).content == body
    assert ask(body, {"content-type": 'Application/JSON; charset="UTF-8"'}).content == body


def test_requests_without_a_body_pass():
    assert ask(method="GET", headers={}, path="/health").status_code == 200
    assert ask(b"", headers={}).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body(chunked):
    def body(size):
        text = b'"' + b"x" * (size - 2) + b'"'
        return in_parts(text[:600], text[600:]) if chunked else text

    assert ask(body(MOST)).status_code == 200
    response = ask(body(MOST + 1))
    assert response.status_code == 413
    assert f"larger than {MOST} bytes" in response.json()["error"]["message"]


def test_a_large_body_is_refused_before_it_comes():
    async def run():
        async def never():
            raise AssertionError("read")

        sent = []

        async def send(message):
            sent.append(message)

        headers = [(b"content-length", b"9" * 5000)]
        scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": "/", "query_string": b""}
        scope["headers"] = [(b"host", b"server"), *headers]
        await RequestLimits(echo, MOST)(scope, never, send)
        return sent[0]["status"]

    assert asyncio.run(run()) == 413


def test_all_bodies_together_have_a_limit():
    """Two of three fit; what was held is free again once they are answered, or refused."""
    app = RequestLimits(echo, MOST, max_held_bytes=700)
    body = json.dumps("x" * 298).encode()
    last = asyncio.Event()

    async def slow():
        yield body[:200]
        await last.wait()
        yield body[200:]

    async def run():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            posts = [asyncio.create_task(client.post("/", content=slow(), headers=JSON)) for _ in range(2)]
            await until(lambda: app._num_held == 2 * 200)
            refused = await client.post("/", content=json.dumps("x" * 500).encode(), headers=JSON)
            last.set()
            taken = [(await post).status_code for post in posts]
            again = await client.post("/", content=json.dumps("x" * 500).encode(), headers=JSON)
            return refused.status_code, taken, again.status_code

    assert asyncio.run(run()) == (503, [200, 200], 200)


@pytest.mark.parametrize(
    "headers", [[(b"host", b"x"), (b"transfer-encoding", b"gzip, chunked")], [(b"content-length", b"2")]]
)
def test_a_head_that_is_not_http(headers):
    async def run():
        sent = []

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": "/", "query_string": b""}
        await StrictHead(RequestLimits(echo, MOST))(scope | {"headers": headers}, None, send)
        return sent[0]["status"]

    assert asyncio.run(run()) == 400


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("authorization", ("Bearer first-key", "Bearer second-key")),
        ("host", ("localhost", "evil.example")),
        ("content-type", ("application/json", "text/plain")),
        ("content-length", ("2", "2")),
        ("transfer-encoding", ("chunked", "chunked")),
        ("content-encoding", ("identity", "gzip")),
        ("x-api-key", ("first-key", "first-key")),
    ],
)
def test_a_header_that_two_readers_could_read_differently(name, values):
    """Also before the guards, which read one of them: of Host, and of the keys."""

    async def run():
        app = guarded(echo, ServerConfig(), ["first-key"])
        base = {"host": "localhost", "content-type": "application/json", "authorization": "Bearer first-key"}
        headers = [*(base | {name: values[0]}).items(), (name, values[1]), ("accept", "a"), ("accept", "b")]
        sent = []

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": "/", "query_string": b""}
        await app(scope | {"headers": [(key.encode(), value.encode()) for key, value in headers]}, None, send)
        return sent

    start, body = asyncio.run(run())
    assert start["status"] == 400
    assert json.loads(body["body"])["error"]["message"] == f"the request has 2 headers {name}: send one"


def test_a_body_that_does_not_come():
    async def run():
        async def half():
            yield b'{"prompt":'
            await asyncio.sleep(60)

        app = RequestLimits(echo, MOST, body_seconds=0.05)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.post("/v1/completions", content=half(), headers=JSON)

    response = asyncio.run(run())
    assert response.status_code == 408 and response.headers["connection"] == "close"
    assert response.json()["error"]["type"] == "timeout_error"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "text/plain"},
        {"content-type": "multipart/form-data; boundary=x"},
        {"content-type": "application/json; charset=utf-16"},
        {"content-type": "application/jsonl"},
        JSON | {"content-encoding": "gzip"},
    ],
)
def test_anything_but_json(headers):
    assert ask(b"{}", headers).status_code == 415


def test_a_large_head():
    assert ask(b"{}", JSON | {"x": "y" * (MAX_HEAD_BYTES - 300)}).status_code == 200
    assert ask(b"{}", JSON | {"x": "y" * MAX_HEAD_BYTES}).status_code == 431


# Each of them means something to Python's own parser, or to a lenient one.
NOT_JSON = {
    "nan": b'{"temperature": NaN}',
    "infinity": b"[-Infinity]",
    "beyond a double": b"[1e999]",
    "5,000 digits": b"[" + b"1" * 5000 + b"]",
    "half a pair": rb'{"prompt": "\ud83d and on it goes"}',
    "the other half": rb'["\udc00 and on it goes"]',
    "a name with half a pair": rb'{"\ud83d and on it goes": 1}',
    "latin-1": b'["\xe9"]',
    "an encoded surrogate": b'["\xed\xa0\x80"]',
    "a byte order mark": b"\xef\xbb\xbf{}",
    "utf-16": '{"a": 1}'.encode("utf-16-le"),
    "a trailing comma": b"[1,]",
    "two texts": b"{}{}",
    "nothing but space": b" \n",
    "a control character": b'["\x01"]',
    "a comment": b"{} // ok",
    "single quotes": b"{'a': 1}",
    "a truncated object": b'{"prompt": "Once',
}


@pytest.mark.parametrize("name", NOT_JSON)
def test_what_only_looks_like_json(name):
    with pytest.raises(ValueError, match=r"^the body is not valid (JSON|UTF-8)") as refusal:
        check_json(NOT_JSON[name])
    assert "\n" not in str(refusal.value)
    if len(NOT_JSON[name]) < MOST:
        response = ask(NOT_JSON[name])
        assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 100_000,
        b'[{"\\"":[],"]":' * 100,
        b'"["' * 9 + b"[" * 65,
        rb'["\\",' + b"[" * 100,
    ],
)
def test_deep_json_is_refused_without_recursion(body):
    with pytest.raises(ValueError, match=f"deeper than {MAX_DEPTH}"):
        check_json(body)


def test_the_deepest_that_is_allowed():
    check_json(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    check_json(b"[" + b",".join([b"[[]]"] * 500) + b"]")


@pytest.mark.parametrize("seed", range(3))
def test_depth_is_what_a_parser_finds(seed):
    random = np.random.default_rng(seed)

    def value(level):
        kind = random.integers(6)
        if level == 0 or kind == 0:
            return str(np.array(list('[]{}"\\a\u00e9 ,:'))[random.integers(11, size=random.integers(9))])
        if kind < 4:
            return [value(level - 1) for _ in range(random.integers(4))]
        return {f'"[{i}': value(level - 1) for i in range(random.integers(4))}

    def deepest(found):
        parts = found.values() if isinstance(found, dict) else found if isinstance(found, list) else None
        return 0 if parts is None else 1 + max(map(deepest, parts), default=0)

    for _ in range(100):
        found = value(int(random.integers(1, 9)))
        # Enough brackets for the exact way.
        body = json.dumps([found, [[]] * MAX_DEPTH], ensure_ascii=bool(random.integers(2))).encode()
        assert JsonMarks.of(body).depth == deepest([found, [[]]])


# The field at fault, what is too many, and a body within the limit or one beyond it.
LARGE = {
    "token ids": ("prompt", "items", lambda n: {"prompt": [5] * (n + 1)}, MAX_ITEMS),
    "token ids of many prompts": ("prompt", "items", lambda n: {"prompt": [[7] * 1024] * (n // 1024)}, MAX_ITEMS),
    "messages": (
        "messages",
        "names",
        lambda n: {"messages": [{"role": "user", "content": "{},:" * 9}] * (n // 2 - 1), "n": 1},
        MAX_NAMES,
    ),
    "lists": ("prompt", "arrays and objects", lambda n: {"prompt": [[]] * (n - 2)}, MAX_CONTAINERS),
    "empty objects": ("tools", "arrays and objects", lambda n: {"tools": [{}] * (n - 2)}, MAX_CONTAINERS),
    "a free-form object": (
        "metadata",
        "names",
        lambda n: {"metadata": {f'"{i}:': "" for i in range(n)}},
        MAX_NAMES_OF_ONE,
    ),
    "one deeper": ("tools", "names", lambda n: {"tools": [{"a": [{str(i): {} for i in range(n)}]}]}, MAX_NAMES_OF_ONE),
    "unknown fields": (None, "names", lambda n: {f"k{i}": 1 for i in range(n)}, MAX_NAMES_OF_ONE),
    "a list at the top": (None, "items", lambda n: [1.5] * (n + 1), MAX_ITEMS),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_body_of_too_many_parts(name):
    """The largest that is allowed passes, and one that is a little larger is refused before any parser sees it."""
    param, what, make, most = LARGE[name]
    check_json(json.dumps(make(most)).encode())
    with pytest.raises(JsonError, match=rf"^{param or 'the body'} is too large: .* \d+ {what}.* {most} are") as refusal:
        check_json(json.dumps(make(most + most // 32)).encode() + b"no JSON")
    assert refusal.value.param == param


@pytest.mark.parametrize("seed", range(3))
def test_the_largest_object_is_what_a_parser_finds(seed):
    random = np.random.default_rng(seed)

    def value(level):
        kind = random.integers(5)
        if level == 0 or kind == 0:
            return ":{[,"
        if kind < 3:
            return [value(level - 1) for _ in range(random.integers(4))]
        return {f'"{i}': value(level - 1) for i in range(random.integers(6))}

    def largest(found):
        parts = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
        return max([len(found) if isinstance(found, dict) else 0, *map(largest, parts)])

    for _ in range(100):
        found = value(int(random.integers(1, 9)))
        assert JsonMarks.of(json.dumps(found).encode()).num_names_of_one == largest(found)


def test_texts_are_not_counted():
    """What looks like marks in a text costs a parser nothing."""
    body = json.dumps({"prompt": '[{"a": [1, 2]}, ' * 100_000, "stop": ["\\", '\\"[']}).encode()
    assert not strict_json._is_simple(body)
    check_json(body)
    assert ask(body[:MOST]).status_code == 400


@pytest.mark.parametrize("size", [SMALL_BODY, SMALL_BODY + 1])
def test_a_large_body_is_checked_in_a_thread(monkeypatch, size):
    """One at a time, and the event loop runs meanwhile."""
    threads, at_once, most = set(), 0, 0

    def slow(body):
        nonlocal at_once, most
        threads.add(threading.current_thread())
        at_once += 1
        most = max(most, at_once)
        time.sleep(0.02)
        at_once -= 1

    monkeypatch.setattr(request_limits, "check_json", slow)

    async def run():
        transport = httpx.ASGITransport(RequestLimits(echo, 2 * SMALL_BODY))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            posts = [client.post("/", content=b"x" * size, headers=JSON) for _ in range(5)]
            assert [answer.status_code for answer in await asyncio.gather(*posts)] == [200] * 5

    asyncio.run(run())
    assert most == 1 and (threading.main_thread() in threads) == (size == SMALL_BODY)


def test_the_worst_body_takes_linear_time():
    start = time.process_time()  # of this process alone, however busy the machine is
    for body in (b"[" * 8_000_000, b'"' * 8_000_000, b"[" * 70 + b'"' + b'\\"' * 4_000_000, b"[]," * 2_600_000):
        JsonMarks.of(body).depth  # noqa: B018
    # 0.3 s here; a quadratic one would take hours.
    assert time.process_time() - start < 10
