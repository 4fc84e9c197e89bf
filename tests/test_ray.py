"""The Ray Serve application, on a real Ray of this machine."""

import os
import socket
from collections.abc import Iterator

import httpx
import pytest

from tests.waiting import PATIENCE

# Ray's own use of pydantic, and JAX about processes that Ray starts at once after the fork.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:os.fork")
OPTIONS = dict(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256, num_pages=100)


@pytest.fixture(scope="module")
def ray_serve() -> Iterator[str]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray import serve

    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        port = some.getsockname()[1]
    serve.start(http_options={"port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()


@pytest.mark.slow
def test_an_application_in_ten_lines(ray_serve: str) -> None:
    from ray import serve

    from jaxvllm.ray import build_app

    serve.run(build_app(model="demo", num_replicas=1, served_model_name="fox", **OPTIONS), route_prefix="/")
    with httpx.Client(base_url=ray_serve, timeout=PATIENCE) as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == "fox"
        body = {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0}
        whole = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            lines = [line for line in response.iter_lines() if line.startswith("data: ")]
        assert len(lines) > 2 and lines[-1] == "data: [DONE]"
        assert whole and client.post("/v1/completions", json=body | {"max_tokens": 0}).status_code == 400


def test_an_option_that_is_none() -> None:
    from jaxvllm.ray import app

    with pytest.raises(ValueError, match="--max-modl-len 5 are no options of jaxvllm serve"):
        app({"max_modl_len": "5"})
