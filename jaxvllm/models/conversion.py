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

# Configs, tokenizers in every format, chat templates.
COPIED = ("*.json", "*.jinja", "*.model", "*.txt", "LICENSE*")


def convert(model: Path, output: Path, *, dtype: str, mesh: Mesh) -> None:
    """Writes the model of directory `model` into `output`, split over the model axis of `mesh`, in `dtype`.

    `auto` is the dtype that the config states. The devices hold the whole model once, the host one array of it.
    ValueError when `output` has anything in it, or the model cannot be read.
    """
    config = read_config(model)
    spec = model_spec(config)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} is not an empty directory: give another, nothing is overwritten")
    if (model / orbax_tree.TREE).is_dir():
        raise ValueError(f"{model} is an orbax tree already: any mesh can load it")
    name = config_dtype(config) if dtype == "auto" else dtype
    where = orbax_tree.stored_where(mesh)
    weights = StoredWeights.open(model, find_family(config), spec)
    parts = read_shards(weights.fill, Spread(spec), "separate", name, where)
    orbax_tree.save(output / orbax_tree.TREE, place_all(spec, "separate", name, where, parts))
    for file in sorted({file for pattern in COPIED for file in model.glob(pattern)} - {model / INDEX}):
        if file.is_file():
            shutil.copyfile(file, output / file.name)
    # Last: without it the directory is no model, should anything have gone wrong. The dtype is what `auto` will load.
    (output / "config.json").write_text(json.dumps(config | {"dtype": name}, indent=2) + "\n", encoding="utf-8")
