"""Loads the model of a directory onto devices, or converts it to a directory whose weights any mesh can restore.

No code of a checkpoint is ever executed: config.json is JSON, weights are safetensors, nothing is unpickled.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxvllm.gguf_file import GgufFile, is_gguf
from jaxvllm.models import orbax_tree
from jaxvllm.models.families import find_family, model_spec
from jaxvllm.models.forms import PLAIN_FORMS, Forms
from jaxvllm.models.forms.choice import MatrixKey
from jaxvllm.models.forms.few_bits import FewBits
from jaxvllm.models.held_tensors import HeldTensors
from jaxvllm.models.hf_weights import StoredWeights
from jaxvllm.models.orbax_tree import TREE, OrbaxTree
from jaxvllm.models.params import Layout, Params, abstract_params, declaration, dummy_array
from jaxvllm.models.published import published_encoding, without_encoding
from jaxvllm.models.safetensors_files import INDEX
from jaxvllm.models.shards import (
    Parts,
    WeightPatch,
    assemble,
    joined,
    of_stage,
    read_shards,
    read_stored,
    sharding_on,
)
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.spread import Spread
from jaxvllm.models.stored_forms import expected_forms, stored_forms
from jaxvllm.models.tiling import Fill, copied
from sharding.placement import mesh_of, stage_meshes

LoadFormat = Literal["auto", "dummy"]
CONFIG = "config.json"
MODELOPT = "hf_quant_config.json"
# The files of a converted model beside its weights: configs, tokenizers in every format, chat templates.
COPIED = ("*.json", "*.jinja", "*.model", "*.txt", "LICENSE*")
MODEL_DTYPES = ("float32", "bfloat16", "float16")


def read_config(path: Path) -> dict[str, Any]:
    """Reads the config.json of a model's directory, or makes that of a GGUF file.

    Raises ValueError when it is missing or not a JSON object, or when the GGUF file is damaged.
    """
    if is_gguf(path):
        from jaxvllm.models.published.gguf_config import gguf_config  # 14 ms of imports, and few models are such files

        return gguf_config(GgufFile.open(path, has_texts=False))
    file = path / CONFIG
    if not path.is_dir():
        raise ValueError(f"model directory {path} does not exist")
    if not file.is_file():
        raise ValueError(f"{path} has no config.json: it must be a model in Hugging Face format")
    config = read_object(file)
    # Older checkpoints of ModelOpt state their encoding in a file of its own.
    if (beside := path / MODELOPT).is_file() and "quantization_config" not in config:
        stated = read_object(beside).get("quantization")
        if not isinstance(stated, dict):
            raise ValueError(f"{beside} must have an object named quantization")
        config["quantization_config"] = {"quant_method": "modelopt"} | stated
    return config


def read_object(file: Path) -> dict[str, Any]:
    """Returns the JSON object that a file holds. Raises ValueError that names the file if it holds none."""
    return object_in(file.read_bytes(), file)


def object_in(content: bytes, file: Path) -> dict[str, Any]:
    """Returns the JSON object in the content of a file. Raises ValueError that names the file if there is none."""
    try:
        value = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} must hold a JSON object")
    return value


def stated_dtype(config: Mapping[str, Any]) -> Any:
    """Returns whatever a config states as its dtype, in the new or old spelling, or float32 when it states none."""
    inner = config.get("text_config")
    places = (config, inner if isinstance(inner, dict) else {})
    found = (part[key] for part in places for key in ("dtype", "torch_dtype") if part.get(key))
    return next(found, "float32")


def config_dtype(config: Mapping[str, Any]) -> str:
    """Returns the dtype that a config states, or float32. Raises ValueError when models cannot have it."""
    dtype = stated_dtype(config)
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
    hf_config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
    forms: Forms = PLAIN_FORMS,
    needs_kv_scales: bool = False,
    kept: Params | None = None,
) -> Params:
    """Loads the parameters of the checkpoint in `path`, in `dtype`, spread over all of `mesh` (None: the first device).

    Each device's shard is read straight from the files, safetensors or the tree that `jaxvllm convert` wrote, by the
    process that has the device; where `mesh` has stages, only the layers of its stage are. With `dummy` no weights are
    needed: they are made from `seed`, the same on every mesh, in the bits that the config tells. `hf_config` replaces
    the config.json of the directory, which names the family, and `tensors` replace its weights: arrays by the names in
    safetensors. With `kept`, parameters of the same model, they are a part of its weights, and the others are `kept`.
    Matrices are kept in the forms of `forms`, which are made one matrix at a time. Matrices that safetensors store in
    few bits are kept so where `forms` allow it (`models.stored_forms`), and otherwise decoded while they are read.
    Scales of keys and values that `spec` has and the weights lack are 1, or an error with `needs_kv_scales`.
    Raises ValueError that names the file and the tensor which is missing, unexpected, or of another shape or dtype.
    """
    if load_format not in get_args(LoadFormat):
        raise ValueError(f"load_format must be auto or dummy, not {load_format!r}")
    mesh = mesh or mesh_of(jax.devices()[0])
    spread = Spread.on(spec, mesh)
    if spread.stages > 1 and layout == "separate":
        raise ValueError("the layers of a mesh with stages must be stacked: they are divided along the stack")
    if spread.stages > 1 and jax.process_count() > 1 and (path / TREE).is_dir():
        # orbax lets all processes wait for each other in every read, and those of other stages have fewer layers.
        raise NotImplementedError(f"{path / TREE} cannot be read in stages by several processes: give the safetensors")
    weights: OrbaxTree | StoredWeights | None = None
    if tensors is not None:
        family = find_family(hf_config or read_config(path))
        held = HeldTensors(tensors)
        if kept is None:
            weights = StoredWeights.of(held, family, spec, needs_kv_scales)
        else:
            weights = StoredWeights.part_of(held, family, spec)
    elif load_format == "auto" and (path / TREE).is_dir():
        if needs_kv_scales:
            raise ValueError(f"{path / TREE} has no scales of keys and values, which int8 needs: give the safetensors")
        weights = OrbaxTree.open(path / TREE, spec)
    elif load_format == "auto":
        weights = StoredWeights.open(path, hf_config or read_config(path), spec, needs_kv_scales)
    own: dict[MatrixKey, FewBits] = {}
    if weights is None and forms.stored is not None:
        encoding = published_encoding(hf_config or read_config(path))
        if encoding is not None:
            forms = replace(forms, own={**expected_forms(encoding, spread, dtype, forms), **forms.own})
    if isinstance(weights, StoredWeights):
        found = stored_forms(weights, spread, layout, dtype, forms)
        own = {key: form for key, form in found.items() if forms.own.get(key, form) == form}
        forms = replace(forms, own={**own, **forms.own})
    of_stages = []
    for number, stage in enumerate(stage_meshes(mesh)):
        if not stage.local_devices:
            continue  # another process loads it
        sharding_of = sharding_on(stage)
        parts: Parts
        if isinstance(weights, OrbaxTree):
            parts = weights.restore(stage, dtype, spread.stage_layers[number].stop)
        else:
            fill = partial(_dummy, spec, dtype, seed) if weights is None else weights.fill
            parts = read_shards(fill, spread, layout, dtype, sharding_of)
            if isinstance(weights, StoredWeights):
                parts = read_stored(weights.elements, own, parts, spread, layout, dtype, sharding_of)
        patch: WeightPatch | None = None
        if kept is not None:
            assert isinstance(weights, StoredWeights), "a part of the weights is given as tensors"
            before = kept if spread.stages == 1 else of_stage(kept, spread, stage, forms)
            patch = WeightPatch(before, weights.has)
        of_stages.append(assemble(spread, number, layout, dtype, sharding_of, parts, forms, patch))
    return joined(of_stages, abstract_params(spec, dtype, layout, mesh, forms)) if spread.stages > 1 else of_stages[0]


def _dummy(spec: ModelSpec, dtype: DTypeLike, seed: int, name: str, layer: int | None) -> Fill:
    return copied(dummy_array(name, declaration(spec, name, layer), layer, dtype, seed))


def convert(model: Path, output: Path, *, dtype: str, mesh: Mesh) -> None:
    """Writes the model of directory `model` into `output`, split over the model axis of `mesh`, in `dtype`.

    `auto` is the dtype that the config states. The devices together hold the model once, and the host holds one array
    of it at a time. Raises ValueError when `output` has anything in it, or when the model cannot be read; both are
    found before any weight is read.
    """
    if is_gguf(model):
        raise ValueError(f"{model} is a GGUF file: convert takes a directory, whose tokenizer it copies, too")
    config = read_config(model)
    spec = model_spec(config)
    copied_files = companions(model)
    check_empty(output, {file.name for file in copied_files})
    if (model / TREE).is_dir():
        raise ValueError(f"{model} is an orbax tree already: any mesh can load it")
    name = config_dtype(config) if dtype == "auto" else dtype
    sharding_of = orbax_tree.stored_sharding(mesh)
    weights = StoredWeights.open(model, config, spec)
    # These come first, so that a directory that cannot be written to is found before minutes of reading weights.
    output.mkdir(parents=True, exist_ok=True)
    for file in copied_files:
        shutil.copyfile(file, output / file.name)
    parts = read_shards(weights.fill, Spread(spec), "separate", name, sharding_of)
    orbax_tree.save(output / TREE, assemble(Spread(spec), 0, "separate", name, sharding_of, parts, PLAIN_FORMS))
    # The config comes last: if anything went wrong before, the directory has none and is not taken for a model. Its
    # dtype is the one that `auto` will load.
    written = without_encoding(config) | {"dtype": name}
    (output / CONFIG).write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def companions(model: Path) -> list[Path]:
    """Returns the files that are copied unchanged."""
    found = {file for pattern in COPIED for file in model.glob(pattern) if file.is_file()}
    return sorted(found - {model / CONFIG, model / INDEX, model / MODELOPT})


def check_empty(output: Path, written: set[str]) -> None:
    """Raises ValueError when `output` is not empty. `written` has the names of the files that would be copied there."""
    found = {path.name for path in output.iterdir()} if output.is_dir() else set()
    if not found and (output.is_dir() or not output.exists()):
        return
    message = f"{output} is not an empty directory: give another, nothing is overwritten"
    # Only files that a conversion writes are there, and no config.json. orbax writes into a directory whose name begins
    # with that of the tree.
    if found and all(name in written or name.startswith(TREE) for name in found):
        message += ", or delete it if a conversion was interrupted: it holds nothing else"
    raise ValueError(message)
