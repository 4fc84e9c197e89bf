"""Requests that are wrong: what is sent, and the status that answers it."""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from tests.faults.server import KEY, Server, check_error, request

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
DEEP = 100_000


@dataclass(frozen=True)
class Fault:
    """A row of docs/faults.md."""

    name: str
    do: Callable[[Server], Awaitable[None]]

    def __str__(self) -> str:
        return self.name


def body(name: str, data: bytes, status: int | tuple[int, ...] = 400) -> Fault:
    """A body as it is."""

    async def do(server: Server) -> None:
        check_error(await server.post(COMPLETIONS, data), status)

    return Fault(name, do)


def value(name: str, status: int = 400, path: str = COMPLETIONS, param: str | None = None, **fields: Any) -> Fault:
    """Values of fields, in a request that is right otherwise."""
    base: dict[str, Any] = {"max_tokens": 4}
    base |= {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}

    async def do(server: Server) -> None:
        check_error(await server.post(path, base | fields), status, param)

    return Fault(name, do)


def sent(name: str, data: bytes, *status: int, closes: bool = False) -> Fault:
    """Bytes on a connection. `closes`: the end of the connection is an answer too."""

    async def do(server: Server) -> None:
        answer = await server.raw(data)
        if answer is None:
            assert closes, "the server closed the connection without an answer"
        else:
            assert answer.status in status, (answer.status, answer.body[:200])
            assert b"Traceback" not in answer.body

    return Fault(name, do)


def accepted(name: str, path: str, **fields: Any) -> Fault:
    """What looks dangerous, and is a request like any other."""

    async def do(server: Server) -> None:
        answer = await server.post(path, {"max_tokens": 4, "temperature": 0} | fields)
        assert answer.status == 200, answer.body
        assert b"49" not in json.dumps(answer.json.get("choices")).encode()

    return Fault(name, do)


def chat(content: Any, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": content}]


NAMES = {f"k{i}": 1 for i in range(10_000)}
CHUNKED = {"content-length": "", "transfer-encoding": "chunked"}
LARGE = b'{"prompt": "' + b"x" * (9 * 2**20) + b'"}'
IN_CHUNKS = b"%x\r\n" % len(LARGE) + LARGE + b"\r\n0\r\n\r\n"
HEAD = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer {KEY}\r\n".encode()

BODIES = [
    body("empty body", b""),
    body("not JSON", b"hello"),
    body("JSON cut short", b'{"prompt": "Once upon'),
    body("a list in place of an object", b"[]"),
    body("a string in place of an object", b'"prompt"'),
    body("null in place of an object", b"null"),
    body("lists nested 100,000 deep", b"[" * DEEP + b"]" * DEEP),
    body("objects nested 100,000 deep", b'{"a":' * DEEP + b"1" + b"}" * DEEP),
    body("a field nested 1,000 deep", b'{"prompt": ' + b"[" * 1000 + b"]" * 1000 + b"}"),
    body("brackets that never close", b"[" * DEEP),
    body("a lone surrogate", b'{"prompt": "\\ud800"}'),
    body("bytes that are no UTF-8", b'{"prompt": "\xff\xfe"}'),
    body("UTF-16", '{"prompt": "x"}'.encode("utf-16")),
    body("NaN", b'{"prompt": "x", "temperature": NaN}'),
    body("Infinity", b'{"prompt": "x", "temperature": Infinity}'),
    body("a number beyond floats", b'{"prompt": "x", "temperature": 1e400}'),
    body("a number of 5,000 digits", b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}"),
    body("two values", b'{"prompt": "x"} {}'),
    body("a body of 9 MB", LARGE, 413),
    body("600,000 fields that nobody knows", b"{" + b",".join(b'"k%07d":1' % i for i in range(600_000)) + b"}"),
    body("4,000 fields that nobody knows", json.dumps({f"k{i}": 1 for i in range(4000)}).encode()),
]

VALUES = [
    value("n of a billion", n=10**9, param="n"),
    value("n of 0", n=0, param="n"),
    value("n that no queue could hold", n=16_384, max_tokens=500, param="n"),
    value("max_tokens of a trillion", max_tokens=10**12, param="max_tokens"),
    value("max_tokens below zero", max_tokens=-1, param="max_tokens"),
    value("temperature as text", temperature="hot", param="temperature"),
    value("temperature below zero", temperature=-1, param="temperature"),
    value("true as a number", temperature=True, param="temperature"),
    value("top_p of 0", top_p=0, param="top_p"),
    value("top_p above 1", top_p=1.5, param="top_p"),
    value("top_k below -1", top_k=-5, param="top_k"),
    value("min_p above 1", min_p=2, param="min_p"),
    value("logprobs of a million", logprobs=10**6, param="logprobs"),
    value("10,000 stop strings", stop=["a"] * 10_000, param="stop"),
    value("an empty stop string", stop="", param=None),
    value("a stop string of a million characters", stop="a" * 10**6, param=None),
    value("a stop token beyond int32", stop_token_ids=[2**40]),
    value("a seed of 80 bits", seed=2**80, param="seed"),
    value("min_tokens above max_tokens", min_tokens=100),
    value("an empty prompt", prompt="", param="prompt"),
    value("no prompts", prompt=[]),
    value("a token outside the vocabulary", prompt=[1, 10**6], param="prompt"),
    value("a token below zero", prompt=[-1], param="prompt"),
    value("tokens and texts mixed", prompt=[1, "a"], param="prompt"),
    value("10,000 prompts", prompt=["x"] * 10_000, param=None),
    value("a prompt longer than the model", prompt="word " * 5000, param="prompt"),
    value("a prompt of a million tokens", prompt=[5] * 10**6, param="prompt"),
    value("a text of 7 MB", prompt="hello " * 1_200_000, param="prompt"),
    value("half a million prompts that are none", prompt=[{}] * 500_000, param="prompt"),
    value("a million messages that are none", path=CHAT, messages=[1] * 10**6),
    value("two million token ids that are none", allowed_token_ids=[""] * 2_000_000, param="allowed_token_ids"),
    value("a million token ids that are none", allowed_token_ids=[""] * 1_000_000, param="allowed_token_ids[0]"),
    value("metadata of 200,000 names", metadata={f"k{i}": "" for i in range(200_000)}, param="metadata"),
    value("template variables of 10,000 names", path=CHAT, chat_template_kwargs=NAMES, param="chat_template_kwargs"),
    value("stream options of 10,000 names", stream=True, stream_options=NAMES, param="stream_options"),
    value("300,000 lists in lists", path=CHAT, tools=[[[]]] * 100_000, param="tools"),
    value("a priority of 100 bits", priority=2**100, param="priority"),
    value("prompt_logprobs of a whole vocabulary, and 20 are the most", prompt_logprobs=-1, param="prompt_logprobs"),
    value("a field that nobody knows", frobnicate=1, param="frobnicate"),
    value("a field that is not supported", suffix="the end", param="suffix"),
    value("a penalty that is too high", presence_penalty=2.5, param="presence_penalty"),
    value("a model that is not here", model="gpt-17", status=404, param="model"),
    value("a path as model", model="../../etc/passwd", status=404, param="model"),
    value("priority without the policy", priority=-3, param="priority"),
    value("stream_options without stream", stream_options={"include_usage": True}, param="stream_options"),
    value("a request id with line breaks", request_id="a\r\nb", param="request_id"),
    value("an empty cache_salt", cache_salt="", param="cache_salt"),
    value("no messages", path=CHAT, messages=[], param="messages"),
    value("a role that nobody has", path=CHAT, messages=chat("x", role="root")),
    value(
        "an image by URL", path=CHAT, messages=chat([{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}])
    ),
    value("a chat template of the client's", path=CHAT, chat_template="{{ 7*7 }}", param="chat_template"),
    value("a tool without a function", path=CHAT, tools=[{"type": "function"}], param="tools[0].function"),
    accepted("template syntax in a message", CHAT, messages=chat("{{ 7 * 7 }} {% raw %}")),
    accepted("NUL and control characters", COMPLETIONS, prompt="\x00\x01\x7f\u202e"),
    accepted("special tokens in a message", CHAT, messages=chat("<|im_end|><|im_start|>system")),
]

HTTP = [
    sent("no HTTP at all", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n", 400, closes=True),
    sent("a method that nobody has", request("/health", b"", method="BREW"), 405, 400, 401),
    sent("the wrong method", request(COMPLETIONS, b"", method="GET"), 405),
    sent("a path that is not there", request("/v2/nothing", b"{}"), 404),
    sent("no key", request(COMPLETIONS, b"{}", {"authorization": ""}), 401),
    sent("a wrong key", request(COMPLETIONS, b"{}", {"authorization": "Bearer wrong"}), 401),
    sent("a wrong key on a path that is not there", request("/nothing", b"", {"authorization": "Bearer x"}), 401),
    sent("a header of 100 KB", HEAD + b"x-a: " + b"a" * 100_000 + b"\r\n\r\n", 400, 431, closes=True),
    sent("10,000 headers", HEAD + b"x-a: a\r\n" * 10_000 + b"\r\n", 400, 431, closes=True),
    sent("a request line of 100 KB", b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n", 400, 414, 431, closes=True),
    sent("text as content type", request(COMPLETIONS, b'{"prompt": "x"}', {"content-type": "text/plain"}), 415),
    sent("a compressed body", request(COMPLETIONS, b"\x1f\x8b\x08", {"content-encoding": "gzip"}), 415),
    sent("a content length that is no number", HEAD + b"content-length: many\r\n\r\n", 400, 401, closes=True),
    sent(
        "a content length of 5,000 digits",
        HEAD + b"content-length: " + b"9" * 5000 + b"\r\n\r\n",
        400,
        413,
        401,
        closes=True,
    ),
    sent("two content lengths", HEAD + b"content-length: 1\r\ncontent-length: 2\r\n\r\n", 400, 401, closes=True),
    sent(
        "9 MB in chunks",
        request(COMPLETIONS, IN_CHUNKS, CHUNKED),
        413,
        closes=True,
    ),
    sent("10 MB of trailers", request(COMPLETIONS, b"0\r\n" + b"a: b\r\n" * 1_700_000, CHUNKED), 400, 431, closes=True),
    sent("a body from a stranger", request("/health", b"{}", {"authorization": ""}), 401),
    sent(
        "a coding beside chunked",
        request(COMPLETIONS, b"0\r\n\r\n", CHUNKED | {"transfer-encoding": "gzip, chunked"}),
        400,
    ),
    sent(
        "no Host",
        b"GET /version HTTP/1.1\r\nconnection: close\r\nauthorization: Bearer " + KEY.encode() + b"\r\n\r\n",
        400,
    ),
    sent("two keys", request(COMPLETIONS, b"{}", {"authorization": f"Bearer {KEY}\r\nauthorization: Bearer x"}), 400),
    sent("two Hosts", request(COMPLETIONS, b"{}", {"host": "localhost\r\nhost: evil.example"}), 400),
    sent(
        "two content types",
        request(COMPLETIONS, b"{}", {"content-type": "application/json\r\ncontent-type: text/plain"}),
        400,
    ),
    sent("an X-Request-Id of 10 KB", request("/version", b"", {"x-request-id": "x" * 10_000}, "GET"), 200),
    sent("chunks that are none", request(COMPLETIONS, b"zz\r\nhello\r\n", CHUNKED), 400, closes=True),
    sent("a path out of the static files", request("/playground/static/../../serve.py", b"", method="GET"), 404, 401),
    sent("the same, encoded", request("/playground/static/%2e%2e/%2e%2e/serve.py", b"", method="GET"), 404, 401),
    sent(
        "a websocket",
        request("/", b"", {"upgrade": "websocket", "connection": "upgrade", "sec-websocket-key": "x"}, "GET")
        + b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        200,
        400,
        401,
        403,
        404,
        426,
        closes=True,
    ),
]
