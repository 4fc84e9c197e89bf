"""`Api`: a client of a server for one person. It reads JSON and streams, and turns errors into one line."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, Self

import httpx

from jaxvllm.client.errors import ServerError
from jaxvllm.client.event_stream import DONE, EventReader, StreamChunk, error_text, read_chunk
from jaxvllm.client.server import Server

# A first token may take long because of a queue, but a connection that is not made in this time fails.
TIMEOUT = httpx.Timeout(None, connect=10.0)


class Api:
    """A server's HTTP interface. It keeps connections open, so use it as a context manager."""

    def __init__(self, server: Server):
        self._client = httpx.Client(base_url=server.base_url, headers=server.headers, timeout=TIMEOUT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def first_model(self) -> str:
        """Returns the name of the model that the server lists first."""
        models = self.get("/v1/models").get("data")
        if not (isinstance(models, list) and models and isinstance(models[0], dict) and "id" in models[0]):
            raise ServerError(f"{self._client.base_url} lists no model: give --model")
        return str(models[0]["id"])

    def max_model_len(self, model: str) -> int | None:
        """Returns the number of tokens that `model` takes, prompt and answer together, or None if the server omits it.

        Raises ServerError when the server cannot be reached, or is not ready (503).
        """
        try:
            models = self.get("/v1/models").get("data")
        except ServerError as error:
            if error.status in (None, 503):
                raise
            return None  # if the requests fail as well, their own errors say why
        entries = [one for one in models if isinstance(one, dict)] if isinstance(models, list) else []
        return next((_integer(one.get("max_model_len")) for one in entries if one.get("id") == model), None)

    def room_behind(self, prompt: str, model: str) -> int | None:
        """Returns the most tokens that an answer to `prompt` may have.

        Returns None when the server does not say (OpenAI has no /tokenize), or when there is no room.
        """
        try:
            answer = self.post("/tokenize", {"model": model, "prompt": prompt})
        except ServerError:
            return None  # if something is wrong, the error of the completion itself explains it better
        count, most = _integer(answer.get("count")), _integer(answer.get("max_model_len"))
        return most - count if most and count and most > count else None

    def get(self, path: str) -> dict[str, Any]:
        """Returns the JSON object at `path`."""
        return self._object(self._answer(self._client.build_request("GET", path)))

    def metrics(self) -> str:
        """Returns what the server tells Prometheus, or nothing where it tells nothing."""
        try:
            return self._answer(self._client.build_request("GET", "/metrics")).text
        except ServerError:
            return ""

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Returns the JSON object that answers `body`."""
        return self._object(self._answer(self._client.build_request("POST", path, json=body)))

    def stream(self, path: str, body: dict[str, Any]) -> Generator[StreamChunk]:
        """Yields the chunks that answer `body`, until [DONE]. Closing the iterator closes the connection.

        Then the server stops. Raises ServerError when the server refuses, sends an error in the stream, or ends it
        before [DONE].
        """
        reader = EventReader()
        with network_errors(str(self._client.base_url)), self._client.stream("POST", path, json=body) as response:
            check(response.status_code, b"" if response.is_success else response.read())
            for piece in response.iter_bytes():
                for event in reader.feed(piece):
                    if event.data == DONE:
                        return
                    yield read_chunk(event)
        raise ServerError("the server ended the stream before it was done")

    def _answer(self, request: httpx.Request) -> httpx.Response:
        with network_errors(str(self._client.base_url)):
            response = self._client.send(request)
        check(response.status_code, response.content)
        return response

    def _object(self, response: httpx.Response) -> dict[str, Any]:
        try:
            value = response.json()
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise ServerError(
                f"{response.url} answers no JSON object: is this an OpenAI-compatible server?", response.status_code
            )
        return value


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) else None


def check(status: int, body: bytes) -> None:
    """Raises ServerError unless the status says success."""
    if not 200 <= status < 300:
        raise ServerError(f"the server answers {status}: {error_text(body)}", status=status)


@contextmanager
def network_errors(address: str) -> Iterator[None]:
    """Converts httpx's exceptions to a ServerError that says what to do."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise ServerError(
            f"no server answers at {address} ({error or 'timed out'}): start `jaxvllm serve`, or give --base-url"
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerError(f"the connection to {address} broke: {error or type(error).__name__}") from error
