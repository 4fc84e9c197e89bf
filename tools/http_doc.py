"""Writes docs/http.md: `python -m tools.http_doc`."""

from pathlib import Path

from jaxvllm.config import EngineConfig
from jaxvllm.server.app import create_app
from jaxvllm.server.config import ServerConfig
from jaxvllm.server.http_doc import markdown
from jaxvllm.server.service import Service
from jaxvllm.worker.async_llm import AsyncLLM

FILE = Path(__file__).parents[1] / "docs/http.md"


def text() -> str:
    """Returns the text of the file, with the endpoints that are off by default. No engine is started."""
    config = ServerConfig(
        enable_tokenizer_info_endpoint=True, enable_elastic_ep=True, dev_endpoints=True, lora_directory=str(FILE.parent)
    )
    return markdown(create_app(Service(AsyncLLM.from_config(EngineConfig(enable_lora=True)), config)))


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
