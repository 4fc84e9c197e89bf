"""Adapters over HTTP: named as models, loaded and unloaded, and kept within one directory."""

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from jaxvllm.config import EngineConfig
from jaxvllm.engine.commands import LoadAdapter
from jaxvllm.server import adapter_loader
from jaxvllm.server.adapter_names import AdapterNames, read_modules
from jaxvllm.server.config import ServerConfig
from jaxvllm.server.errors import ApiError
from jaxvllm.worker.async_llm import AsyncLLM
from tests.engine.tiny import write_tiny_checkpoint
from tests.models.adapters import RandomAdapter
from tests.models.fixture import Fixture
from tests.server.conftest import ENGINE, application
from tests.waiting import PATIENCE

FIXTURE = Fixture.load("llama")


@dataclass(frozen=True)
class AdaptedServer:
    """A server with room for two adapters."""

    app: Any
    llm: AsyncLLM
    portal: BlockingPortal
    directory: Path  # from which adapters may be loaded

    def ask(
        self, path: str, method: str = "POST", headers: dict[str, str] | None = None, **body: Any
    ) -> httpx.Response:
        async def run() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                return await client.request(method, path, json=body or None, headers=headers)

        return self.portal.call(asyncio.wait_for, run(), PATIENCE)

    def text(self, model: str) -> str:
        body = {"model": model, "prompt": "The", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = self.ask("/v1/completions", **body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == model
        [choice] = answer.json()["choices"]
        return str(choice["text"])

    def refusal(self, path: str, **body: Any) -> tuple[int, str]:
        answer = self.ask(path, **body)
        assert answer.status_code >= 400, answer.text
        return answer.status_code, answer.json()["error"]["message"]

    @property
    def names(self) -> list[tuple[str, str | None]]:
        return [(card["id"], card["parent"]) for card in self.ask("/v1/models", "GET").json()["data"]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdaptedServer]:
    model = write_tiny_checkpoint(tmp_path_factory.mktemp("model"))
    directory = tmp_path_factory.mktemp("adapters")
    for number in range(3):
        RandomAdapter(FIXTURE, seed=number, ends=("_proj",), size=1).write(directory / f"adapter-{number}")
    options = ENGINE | {"model": str(model), "max_model_len": 128, "enable_lora": True, "max_loras": 2}
    modules = (f"first={directory / 'adapter-0'}",)
    config = ServerConfig(
        served_model_name=("tiny",),
        lora_modules=modules,
        lora_directory=str(directory),
        lora_resolver=True,
        metrics_prefix="vllm",
    )
    with start_blocking_portal() as portal:
        llm = AsyncLLM.from_config(EngineConfig.from_options(**options))
        portal.call(llm.start)
        try:
            yield AdaptedServer(application(llm, config), llm, portal, directory)
        finally:
            portal.call(llm.close)


def test_adapters_are_models(server: AdaptedServer) -> None:
    assert server.names == [("tiny", None), ("first", "tiny")]
    assert server.text("first") != server.text("tiny")
    assert server.refusal("/v1/completions", model="second", prompt="The")[0] == 404
    chat = server.ask("/v1/chat/completions", model="first", messages=[{"role": "user", "content": "Hi"}], max_tokens=2)
    assert chat.status_code == 200 and chat.json()["model"] == "first"
    tokens = []
    for model in ("tiny", "first"):
        sampling = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = server.ask("/inference/v1/generate", model=model, token_ids=[5, 6, 7], sampling_params=sampling)
        assert answer.status_code == 200 and answer.json()["model"] == model, answer.text
        tokens.append(answer.json()["choices"][0]["token_ids"])
    assert tokens[0] != tokens[1]


def test_loading_and_unloading(server: AdaptedServer) -> None:
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    answer = server.ask(load, lora_name="second", lora_path="adapter-1")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'second' added successfully.")
    assert server.names[-1] == ("second", "tiny")
    before = server.text("second")
    assert before not in (server.text("first"), server.text("tiny"))
    assert server.refusal(load, lora_name="second", lora_path="adapter-2") == (
        400,
        "the adapter 'second' is loaded already: unload it, or set load_inplace",
    )
    path = str(server.directory / "adapter-2")
    assert server.ask(load, lora_name="second", lora_path=path, load_inplace=True).status_code == 200
    assert server.text("second") != before
    metrics = server.ask("/metrics", "GET").text
    [line] = [line for line in metrics.splitlines() if line.startswith("vllm:lora_requests_info{")]
    assert 'max_lora="2"' in line and 'engine="0"' in line and 'waiting_lora_adapters=""' in line
    assert server.ask(unload, lora_name="second").status_code == 200
    assert server.names[-1] == ("first", "tiny")
    assert server.refusal(unload, lora_name="second")[0] == 404
    assert server.refusal("/v1/completions", model="second", prompt="The")[0] == 404


def test_what_is_wrong_changes_nothing(server: AdaptedServer, tmp_path: Path) -> None:
    load, names = "/v1/load_lora_adapter", server.names
    inside = server.directory
    outside = RandomAdapter(FIXTURE, seed=9, ends=("_proj",)).write(tmp_path / "outside")
    (inside / "link").symlink_to(outside)
    (inside / "parts").mkdir()
    for file in outside.iterdir():
        (inside / "parts" / file.name).symlink_to(file)
    os.mkfifo(inside / "pipe")
    damaged = RandomAdapter(FIXTURE, seed=1, ends=("_proj",)).write(inside / "damaged")
    (damaged / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 64, "lora_alpha": 1}))
    for path in (str(outside), "../outside", "link", "parts", f"{inside}/../outside", "a\0b", "x" * 5000):
        status, message = server.refusal(load, lora_name="bad", lora_path=path)
        assert status == 400 and "lora_directory" in message and "outside" not in message.replace("out of", ""), path[
            :40
        ]
    assert server.refusal(load, lora_name="bad", lora_path="pipe") == (400, "lora_path is no directory there")
    assert "rank 64, and max_lora_rank is 16" in server.refusal(load, lora_name="bad", lora_path="damaged")[1]
    assert server.refusal(load, lora_name="tiny", lora_path="adapter-1")[0] == 400
    web = server.ask(load, headers={"origin": "http://evil"}, lora_name="bad", lora_path="adapter-1")
    assert web.status_code == 403
    assert server.names == names
    # It goes on, and an adapter whose files are gone is an error of those who name it, which tells no path.
    assert server.text("first") != server.text("tiny")


def test_unknown_models_are_looked_up_in_the_directory(server: AdaptedServer, tmp_path: Path) -> None:
    inside = server.directory
    RandomAdapter(FIXTURE, seed=5, ends=("_proj",), size=1).write(inside / "found.v1")
    (inside / "empty").mkdir()
    outside = RandomAdapter(FIXTURE, seed=6, ends=("_proj",)).write(tmp_path / "outside")
    (inside / "elsewhere").symlink_to(outside)
    (inside / ".hidden").symlink_to(inside / "found.v1")
    RandomAdapter(FIXTURE, seed=7, ends=("_proj",), rank=64, config={"r": 64}).write(inside / "wide")
    loaded: list[str] = []
    ask = server.llm.ask

    async def counting(command: Any) -> Any:
        if isinstance(command, LoadAdapter):
            loaded.append(command.name)
        return await ask(command)

    async def together() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(server.app), base_url="http://server") as client:
            body = {"model": "found.v1", "prompt": "The", "max_tokens": 2}
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(6)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.llm, "ask", counting)
        hostile = (
            "../outside",
            str(outside),
            "elsewhere",
            ".hidden",
            ".",
            "..",
            "found.v1/",
            "empty",
            "a\0b",
            "x" * 999,
        )
        for name in (*hostile, "pipe", ""):
            assert server.refusal("/v1/completions", model=name, prompt="The")[0] == 404, name
        assert not loaded
        for _ in range(2):  # it is read once, until a file changes
            status, message = server.refusal("/v1/completions", model="wide", prompt="The")
            assert status == 400 and "max_lora_rank is 16" in message and str(inside) not in message
        assert [answer.status_code for answer in server.portal.call(together)] == [200] * 6
        assert loaded == ["wide", "found.v1"]
        (inside / "wide" / "adapter_config.json").chmod(0o600)
        assert server.refusal("/v1/completions", model="wide", prompt="The") == (400, message)
        assert loaded.count("wide") == 2
        patch.setattr(adapter_loader, "RETRY_SECONDS", 0.0)
        (inside / "wide" / "adapter_config.json").chmod(0o644)
        for _ in range(2):
            assert server.refusal("/v1/completions", model="wide", prompt="The") == (400, message)
        assert loaded.count("wide") == 4
        assert server.text("found.v1") not in (server.text("tiny"), server.text("first"))
    assert server.names[-1] == ("found.v1", "tiny")
    # One whose name was taken away is looked up as any other.
    assert server.ask("/v1/unload_lora_adapter", lora_name="found.v1").status_code == 200
    assert server.ask("/tokenize", model="found.v1", prompt="The").status_code == 200
    assert server.ask("/v1/unload_lora_adapter", lora_name="found.v1").status_code == 200


def test_changes_of_one_name_wait_for_each_other(server: AdaptedServer) -> None:
    async def race() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(server.app), base_url="http://server") as client:

            async def post(path: str, **body: Any) -> int:
                return (await client.post(f"/v1/{path}_lora_adapter", json={"lora_name": "raced"} | body)).status_code

            loads = [post("load", lora_path="adapter-1"), post("load", lora_path="adapter-2")]
            return await asyncio.gather(*loads, post("unload"), post("load", lora_path="adapter-2"))

    assert server.portal.call(race) == [200, 400, 200, 200]
    expected = server.text("raced")
    assert server.ask("/v1/load_lora_adapter", lora_name="same", lora_path="adapter-2").status_code == 200
    assert server.text("same") == expected
    for name in ("raced", "same"):
        assert server.ask("/v1/unload_lora_adapter", lora_name=name).status_code == 200


def raises(match: str, run: Callable[[], object]) -> None:
    with pytest.raises((ValueError, ApiError), match=match):
        run()


def test_options(tmp_path: Path) -> None:
    assert read_modules(["a=/x", '{"name": "b", "path": "/y=z", "base_model_name": "m"}']) == (
        ("a", "/x"),
        ("b", "/y=z"),
    )
    for wrong in ("a", "=x", "a=", '{"name": "a"}', "{"):
        raises("NAME=PATH", lambda wrong=wrong: read_modules([wrong]))
    raises("knows no is_3d", lambda: read_modules(['{"name": "b", "path": "/y", "is_3d": true}']))
    raises("twice", lambda: read_modules(["a=/x", "a=/y"]))
    raises("that of the model", lambda: AdapterNames([("m", "/x")], ["m"], None))
    raises("is no directory", lambda: ServerConfig(lora_directory=str(tmp_path / "none")))
    raises("set it, too", lambda: ServerConfig(lora_resolver=True))
    raises("API processes", lambda: ServerConfig(lora_directory=str(tmp_path), api_server_count=2))
