"""Clients that leave, stop, crawl or come in crowds."""

import asyncio
import json
import re

from tests.faults.requests import CHAT, COMPLETIONS, HEAD, Fault
from tests.faults.server import GREEDY, Answer, Server, check_error, request
from tests.processes import stopped
from tests.waiting import until

# Of the server that suffers all this.
MAX_FILES = 320
LONG = {"prompt": "Once upon a time", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
# Three times as many as run at once: it does not end before a test has looked at it.
ENDLESS = LONG | {"n": 48}


def streaming(**fields: object) -> bytes:
    return request(COMPLETIONS, json.dumps(LONG | {"stream": True} | fields).encode())


async def leaves_before_the_first_token(server: Server) -> None:
    _, writer = await server.send(streaming())
    writer.transport.abort()


async def leaves_a_stream(server: Server) -> None:
    reader, writer = await server.send(streaming())
    await reader.readuntil(b"data: ")
    writer.transport.abort()


async def leaves_without_a_stream(server: Server) -> None:
    _, writer = await server.send(request(COMPLETIONS, json.dumps(ENDLESS | {"request_id": "left"}).encode()))
    while not await _is_running(server, "left"):
        await asyncio.sleep(0.05)
    writer.transport.abort()


async def _is_running(server: Server, request_id: str) -> bool:
    """Whether the engine works on a completion of that request."""
    replicas = (await server.get("/playground/state")).json["replicas"]
    return any(request["id"].startswith(request_id) for replica in replicas for request in replica["requests"])


async def half_closes(server: Server) -> None:
    """A client that has said all may close its side: some do, and still want the answer, or have gone."""
    reader, writer = await server.send(streaming(max_tokens=8))
    writer.write_eof()
    await reader.read()
    writer.close()


async def leaves_in_the_body(server: Server) -> None:
    _, writer = await server.send(HEAD + b"content-length: 100\r\n\r\n{")
    await asyncio.sleep(0.05)
    writer.transport.abort()


async def thousand_streams(server: Server) -> None:
    async def one() -> None:
        try:
            _, writer = await server.send(streaming(max_tokens=64))
            await asyncio.sleep(0.01)
            writer.transport.abort()
        except OSError:  # refused is an answer
            pass

    for _ in range(10):
        await asyncio.gather(*(one() for _ in range(100)))


async def crowd(server: Server) -> None:
    """Two hundred at once: all are answered, many with 503 as the queue is full."""
    answers: list[Answer] = []

    async def one() -> None:
        answers.append(await server.post(COMPLETIONS, GREEDY))

    async with asyncio.TaskGroup() as group:
        with stopped(server.engine_pid):  # or a quick one might answer the first before the last have come
            for _ in range(200):
                group.create_task(one())
            await until(lambda: len(answers) >= 80)  # 16 run and 100 wait
    for answer in answers:
        if answer.status == 200:
            assert answer.json["choices"][0]["text"] == server.expected
        else:
            check_error(answer, 503)
            assert int(answer.headers["retry-after"]) >= 1
    assert any(answer.status == 200 for answer in answers)
    assert any(answer.status == 503 for answer in answers), "the limit of the queue was not met"


async def pool_of_two(server: Server) -> None:
    """Fifty requests of which the pages hold a few at a time: preempted, recomputed, and the same in the end."""
    long = LONG | {"max_tokens": 100}
    first = await server.post(COMPLETIONS, long)
    answers = await asyncio.gather(*(server.post(COMPLETIONS, long) for _ in range(50)))
    assert {answer.status for answer in answers} == {200}
    assert {answer.json["choices"][0]["text"] for answer in answers} == {first.json["choices"][0]["text"]}


async def stops_reading(server: Server) -> None:
    """The stream fills the socket, and waits there; the request ends, and nobody else is held up."""
    reader, writer = await server.send(streaming(n=8, max_tokens=400, logprobs=20))
    reader._transport.pause_reading()  # type: ignore[attr-defined]
    assert await server.greedy() == server.expected
    metrics = (await server.get("/metrics")).body.decode()
    assert re.search(r"^jaxvllm:num_http_streams\S* 1\.0$", metrics, re.MULTILINE), "the stream ended first"
    writer.transport.abort()


async def slow_head(server: Server) -> None:
    """A head that comes byte by byte: fifty of them hold nobody up."""
    connections = [await server.send(b"POST /v1/comp") for _ in range(50)]
    for _ in range(5):
        await asyncio.sleep(0.05)
        for _, writer in connections:
            writer.write(b"l")
    assert await server.greedy() == server.expected
    for _, writer in connections:
        writer.transport.abort()


async def slow_body(server: Server) -> None:
    head = request(COMPLETIONS, b"", {"content-length": "1000"})
    connections = [await server.send(head + b"{") for _ in range(50)]
    assert await server.greedy() == server.expected
    for _, writer in connections:
        writer.transport.abort()


async def silent_connections(server: Server) -> None:
    connections = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(200)]
    assert await server.greedy() == server.expected
    for _, writer in connections:
        writer.transport.abort()


async def more_silent_connections_than_files(server: Server) -> None:
    """Twice as many as it may open files: those that have been idle longest are closed, and all others served."""
    connections = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2 * MAX_FILES)]
    assert (await server.get("/health")).status == 200
    assert await server.greedy() == server.expected
    async with asyncio.timeout(10):
        assert await connections[0][0].read() == b""
    for _, writer in connections:
        writer.transport.abort()
    warnings = re.findall(r"^WARNING .*", server.log.read_text(), re.MULTILINE)
    assert len(warnings) == 1 and "connections are open, which is the most" in warnings[0], warnings


async def pipelined(server: Server) -> None:
    """Several requests on a connection before the first is answered."""
    body = json.dumps(GREEDY).encode()
    keep = {"connection": "keep-alive"}
    _, writer = await server.send(request(COMPLETIONS, body, keep) * 3)
    await asyncio.sleep(0.5)
    writer.close()


async def pipelined_before_garbage(server: Server) -> None:
    """The valid requests are answered, in their order; then comes a 400 and the end of the connection."""
    keep = {"connection": "keep-alive"}
    body = json.dumps(GREEDY).encode()
    valid = request(COMPLETIONS, body, keep) + request("/version", b"", keep, "GET")
    reader, writer = await server.send(valid + b"\x16\x03\x01 nonsense\r\n\r\n")
    answers = (await reader.read()).split(b"HTTP/1.1 ")[1:]
    assert [answer[:3] for answer in answers] == [b"200", b"200", b"400"]
    assert b'"text":' in answers[0] and b'"version":' in answers[1] and b"connection: close" in answers[2]
    writer.close()


async def stream_over_http_1_0(server: Server) -> None:
    reader, writer = await server.send(streaming(max_tokens=8).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head and b"connection: close" in head
    assert body.startswith(b"data: ") and body.endswith(b"data: [DONE]\n\n")
    writer.close()


async def same_header_twice(server: Server) -> None:
    """As clients do that send a request again before they know what became of the first."""
    reader, writer = await server.send(streaming().replace(b"\r\n", b"\r\nx-request-id: mine\r\n", 1))
    await reader.readuntil(b"data: ")
    answer = await server.post(COMPLETIONS, GREEDY, {"x-request-id": "mine"})
    assert answer.status == 200 and answer.json["id"] == "cmpl-mine" and answer.headers["x-request-id"] == "mine"
    writer.transport.abort()


async def same_id_twice(server: Server) -> None:
    reader, writer = await server.send(streaming(**ENDLESS | {"request_id": "mine"}))
    await reader.readuntil(b"data: ")
    answer = await server.post(COMPLETIONS, GREEDY | {"request_id": "mine"})
    check_error(answer, 400)
    writer.transport.abort()


async def larger_than_the_pool(server: Server) -> None:
    answer = await server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 300, "n": 100})
    assert answer.status in (200, 400, 503)


async def slow_template(server: Server) -> None:
    """A conversation of many thousand messages is rendered without holding others up."""
    messages = [{"role": "user", "content": "x"}] * 50_000
    answer, text = await asyncio.gather(server.post(CHAT, {"messages": messages}), server.greedy())
    check_error(answer, 400)
    assert text == server.expected


# What clients do with their connections, whatever answers them.
CONNECTIONS = [
    Fault("a client that leaves before the first token", leaves_before_the_first_token),
    Fault("a client that leaves a stream", leaves_a_stream),
    Fault("a client that closes its side", half_closes),
    Fault("a client that leaves in the middle of its body", leaves_in_the_body),
    Fault("heads that come byte by byte", slow_head),
    Fault("bodies that never end", slow_body),
    Fault("more silent connections than the server may open files", more_silent_connections_than_files),
    Fault("requests that do not wait for answers", pipelined),
    Fault("valid requests, then garbage", pipelined_before_garbage),
    Fault("a stream over HTTP/1.0", stream_over_http_1_0),
]

LOAD = [
    *CONNECTIONS,
    Fault("a client that leaves while its answer is computed", leaves_without_a_stream),
    Fault("1,000 streams opened and dropped", thousand_streams),
    Fault("200 requests at once, more than may wait", crowd),
    Fault("a reader that stops reading", stops_reading),
    Fault("200 connections that say nothing", silent_connections),
    Fault("an X-Request-Id that is in use", same_header_twice),
    Fault("an id that is in use", same_id_twice),
    Fault("100 completions that the pool cannot hold at once", larger_than_the_pool),
    Fault("a conversation of 50,000 messages", slow_template),
]
