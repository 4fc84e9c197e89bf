"""A prefix that a proxy leaves on the paths is taken off before anybody looks at them."""

import asyncio
from typing import Any

import pytest

from jaxvllm.server.config import ServerConfig
from jaxvllm.server.http.root_path import RootPath


@pytest.mark.parametrize(
    ("path", "inner"),
    [("/llm/v1/models", "/v1/models"), ("/v1/models", "/v1/models"), ("/llmx/v1", "/llmx/v1"), ("/llm", "/llm")],
)
def test_the_prefix_is_taken_off(path: str, inner: str) -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope["path"], scope["raw_path"]))

    asyncio.run(RootPath(app, "/llm")({"type": "http", "path": path, "raw_path": path.encode()}, None, None))
    assert seen == [(inner, inner.encode())]


@pytest.mark.parametrize("wrong", ["llm", "/llm/", "/", "/a b"])
def test_a_root_path_is_a_path(wrong: str) -> None:
    with pytest.raises(ValueError, match="root_path must be a path such as /llm, without a slash at its end"):
        ServerConfig(root_path=wrong)
