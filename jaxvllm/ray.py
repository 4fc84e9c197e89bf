"""Ray Serve: `serve run jaxvllm.ray:app model=DIRECTORY num_replicas=2`, or `build_app` from Python."""

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from jaxvllm.cli.flags import flag_of
from jaxvllm.cli.serve import read_options
from jaxvllm.config import EngineConfig
from jaxvllm.server.config import ServerConfig
from jaxvllm.server.http.http_config import read_keys
from jaxvllm.worker.data_parallel_config import DataParallelConfig
from jaxvllm.worker.ray_place import actor_options, bundle_of, import_ray, join_cluster

if TYPE_CHECKING:
    from ray.serve import Application
    from starlette.types import ASGIApp, Receive, Scope, Send

    from jaxvllm.worker.engine_pool import EnginePool

# Requests that Ray Serve sends to a replica at once. The engine has its own queue, and Serve's default of 5 would
# leave most of its rows empty.
MAX_ONGOING_REQUESTS = 1000


def app(args: dict[str, str]) -> "Application":
    """Builds the application of the command `serve run jaxvllm.ray:app NAME=VALUE ...`.

    The names are those of `build_app` and of the options of `jaxvllm serve`, with underscores.
    """
    options: dict[str, Any] = dict(args)
    return build_app(**options)


def build_app(
    *,
    num_replicas: int | str = 1,
    max_ongoing_requests: int | str = MAX_ONGOING_REQUESTS,
    ray_actor_options: dict[str, Any] | None = None,
    **options: Any,
) -> "Application":
    """Returns a Ray Serve application with the same endpoints as `jaxvllm serve`.

    Each of `num_replicas` is an actor with an engine of its own, which it starts again when it dies. `options` are
    those of `jaxvllm serve`, such as `model` or `max_model_len`. By default an actor reserves a GPU or TPU chip for
    each device of its engine, where the cluster has some.

    Raises ValueError for a wrong option, and ImportError when Ray is not installed.
    """
    ray = import_ray()
    from ray import serve

    engine, server, parallel = read_options([word for name, value in options.items() for word in _words(name, value)])
    if ray_actor_options is None:
        join_cluster()
        ray_actor_options = actor_options(bundle_of(ray.cluster_resources(), engine.mesh_shape.num_devices))

    def make() -> "ASGIApp":
        return EngineApp(engine, server, parallel)

    deploy: Any = serve.deployment(
        name="jaxvllm",
        num_replicas=int(num_replicas),
        max_ongoing_requests=int(max_ongoing_requests),
        ray_actor_options=ray_actor_options,
    )
    application: Application = deploy(serve.ingress(make)()).bind()
    return application


def _words(name: str, value: Any) -> list[str]:
    """Returns an option as it is typed at a terminal."""
    match value:
        case None:
            return []
        case True:
            return [flag_of(name)]
        case False:
            return [flag_of(f"no_{name}")]
        case list() | tuple():
            return [word for one in value for word in (flag_of(name), str(one))]
    return [flag_of(name), str(value)]


class EngineApp:
    """An ASGI application that has the engines which it serves: its startup waits until they take requests."""

    def __init__(self, engine: EngineConfig, server: ServerConfig, parallel: DataParallelConfig):
        from jaxvllm.server.app import create_app
        from jaxvllm.server.http.http_door import guarded
        from jaxvllm.server.service import Service
        from jaxvllm.text.chat_template import read_chat_template
        from jaxvllm.worker.data_parallel import open_pool
        from jaxvllm.worker.queue_limits import QueueLimits

        logging.getLogger("jaxvllm").setLevel(logging.INFO)
        template = None if server.chat_template is None else read_chat_template(server.chat_template)
        limits = QueueLimits(server.max_num_queued_requests, server.max_num_queued_tokens)
        self.pool: EnginePool = open_pool(engine, parallel, limits, template)
        self._app = guarded(create_app(Service(self.pool, server)), server, read_keys(server))

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        else:
            await self._app(scope, receive, send)

    async def _live(self, receive: "Receive", send: "Send") -> None:
        await receive()  # lifespan.startup
        try:
            await self.pool.start()
        except Exception as error:
            with suppress(Exception):
                await self.pool.close()
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()  # lifespan.shutdown
        await self.pool.close()
        await send({"type": "lifespan.shutdown.complete"})
