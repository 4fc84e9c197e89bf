"""From a config to what carries an engine's pages: the form in which they travel, and the connector."""

import uuid
from pathlib import Path

import numpy as np
from jax.sharding import Mesh

from jaxvllm.config import EngineConfig
from jaxvllm.core.kv_transfer_config import KVTransferConfig
from jaxvllm.engine.resolved_config import ResolvedConfig
from jaxvllm.kv_transfer.connector import KVConnector, OneWay
from jaxvllm.kv_transfer.file_connector import FileConnector
from jaxvllm.kv_transfer.host_connector import HostConnector
from jaxvllm.kv_transfer.host_memory import HostMemory
from jaxvllm.kv_transfer.page_format import PageArray, PageFormat
from jaxvllm.kv_transfer.peer_connector import PeerConnector, PeerOptions
from jaxvllm.models.spread import Spread
from jaxvllm.models.weights_name import weights_name
from jaxvllm.runtime.cache_shape import CacheShape
from pallas_kernels.backend import Backend


def page_format(
    config: EngineConfig, resolved: ResolvedConfig, directory: Path, shape: CacheShape, backend: Backend, mesh: Mesh
) -> PageFormat:
    """Returns how the pages of a replica on `mesh` travel.

    Keys and values depend on the weights, on the dtypes of weights and of the cache, and on what drafts.
    """
    spec = resolved.spec
    dummy = f"dummy {config.seed}" if config.load_format == "dummy" else ""
    model = " ".join((weights_name(directory), dummy, str(np.dtype(resolved.dtype)), config.speculative_config or ""))
    copies, num_groups = Spread(spec, mesh.size).kv_copies, len(shape.groups(spec))
    arrays = []
    for at, pages in enumerate(shape.pages(spec, backend, mesh)):
        num_layers, _, num_heads, page_size, width = pages.shape
        of = copies if at < num_groups else 1
        arrays.append(PageArray(num_layers, num_heads // of, page_size, width, np.dtype(pages.dtype), of))
    return PageFormat(model, tuple(arrays))


def make_connector(config: KVTransferConfig, form: PageFormat) -> KVConnector:
    """Returns the connector that `config` asks for. Raises OSError where its directory cannot be written to."""
    connector: KVConnector
    match config.kv_connector:
        case "host":
            connector = HostConnector(HostMemory(config.host_bytes))
        case "files":
            connector = FileConnector(Path(config.storage_path).expanduser(), form)
        case "peer":
            connector = PeerConnector(_peer_options(config), HostMemory(config.host_bytes), form)
    return connector if config.saves and config.loads else OneWay(connector, config.saves)


def _peer_options(config: KVTransferConfig) -> PeerOptions:
    extra = dict(config.kv_connector_extra_config)
    extra.pop("cpu_bytes_to_use", None)
    name = config.engine_id or uuid.uuid4().hex
    return PeerOptions(engine_id=name, host=config.kv_ip, port=config.kv_port, **extra)
