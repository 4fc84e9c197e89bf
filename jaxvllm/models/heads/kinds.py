"""The kind of draft that a directory holds: a whole model, or which head. Its config and its tensors' names tell."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxvllm.models.orbax_tree import TREE
from jaxvllm.models.safetensors_files import WeightFiles, open_weights

SPECULATORS = "speculators_model_type"  # in the config of a head in the format of speculators
MEDUSA_FILE = "medusa_lm_head.safetensors"  # of the authors of Medusa, who have a pickle of the same name
_NAMES: Mapping[str, str] = {
    "draft_model": "a whole model",
    "eagle": "an EAGLE head",
    "eagle3": "an EAGLE-3 head",
    "medusa": "Medusa heads",
}
# The first pattern that the name of a tensor has tells the kind.
_TENSORS: tuple[tuple[str, str], ...] = (
    ("medusa", r"(medusa_heads\.)?\d+\.\d+\.linear\.weight|blocks\.\d+\.layers\.\d+\.weight"),
    ("eagle3", r"(midlayer|layers\.\d+)\.hidden_norm\.weight|d2t"),
    ("eagle", r"fc\.weight"),
    ("draft_model", r"(.*\.)?embed_tokens\.weight"),
)


def method_of(name: str, config: Mapping[str, Any]) -> str:
    """Returns the method of a draft by its config.json, and by the `name` of its directory, as vLLM finds it.

    What is no head is a model.
    """
    told = " ".join(map(str, [*(config.get("architectures") or ()), config.get("model_type")])).lower()
    name = name.lower()
    if SPECULATORS in config or "eagle3" in told or "eagle3" in name:
        return "eagle3"
    if "eagle" in told or "eagle-" in name:
        return "eagle"
    return "medusa" if "medusa" in told or "medusa_num_heads" in config else "draft_model"


def open_draft(directory: Path) -> WeightFiles:
    """Opens the weights of a draft. Raises ValueError as `open_weights` does, and says how to convert a pickle."""
    pickle = directory / Path(MEDUSA_FILE).with_suffix(".pt")
    if pickle.is_file() and not any(directory.glob("*.safetensors")):
        raise ValueError(
            f"{directory} has its heads in {pickle.name}, a pickle, which can run code and is never opened: convert "
            'it. With torch and safetensors installed, run this there: python -c "import torch, safetensors.torch; '
            f"safetensors.torch.save_file(torch.load('{pickle.name}', 'cpu', weights_only=True), '{MEDUSA_FILE}')\""
        )
    return open_weights(directory, MEDUSA_FILE)


def check_kind(method: str, directory: Path, config: Mapping[str, Any]) -> None:
    """Raises ValueError if `directory` holds something else than `method` needs, and its tensors say what."""
    if (of_speculators := config.get(SPECULATORS)) not in (None, "eagle3"):
        raise ValueError(f"{directory} has {SPECULATORS} {of_speculators!r}: of these, only eagle3 is supported")
    found = _kind(directory)
    if found is not None and found != method:
        raise ValueError(
            f"method {method} needs {_NAMES[method]}, and {directory} holds {_NAMES[found]}: give another directory, "
            f'or "method": "{found}"'
        )


def _kind(directory: Path) -> str | None:
    if (directory / TREE).is_dir():
        return "draft_model"
    names = open_draft(directory).names
    return next((kind for kind, pattern in _TENSORS if any(re.fullmatch(pattern, name) for name in names)), None)
