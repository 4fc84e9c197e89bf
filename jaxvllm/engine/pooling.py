"""Reads how a checkpoint makes vectors of prompts: its config.json, and the files of sentence-transformers there."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxvllm.core.pooler import Pooler, PoolingType
from jaxvllm.core.pooler_config import PoolerConfig
from jaxvllm.models.spec import ModelSpec

# The names that sentence-transformers has for ways of pooling (sentence_transformer/modules/pooling.py of 6.2).
_MODES: Mapping[str, PoolingType] = {"lasttoken": "LAST", "mean": "MEAN"}
_LEGACY = {"pooling_mode_lasttoken": "lasttoken", "pooling_mode_mean_tokens": "mean"}


def read_pooler(config: PoolerConfig, hf_config: Mapping[str, Any], spec: ModelSpec, directory: Path) -> Pooler:
    """Returns the pooling of an engine. What `config` leaves open is the checkpoint's, or else the last token.

    Raises ValueError for a modules.json whose pooling is not supported and that `config` does not replace.
    """
    kind, normalizes = config.kind, config.use_activation
    modules = directory / "modules.json"
    if kind is None and modules.exists():
        kind, own = _of_modules(modules)
        normalizes = own if normalizes is None else normalizes
    matryoshka = hf_config.get("matryoshka_dimensions") or bool(hf_config.get("is_matryoshka"))
    return Pooler(
        kind or "LAST",
        spec.hidden_size,
        True if normalizes is None else normalizes,
        config.dimensions,
        matryoshka if isinstance(matryoshka, bool) else tuple(matryoshka),
    )


def _of_modules(path: Path) -> tuple[PoolingType, bool]:
    """Returns the pooling that modules.json lists, and whether vectors get length 1."""
    kinds = [(str(module["type"]).rpartition(".")[2], module["path"]) for module in json.loads(path.read_text("utf-8"))]
    others = [kind for kind, _ in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    found = [directory for kind, directory in kinds if kind == "Pooling"]
    if others or len(found) != 1:
        raise ValueError(
            f"{path} has {', '.join(kind for kind, _ in kinds)}: supported are Transformer, one Pooling and Normalize. "
            'Give pooler_config, such as {"pooling_type": "LAST"}, and it is not read'
        )
    pooling = json.loads((path.parent / found[0] / "config.json").read_text("utf-8"))
    mode = pooling.get("pooling_mode")
    if mode is None:
        chosen = [name for name, value in pooling.items() if name.startswith("pooling_mode_") and value is True]
        mode = [_LEGACY.get(name, name) for name in chosen] or "mean"
    modes = [mode] if isinstance(mode, str) else list(mode)
    if len(modes) != 1 or modes[0] not in _MODES:
        raise ValueError(
            f"{path.parent / found[0] / 'config.json'} has the pooling {', '.join(map(str, modes))}: supported are "
            'lasttoken and mean. Give pooler_config, such as {"pooling_type": "LAST"}, and it is not read'
        )
    return _MODES[modes[0]], any(kind == "Normalize" for kind, _ in kinds)
