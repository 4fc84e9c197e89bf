"""Reads an adapter in the format of Hugging Face PEFT: adapter_config.json and adapter_model.safetensors.

Nothing of it is executed, and nothing is ignored that would change the adapter's answers: what is not known here is an
error. The names in the file say what is adapted, not `target_modules`, in which PEFT tolerates modules that do not
exist.
"""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from jax.typing import DTypeLike

from jaxvllm.models.checkpoint import read_object
from jaxvllm.models.safetensors_files import WeightFile, WeightFiles

PEFT_CONFIG = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model.safetensors"
_MOST_CONFIG_BYTES = 1 << 20
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.]+")
# Ways to initialise an adapter that leave the matrices of the model as they are. Others subtract from these.
_INITS = (True, False, "gaussian", "eva", "orthogonal", "mica", "lora_ga")
# Keys of the config whose values would change what is computed, with those that do not.
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    "lora_bias": (False, None),
    "use_dora": (False, None),
    "alora_invocation_tokens": (None,),
    "layer_replication": (None, []),
    "use_bdlora": (False, None),
    "use_qalora": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "fan_in_fan_out": (False, None),
    "arrow_config": (None,),
}


@dataclass(frozen=True, eq=False)
class LowRank:
    """The two matrices of an adapted module, whose product is added to its own. The scale is in the second."""

    down: np.ndarray  # A, f32[r, in]
    up: np.ndarray  # B, f32[out, r]

    @property
    def rank(self) -> int:
        return len(self.down)


@dataclass(frozen=True)
class PeftConfig:
    """The ranks and scales that an adapter_config.json states."""

    rank: int
    alpha: float
    use_rslora: bool  # the scale is alpha / sqrt(rank), and not alpha / rank (arXiv 2312.03732)
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads the file. Raises ValueError for what is wrong, and NotImplementedError for what is not supported."""
        if path.stat().st_size > _MOST_CONFIG_BYTES:
            raise ValueError(f"{path} has more than {_MOST_CONFIG_BYTES} bytes: it is no adapter_config.json of PEFT")
        values = read_object(path)
        if values.get("peft_type") != "LORA":
            raise NotImplementedError(f"{path}: peft_type must be LORA, not {values.get('peft_type')!r}")
        for key, allowed in _REFUSED.items():
            value = values.get(key)
            if not any(value is one or (type(value) is type(one) and value == one) for one in allowed):
                raise NotImplementedError(f"{path}: {key} {value!r} is not supported: train the adapter without it")
        init = values.get("init_lora_weights", True)
        if isinstance(init, bool | str) is False or init not in _INITS:
            raise NotImplementedError(
                f"{path}: init_lora_weights {init!r} is not supported, because it changes the matrices of the model: "
                "convert the adapter to one that does not"
            )
        try:
            return cls(
                rank=_rank(values["r"]),
                alpha=_number(values["lora_alpha"]),
                use_rslora=_flag(values.get("use_rslora", False)),
                rank_pattern={_plain(key): _rank(value) for key, value in (values.get("rank_pattern") or {}).items()},
                alpha_pattern={
                    _plain(key): _number(value) for key, value in (values.get("alpha_pattern") or {}).items()
                },
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path} does not say the rank r and lora_alpha of an adapter: {error!r}") from error

    def rank_of(self, module: str) -> int:
        """Returns the rank of the adapter of a module."""
        return _of_pattern(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Returns the factor of the product of its matrices."""
        rank = self.rank_of(module)
        return _of_pattern(self.alpha_pattern, module, self.alpha) / (math.sqrt(rank) if self.use_rslora else rank)


def _of_pattern[Value](pattern: Mapping[str, Value], module: str, usual: Value) -> Value:
    """Returns the value of the first key that is the module's name, or its end after a dot."""
    return next((value for key, value in pattern.items() if f".{module}".endswith(f".{key}")), usual)


def _rank(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"a rank must be a positive integer, not {value!r}")
    return value


def _number(value: Any) -> float:
    try:
        number = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"an alpha must be a finite number, not {repr(value)[:60]}")
    return number


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"use_rslora must be true or false, not {value!r}")
    return value


def _plain(key: Any) -> str:
    if not isinstance(key, str) or not _PLAIN_NAME.fullmatch(key):
        raise ValueError(f"a pattern's key must be the end of a module's name, and no expression, not {key!r}")
    return key


@dataclass(frozen=True, eq=False)
class PeftAdapter:
    """An adapter as it was stored, checked against a model."""

    modules: Mapping[str, LowRank]
    digest: bytes  # of its config and of its weights

    @classmethod
    def read(
        cls, directory: Path, sizes: Mapping[str, tuple[int, int]], max_rank: int, dtype: DTypeLike = "float32"
    ) -> Self:
        """Reads the adapter of a directory, for a model with linear modules of these `sizes`, (in, out).

        Raises ValueError where files are missing, damaged, or made for another model, where a rank is above `max_rank`,
        or where a number is not finite in `dtype`: tokens of others are multiplied by it, too, and by zero. Raises
        NotImplementedError for adapters of kinds that are not supported.
        """
        for name in (PEFT_CONFIG, PEFT_WEIGHTS):
            if not (directory / name).is_file():
                pickled = sorted(path.name for kind in ("*.bin", "*.pt", "*.pth") for path in directory.glob(kind))
                found = f" It has {', '.join(pickled)}: such files can run code and are never opened." * bool(pickled)
                raise ValueError(f"{directory} has no {name}: it must be an adapter that PEFT has saved.{found}")
        config, path = PeftConfig.read(directory / PEFT_CONFIG), directory / PEFT_WEIGHTS
        file = WeightFile.open(path)
        files = WeightFiles(directory, dict.fromkeys(file.tensors, PEFT_WEIGHTS), {PEFT_WEIGHTS: file})
        names = _modules(files, path)
        if unknown := sorted(names - sizes.keys()):
            raise ValueError(
                f"{path} adapts {unknown[0]}{f' and {len(unknown) - 1} more' if unknown[1:] else ''}, and this model's "
                f"modules that can be adapted end with {', '.join(sorted({name.rpartition('.')[2] for name in sizes}))}"
            )
        modules = {}
        for name in sorted(names):
            rank, (in_size, out_size) = config.rank_of(name), sizes[name]
            if rank > max_rank:
                raise ValueError(f"{path}: {name} has rank {rank}, and max_lora_rank is {max_rank}: raise it")
            start = f"base_model.model.{name}.lora_"
            down = files.tensor(f"{start}A.weight", (rank, in_size)).astype(np.float32)
            up = files.tensor(f"{start}B.weight", (out_size, rank)).astype(np.float32) * np.float32(
                config.scale_of(name)
            )
            for side, matrix in (("A", down), ("B", up)):
                with np.errstate(over="ignore"):
                    is_finite = np.isfinite(matrix.astype(dtype).astype(np.float32)).all()
                if not is_finite:
                    raise ValueError(f"{path}: lora_{side} of {name} has numbers that are not finite in {dtype}")
            modules[name] = LowRank(down, up)
        digest = hashlib.sha256((directory / PEFT_CONFIG).read_bytes())
        for name, matrices in modules.items():
            digest.update(f"\n{name} {matrices.rank}\n".encode() + matrices.down.tobytes() + matrices.up.tobytes())
        return cls(modules, digest.digest())


def _modules(files: WeightFiles, path: Path) -> set[str]:
    """Returns the names of the modules that a file adapts. Each has both matrices, and there is nothing else."""
    sides: dict[str, set[str]] = {}
    for name in files.names:
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise ValueError(
                f"{path}: unexpected tensor {name}: only lora_A and lora_B of linear modules are supported"
            )
        sides.setdefault(match["module"], set()).add(match["side"])
    if not sides:
        raise ValueError(f"{path} has no tensor")
    for module, found in sides.items():
        if len(found) < 2:
            raise ValueError(f"{path}: {module} has only lora_{'B' if 'B' in found else 'A'}, and needs both")
    return set(sides)
