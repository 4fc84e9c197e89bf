"""From a model's directory to parameters on the device.

No code of a checkpoint is ever executed: config.json is JSON, weights are safetensors, nothing is unpickled.
"""

import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

import jaxvllm
from jaxvllm.models.families import find_family
from jaxvllm.models.orbax_tree import TREE, OrbaxTree
from jaxvllm.models.params import Layout, ParamDecl, Params, declare, declare_layer, dummy_array
from jaxvllm.models.placing import place_all
from jaxvllm.models.shards import read_shards
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.spread import Spread
from jaxvllm.models.stored_weights import StoredWeights
from jaxvllm.models.tiling import Fill, copied
from sharding.placement import mesh_of, place

# The model that ships inside the package.
DEMO_MODEL = Path(jaxvllm.__file__).parent / "assets" / "demo"
LoadFormat = Literal["auto", "dummy"]
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# What a hub repository is downloaded for.
HUB_FILES = ("*.json", "*.safetensors", "*.jinja")
MODEL_DTYPES = ("float32", "bfloat16", "float16")


def resolve(model: str) -> Path:
    """The directory of a model: "demo", a local one, or a Hugging Face hub name, which is downloaded if need be.

    ValueError when it is none of them, or cannot be downloaded.
    """
    if model == "demo":
        return DEMO_MODEL
    try:
        path = Path(model).expanduser()
    except RuntimeError as error:  # ~ of a user that there is not
        raise ValueError(f"model {model!r} is in nobody's home ({error}): give the directory without ~") from error
    if path.is_dir():
        return path
    if path.is_file():
        raise ValueError(f"model {model!r} is a file: give the directory that holds config.json")
    if not HUB_NAME.fullmatch(model):
        raise ValueError(f"model {model!r} is not a directory, nor a hub name such as owner/name")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=list(HUB_FILES)))
    # Anything may go wrong on a network, and each kind has its own exception.
    except Exception as error:
        raise ValueError(
            f"model {model!r} is not a directory, and could not be downloaded "
            f"({type(error).__name__}: {error}): give a local directory"
        ) from error


def read_config(path: Path) -> dict[str, Any]:
    """The config.json of a model's directory; ValueError when it is missing or not a JSON object."""
    file = path / "config.json"
    if not path.is_dir():
        raise ValueError(f"model directory {path} does not exist")
    if not file.is_file():
        raise ValueError(f"{path} has no config.json: it must be a model in Hugging Face format")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} must hold a JSON object")
    return config


def config_dtype(config: Mapping[str, Any]) -> str:
    """The dtype that a config states, in its new or old spelling; float32 when it states none."""
    inner = config.get("text_config")
    places = (config, inner if isinstance(inner, dict) else {})
    found = [part[key] for part in places for key in ("dtype", "torch_dtype") if part.get(key)]
    dtype = found[0] if found else "float32"
    if dtype not in MODEL_DTYPES:
        raise ValueError(f"config dtype {dtype!r} is not supported: supported are {', '.join(MODEL_DTYPES)}")
    return str(dtype)


def load(
    path: Path,
    spec: ModelSpec,
    *,
    dtype: DTypeLike,
    layout: Layout,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    mesh: Mesh | None = None,
) -> Params:
    """The parameters of the checkpoint in `path`, in `dtype`, spread over all of `mesh`; None: the first device.

    Each device's shard is read straight from the files, safetensors or the tree that `jaxvllm convert` wrote, by the
    process that has the device. `dummy` needs no weights: it makes them from `seed`, the same on every mesh.
    ValueError names the file and the tensor that is missing, unexpected, of another shape or dtype.
    """
    mesh = mesh or mesh_of(jax.devices()[0])
    spread = Spread(spec, mesh.size)
    sharding = place(mesh)

    def where(decl: ParamDecl) -> NamedSharding:
        return sharding(decl.axes)

    if load_format == "dummy":
        parts = read_shards(partial(_dummy, spec, dtype, seed), spread, layout, dtype, where)
    elif load_format != "auto":
        raise ValueError(f"load_format must be auto or dummy, not {load_format!r}")
    elif (path / TREE).is_dir():
        parts = OrbaxTree.open(path / TREE, spec).restore(mesh, dtype)
    else:
        weights = StoredWeights.open(path, find_family(read_config(path)), spec)
        parts = read_shards(weights.fill, spread, layout, dtype, where)
    return place_all(spread.whole, layout, dtype, where, parts)


def _dummy(spec: ModelSpec, dtype: DTypeLike, seed: int, name: str, layer: int | None) -> Fill:
    decls = declare(spec) if layer is None else declare_layer(spec)
    return copied(dummy_array(name, decls[name], layer, dtype, seed))
