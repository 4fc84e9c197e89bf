"""Makes from a config what carries an engine's pages: the form in which they travel, and the connector."""

import json
import logging
import re
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from jaxvllm.config import EngineConfig
from jaxvllm.core.kv_transfer_config import KVTransferConfig
from jaxvllm.engine.named_weights import NamedWeights, name_model
from jaxvllm.engine.resolved_config import ResolvedConfig
from jaxvllm.kv_transfer.connector import KVConnector, OneWay
from jaxvllm.kv_transfer.file_connector import FileConnector
from jaxvllm.kv_transfer.host_connector import HostConnector
from jaxvllm.kv_transfer.page_format import PageArray, PageFormat
from jaxvllm.kv_transfer.page_memory import PageMemory
from jaxvllm.model_name import resolve
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.spread import Spread
from jaxvllm.runtime.cache_shape import CacheShape, array_owners
from pallas_kernels.backend import Backend

logger = logging.getLogger(__name__)
_LOOPBACK = re.compile(r"localhost|127(\.\d+){3}|\[?::1\]?")


def model_name(config: EngineConfig, resolved: ResolvedConfig, directory: Path) -> Future[str]:
    """Begins to find what tells the pages of this engine's model from those of others.

    Keys and values depend on the weights, on the dtypes of weights and of the cache, and on what drafts.
    """
    weights = [NamedWeights(directory, has_weights=config.load_format != "dummy")]
    rest = [f"dummy {config.seed}" if config.load_format == "dummy" else "", str(np.dtype(resolved.dtype))]
    rest += [] if resolved.quantization is None else [resolved.quantization]
    rest += [] if resolved.kv_quantization is None else [repr(resolved.kv_quantization)]
    if config.speculative_config is not None and (drafting := config.drafting) is not None:
        if drafting.model is not None:
            weights.append(NamedWeights(resolve(drafting.model)))
        rest.append(json.dumps(asdict(drafting) | {"model": None}))
    return name_model(weights, " ".join(rest), config.cache_directory)


def page_format(
    model: str | Future[str], spec: ModelSpec, shape: CacheShape, backend: Backend, mesh: Mesh
) -> PageFormat:
    """Returns how the pages of a replica on `mesh` travel."""
    spread = Spread.on(spec, mesh)
    groups, held = shape.groups(spec), shape.groups(spread.whole)
    of_stages = [shape.groups(part) for part in spread.parts] if spread.stages > 1 else []
    # A state may be divided into parts where keys and values would be copied: then each is another one.
    copies = [
        1 if own.memory.keeps_state else whole.memory.num_kv_heads // own.memory.num_kv_heads
        for own, whole in zip(groups, held, strict=True)
    ]
    arrays = []
    all_pages = shape.pages(spec, backend, mesh)
    for at, x in zip(array_owners(all_pages), jax.tree.leaves(all_pages), strict=True):
        num_held, _, num_heads, page_size, width = x.shape
        of_group = at < len(groups)  # and no proposer's, which each stage has whole
        num_layers, of = (len(groups[at].layers), copies[at]) if of_group else (num_held, 1)
        stages = tuple(len(part[at].layers) for part in of_stages if of_group)
        each = num_layers, num_heads // of, page_size, width, np.dtype(x.dtype)
        arrays.append(PageArray(*each, of, stages, group=at if of_group else 0))
    return PageFormat(model, tuple(arrays))


def make_connector(
    config: KVTransferConfig, form: PageFormat, like: Sequence[jax.ShapeDtypeStruct], rank: int = 0
) -> KVConnector:
    """Returns the connector that `config` asks for. `like`: what a page is on the devices.

    `rank`: of the engine among equal ones of this host, whose ports follow each other.

    Raises OSError where its directory cannot be written to, or its address cannot be listened on.
    """
    connector: KVConnector
    match config.kv_connector:
        case "host":
            connector = HostConnector(PageMemory(config.memory_bytes))
        case "files":
            connector = FileConnector(Path(config.storage_path).expanduser(), form)
        case "peer":
            connector = _peer_connector(config, form, like, rank)
    return connector if config.saves and config.loads else OneWay(connector, config.saves)


def _peer_connector(
    config: KVTransferConfig, form: PageFormat, like: Sequence[jax.ShapeDtypeStruct], rank: int
) -> KVConnector:
    # Imported here, because ZeroMQ and what jax has for transfers take 10 ms of each start.
    from jaxvllm.kv_transfer.peer_connector import PeerConnector, PeerOptions
    from jaxvllm.kv_transfer.transports import DeviceTransport, PageTransport, TcpTransport

    transport: PageTransport = TcpTransport(form)
    if config.stays_on_devices:
        if _LOOPBACK.fullmatch(config.kv_ip) is None:
            logger.warning(
                "transport device listens on %s, where jax takes connections from anybody: whoever can reach "
                "this address can end this engine with a few bytes, and only the network keeps them away",
                config.kv_ip,
            )
        transport = DeviceTransport(form, like, config.kv_ip)
    extra = dict(config.kv_connector_extra_config)
    for name in ("cpu_bytes_to_use", "device_bytes_to_use", "transport"):
        extra.pop(name, None)
    name = config.engine_id or uuid.uuid4().hex
    port = config.kv_port + rank if config.kv_port else 0
    options = PeerOptions(engine_id=name, host=config.kv_ip, port=port, **extra)
    return PeerConnector(options, PageMemory(config.memory_bytes), form.page_size, transport)
