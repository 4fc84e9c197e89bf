"""From a model's directory to parameters on the device.

No code of a checkpoint is ever executed: config.json is JSON, weights are safetensors, nothing is unpickled.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxvllm.models.families import find_family
from jaxvllm.models.families.family import Family
from jaxvllm.models.params import Layout, ParamDecl, Params, build, dummy_array, stacked
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_files import WeightFiles, open_weights
from jaxvllm.models.weight_names import Source, outer_sources
from sharding.placement import Place, place_on

LoadFormat = Literal["auto", "dummy"]
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# What a hub repository is downloaded for.
HUB_FILES = ("*.json", "*.safetensors", "*.jinja")
MODEL_DTYPES = ("float32", "bfloat16", "float16")


def resolve(model: str) -> Path:
    """The directory of a model: a local one, or a Hugging Face hub name, which is downloaded if need be.

    ValueError when it is neither, or cannot be downloaded.
    """
    path = Path(model).expanduser()
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
    place: Place | None = None,
) -> Params:
    """The parameters of the checkpoint in `path`, in `dtype`, put by `place` (None: on the first device).

    Every byte is read once. The host holds one of our arrays at a time, of one layer. `dummy` needs no
    weights: it makes them from `seed`. ValueError names the file and the tensor that is missing, unexpected,
    of another shape or dtype.
    """
    place = place or place_on(jax.devices()[0])
    if load_format == "dummy":

        def dummy(name: str, decl: ParamDecl, layer: int | None) -> np.ndarray:
            return dummy_array(name, decl, layer, dtype, seed)

        return _place_all(spec, layout, dtype, place, dummy)
    if load_format != "auto":
        raise ValueError(f"load_format must be auto or dummy, not {load_format!r}")
    family = find_family(read_config(path))
    with open_weights(path) as files:
        prefix = _prefix(family, files)
        outer = outer_sources(spec, prefix)
        layers = [family.layer_sources(spec, f"{prefix}layers.{i}.") for i in range(spec.num_layers)]
        _check_names(files, family, spec, [outer, *layers])

        def stored(name: str, decl: ParamDecl, layer: int | None) -> np.ndarray:
            sources = outer[name] if layer is None else layers[layer][name]
            return _read(files, sources, decl, dtype)

        return _place_all(spec, layout, dtype, place, stored)


def _place_all(
    spec: ModelSpec,
    layout: Layout,
    dtype: DTypeLike,
    place: Place,
    read: Callable[[str, ParamDecl, int | None], np.ndarray],
) -> Params:
    """The tree, on its devices, of the arrays that `read(name, decl, layer)` gives one after the other."""

    def leaf(name: str, decl: ParamDecl, held: tuple[int, ...] | None) -> jax.Array:
        if held is None or layout == "separate":
            return jax.device_put(read(name, decl, held[0] if held else None), place(decl.axes))
        whole = stacked(decl, spec.num_layers)
        zeros = jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=place(whole.axes))
        put = jax.jit(_put_layer, donate_argnums=0, out_shardings=place(whole.axes))
        stack = zeros(whole.shape, jnp.dtype(dtype))
        for layer in held:
            value = jax.device_put(read(name, decl, layer), place(decl.axes))
            stack = put(stack, value, np.int32(layer))
        return stack

    return build(spec, layout, leaf)


def _put_layer(stack: jax.Array, value: jax.Array, layer: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, value, layer, 0)


def _read(files: WeightFiles, sources: tuple[Source, ...], decl: ParamDecl, dtype: DTypeLike) -> np.ndarray:
    """One of our arrays, put together from the tensors it comes from."""
    array = np.empty(decl.shape, jnp.dtype(dtype))
    for source in sources:
        rows = files.reader(source.name, source.shape)(source.rows)
        array[source.at] = rows.reshape(source.view)
    return array


def _prefix(family: Family, files: WeightFiles) -> str:
    """Which of its prefixes the family's tensors have here."""
    for prefix in family.prefixes:
        if f"{prefix}embed_tokens.weight" in files.names:
            return prefix
    return family.prefixes[0]


def _check_names(
    files: WeightFiles, family: Family, spec: ModelSpec, sources: list[Mapping[str, tuple[Source, ...]]]
) -> None:
    """Every tensor that we need is there with its shape, and none is there that we do not understand."""
    used = {source.name: source.shape for part in sources for group in part.values() for source in group}
    for name, shape in used.items():
        files.reader(name, shape)
    # Old Llamas store their RoPE frequencies; some tied models store the embedding twice.
    known = ("rotary_emb.inv_freq", *(("lm_head.weight",) if spec.tie_embeddings else ()))
    unexpected = sorted(
        name for name in files.names - set(used) if not name.endswith(known) and not name.startswith(family.foreign)
    )
    if unexpected:
        name = unexpected[0]
        raise ValueError(
            f"{files.directory / files.file_of[name]}: unexpected tensor {name}"
            f"{f' and {len(unexpected) - 1} more' if unexpected[1:] else ''}: {family.architecture} has none "
            "of that name with this config, and ignoring it would change the model"
        )
