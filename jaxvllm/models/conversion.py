"""From a checkpoint in safetensors to one that orbax restores onto any mesh."""

import json
import shutil
from pathlib import Path

from jax.sharding import Mesh

from jaxvllm.models import orbax_tree
from jaxvllm.models.checkpoint import config_dtype, read_config
from jaxvllm.models.families import find_family, model_spec
from jaxvllm.models.placing import place_all
from jaxvllm.models.shards import read_shards
from jaxvllm.models.spread import Spread
from jaxvllm.models.stored_weights import StoredWeights
from jaxvllm.models.weight_files import INDEX

CONFIG = "config.json"
# Configs, tokenizers in every format, chat templates.
COPIED = ("*.json", "*.jinja", "*.model", "*.txt", "LICENSE*")


def convert(model: Path, output: Path, *, dtype: str, mesh: Mesh) -> None:
    """Writes the model of directory `model` into `output`, split over the model axis of `mesh`, in `dtype`.

    `auto` is the dtype that the config states. The devices hold the whole model once, the host one array of it.
    ValueError when `output` has anything in it, or the model cannot be read; both are found before any weight is read.
    """
    config = read_config(model)
    spec = model_spec(config)
    companions = _companions(model)
    _check_empty(output, {file.name for file in companions})
    if (model / orbax_tree.TREE).is_dir():
        raise ValueError(f"{model} is an orbax tree already: any mesh can load it")
    name = config_dtype(config) if dtype == "auto" else dtype
    where = orbax_tree.stored_where(mesh)
    weights = StoredWeights.open(model, find_family(config), spec)
    # First: a place that cannot be written to is found before the minutes that the weights take.
    output.mkdir(parents=True, exist_ok=True)
    for file in companions:
        shutil.copyfile(file, output / file.name)
    parts = read_shards(weights.fill, Spread(spec), "separate", name, where)
    orbax_tree.save(output / orbax_tree.TREE, place_all(spec, "separate", name, where, parts))
    # Last: without it the directory is no model, should anything have gone wrong. The dtype is what `auto` will load.
    (output / CONFIG).write_text(json.dumps(config | {"dtype": name}, indent=2) + "\n", encoding="utf-8")


def _companions(model: Path) -> list[Path]:
    """The files that are copied as they are."""
    found = {file for pattern in COPIED for file in model.glob(pattern) if file.is_file()}
    return sorted(found - {model / CONFIG, model / INDEX})


def _check_empty(output: Path, written: set[str]) -> None:
    """ValueError when there is anything at `output`, in which `written` are the names of what would be copied."""
    found = {path.name for path in output.iterdir()} if output.is_dir() else set()
    if not found and (output.is_dir() or not output.exists()):
        return
    message = f"{output} is not an empty directory: give another, nothing is overwritten"
    # Our own names and no config.json. orbax writes into a directory whose name begins with the tree's.
    if found and all(name in written or name.startswith(orbax_tree.TREE) for name in found):
        message += ", or delete it if a conversion was interrupted: it holds nothing else"
    raise ValueError(message)
