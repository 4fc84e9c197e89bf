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
from types import MappingProxyType
from typing import Any, Self

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxvllm.models.checkpoint import object_in
from jaxvllm.models.safetensors_files import WeightFile, WeightFiles

PEFT_CONFIG = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model.safetensors"
_MOST_CONFIG_BYTES = 1 << 20
_START = "base_model.model."
# The tensors of an adapted module, those of an embedding, and that of DoRA, which PEFT has saved under two names.
_DOWN, _UP, _MAGNITUDES = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
_OF_EMBEDDING = {"lora_embedding_A": _DOWN, "lora_embedding_B": _UP}
_RENAMED = {f"{_MAGNITUDES}.weight": _MAGNITUDES, **_OF_EMBEDDING}
_KINDS = "|".join(map(re.escape, (_DOWN, _UP, _MAGNITUDES, *_RENAMED)))
_TENSOR = re.compile(rf"{re.escape(_START)}(?P<module>.+)\.(?P<kind>{_KINDS})")
# PEFT wraps a module twice where two of its parameters are adapted. This is the end of the inner one's name.
_INNER = ".base_layer"
# The table that an adapter was trained beside. PEFT saves it with the adapter of an embedding or of an LM head.
_BASE = re.compile(rf"{re.escape(_START)}(?P<module>.+)\.base_layer\.weight")
_ANY_START = r".*\."  # PEFT writes this before the names of parameters into which it has joined modules
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.]+")
# A table that the adapter has whole, where `modules_to_save` names its module.
_SAVED = re.compile(rf"{re.escape(_START)}(?P<module>.+)\.weight")
# Rows of a table that are looked at together: all of them in float32 would be twice what they are in 16 bits.
_ROWS = 4096
# Ways to initialise an adapter that leave the matrices of the model as they are. Others subtract from these.
_INITS = (True, False, "gaussian", "eva", "orthogonal", "mica", "lora_ga")
# Keys of the config whose values would change what is computed, with those that do not.
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    "lora_bias": (False, None),
    "alora_invocation_tokens": (None,),
    "layer_replication": (None, []),
    "use_bdlora": (False, None),
    "use_qalora": (False, None),
    "trainable_token_indices": (None, [], {}),
    "fan_in_fan_out": (False, None),
    "ensure_weight_tying": (False, None),
    "arrow_config": (None,),
}


@dataclass(frozen=True, eq=False)
class LowRank:
    """The two matrices of an adapted module, whose product is added to its own. The scale is in the second.

    A parameter that has the matrices of all X experts has two of each expert. With DoRA the rows of the sum have
    magnitudes, which are their lengths.
    """

    down: np.ndarray  # A, f32[r, in] or f32[X, r, in]
    up: np.ndarray  # B, f32[out, r] or f32[X, out, r]
    magnitudes: np.ndarray | None = None  # f32[out], none of them 0

    @property
    def rank(self) -> int:
        return self.down.shape[-2]


@dataclass(frozen=True)
class ModuleSize:
    """The sizes of a module that may be adapted. An embedding counts as a linear module of the vocabulary's size."""

    in_size: int
    out_size: int
    is_of_experts: bool = False
    num_experts: int | None = None  # of a parameter that has the matrices of all experts
    problem: str | None = None  # why it may not be adapted after all


@dataclass(frozen=True)
class PeftConfig:
    """The ranks and scales that an adapter_config.json states."""

    rank: int
    alpha: float
    use_rslora: bool  # the scale is alpha / sqrt(rank), and not alpha / rank (arXiv 2312.03732)
    use_dora: bool  # rows have magnitudes (arXiv 2402.09353)
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    saved: tuple[str, ...]  # ends of the names of modules that it has whole

    @classmethod
    def of(cls, content: bytes, path: Path) -> Self:
        """Reads the content of the file that `path` names in errors.

        Raises ValueError for what is wrong, and NotImplementedError for what is not supported.
        """
        values = object_in(content, path)
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
                rank=_rank(values.get("r")),
                alpha=_number(values.get("lora_alpha")),
                use_rslora=_flag("use_rslora", values),
                use_dora=_flag("use_dora", values),
                rank_pattern={_end(key): _rank(value) for key, value in _of_type(dict, "rank_pattern", values).items()},
                alpha_pattern={
                    _end(key): _number(value) for key, value in _of_type(dict, "alpha_pattern", values).items()
                },
                saved=tuple(_end(key) for key in _of_type(list, "modules_to_save", values)),
            )
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def rank_of(self, module: str) -> int:
        """Returns the rank of the adapter of a module."""
        return _of_pattern(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Returns the factor of the product of its matrices."""
        rank = self.rank_of(module)
        return _of_pattern(self.alpha_pattern, module, self.alpha) / (math.sqrt(rank) if self.use_rslora else rank)


def _of_pattern[Value](pattern: Mapping[str, Value], module: str, usual: Value) -> Value:
    """Returns the value of the first key that is the module's name, or its end after a dot."""
    return next((value for key, value in pattern.items() if _ends_with(module, key)), usual)


def _ends_with(module: str, end: str) -> bool:
    return f".{module}".endswith(f".{end}")


def _rank(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"a rank (r, rank_pattern) must be a positive integer, not {repr(value)[:60]}")
    return value


def _number(value: Any) -> float:
    try:
        number = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"lora_alpha and those of alpha_pattern must be finite numbers, not {repr(value)[:60]}")
    return number


def _of_type[Value](kind: type[Value], key: str, values: Mapping[str, Any]) -> Value:
    """Returns what is stated under a key: an object or a list of JSON's, which is empty where there is none."""
    value = values.get(key) or kind()
    if not isinstance(value, kind):
        raise ValueError(f"{key} must be {'an object' if kind is dict else 'a list'}, not {repr(value)[:60]}")
    return value


def _flag(key: str, values: Mapping[str, Any]) -> bool:
    value = values.get(key) or False
    if type(value) is not bool:
        raise ValueError(f"{key} must be true or false, not {value!r}")
    return value


def _end(key: Any) -> str:
    """Returns the end of names that a key of a pattern means."""
    if isinstance(key, str):
        key = key.removeprefix(_ANY_START)
    if not isinstance(key, str) or not _PLAIN_NAME.fullmatch(key):
        raise ValueError(f"a pattern's key must be the end of a module's name, and no expression, not {key!r}")
    return key


@dataclass(frozen=True, eq=False)
class PeftAdapter:
    """An adapter as it was stored, checked against a model."""

    modules: Mapping[str, LowRank]
    tables: Mapping[str, np.ndarray]  # [V, E], of the embedding and of the LM head, those that it has whole
    has_magnitudes: bool
    digest: bytes  # of its config and of its weights

    @classmethod
    def read(
        cls,
        directory: Path,
        sizes: Mapping[str, ModuleSize],
        max_rank: int,
        dtype: DTypeLike = "float32",
        outside: Mapping[str, tuple[int, int]] = MappingProxyType({}),
        takes_tables: bool = False,
    ) -> Self:
        """Reads the adapter of a directory, for a model with modules of these `sizes`.

        The shapes [V, E] of the embedding and of the LM head are in `outside`, by their names. Tables that an adapter
        has in their place are refused unless there is room for them.
        Raises ValueError where files are missing, damaged, or made for another model, where a rank is above `max_rank`,
        or where a number is not finite in `dtype`: tokens of others are multiplied by it, too, and by zero. Raises
        NotImplementedError for adapters of kinds that are not supported.
        """
        for name in (PEFT_CONFIG, PEFT_WEIGHTS):
            if not (directory / name).is_file():
                pickled = sorted(path.name for kind in ("*.bin", "*.pt", "*.pth") for path in directory.glob(kind))
                found = f" It has {', '.join(pickled)}: such files can run code and are never opened." * bool(pickled)
                raise ValueError(f"{directory} has no {name}: it must be an adapter that PEFT has saved.{found}")
        stated, path = _config_in(directory / PEFT_CONFIG), directory / PEFT_WEIGHTS
        config = PeftConfig.of(stated, directory / PEFT_CONFIG)
        file = WeightFile.read(path)
        files = WeightFiles(directory, dict.fromkeys(file.tensors, PEFT_WEIGHTS), {PEFT_WEIGHTS: file})
        tensors, saved = _modules(files, path, config.use_dora, outside)
        _check_saved(config, path, saved, outside)
        parameters = _parameters(files, path, tensors, sizes)
        if unknown := sorted(tensors.keys() - sizes.keys()):
            raise ValueError(
                f"{path} adapts {unknown[0]}{f' and {len(unknown) - 1} more' if unknown[1:] else ''}, and this model's "
                f"modules that can be adapted end with {', '.join(sorted({name.rpartition('.')[2] for name in sizes}))}"
            )
        modules = {}
        for name, own in sorted((tensors | parameters).items()):
            rank, size = config.rank_of(name), sizes[name]
            if size.problem is not None:
                raise NotImplementedError(f"{path} adapts {name}: {size.problem}")
            if rank > max_rank:
                raise ValueError(f"{path}: {name} has rank {rank}, and max_lora_rank is {max_rank}: raise it")
            if size.num_experts is None:
                down = files.tensor(own[_DOWN], (rank, size.in_size)).astype(np.float32)
                up = files.tensor(own[_UP], (size.out_size, rank)).astype(np.float32)
            else:
                down, up = _of_experts(files, own, rank, size)
            with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is an error below
                up *= np.float32(config.scale_of(name))
            magnitudes = None
            if config.use_dora:
                if name in outside or size.is_of_experts:
                    raise NotImplementedError(
                        f"{path}: DoRA of {name} is not supported, only that of modules in layers that are no experts"
                    )
                magnitudes = files.tensor(own[_MAGNITUDES], (size.out_size,)).astype(np.float32)
                if not magnitudes.all():
                    raise ValueError(f"{path}: {_MAGNITUDES} of {name} has zeros, and lengths of rows are above zero")
            modules[name] = LowRank(down, up, magnitudes)
            for kind, array, kept in ((_DOWN, down, dtype), (_UP, up, dtype), (_MAGNITUDES, magnitudes, "float32")):
                with np.errstate(over="ignore"):
                    is_finite = array is None or np.isfinite(array.astype(kept).astype(np.float32)).all()
                if not is_finite:
                    raise ValueError(f"{path}: {kind} of {name} has numbers that are not finite in {kept}")
        tables = {}
        for name, tensor in sorted(saved.items()):
            if sizes[name].problem is not None:
                raise NotImplementedError(f"{path} replaces {name}: {sizes[name].problem}")
            if name in tensors:
                raise ValueError(f"{path} adapts {name} and has it whole as well (modules_to_save): use one way")
            if not takes_tables:
                raise ValueError(
                    f"{path} has {name} whole (modules_to_save), and there is no room for the tables of adapters: set "
                    "max_lora_heads to the number of such adapters that the devices are to have at once"
                )
            tables[name] = _table(files, path, tensor, outside[name], dtype)
        digest = hashlib.sha256(stated)
        for name, matrices in modules.items():
            digest.update(f"\n{name} {matrices.rank}\n".encode() + matrices.down.tobytes() + matrices.up.tobytes())
            if matrices.magnitudes is not None:
                digest.update(matrices.magnitudes.tobytes())
        for name, table in tables.items():
            digest.update(f"\n{name} whole\n".encode())
            digest.update(table.view(np.uint8))
        return cls(modules, tables, config.use_dora, digest.digest())


def _check_saved(config: PeftConfig, path: Path, saved: Mapping[str, str], outside: Mapping[str, Any]) -> None:
    """Checks that the file has each module that the config says to be there whole."""
    for end in config.saved:
        if not any(_ends_with(name, end) for name in outside):
            raise NotImplementedError(
                f"{path.parent / PEFT_CONFIG}: modules_to_save {end!r} is not supported, only the LM head and the "
                f"embedding are, which this model calls {', '.join(sorted(outside)) or 'otherwise'}: train the adapter "
                "without it"
            )
        if not any(_ends_with(name, end) for name in saved):
            raise ValueError(f"{path} lacks the weight of {end}, which modules_to_save names: add it there")


def _table(files: WeightFiles, path: Path, tensor: str, shape: tuple[int, int], dtype: DTypeLike) -> np.ndarray:
    """Returns a copy of a table in that dtype, in which all of its numbers are finite."""
    if (found := files.shape(tensor)) != shape:
        raise ValueError(
            f"{path}: {tensor} has shape {list(found)}, and the model's is {list(shape)}, so that the model was given "
            "another vocabulary before it was trained: serve that model"
        )
    with np.errstate(over="ignore"):
        table = files.tensor(tensor, shape).astype(dtype)
    parts = (table[first : first + _ROWS] for first in range(0, len(table), _ROWS))
    if not all(np.isfinite(part.astype(np.float32)).all() for part in parts):
        raise ValueError(f"{path}: {tensor} has numbers that are not finite in {jnp.dtype(dtype)}")
    return table


def _parameters(
    files: WeightFiles, path: Path, tensors: dict[str, dict[str, str]], sizes: Mapping[str, ModuleSize]
) -> dict[str, dict[str, str]]:
    """Takes those of `tensors` that adapt parameters of experts, and returns them by the names of the parameters.

    PEFT names them by the module that has the parameters. It wraps this once for each of them, the first one first, and
    calls the inner wrapper `base_layer`. Where there is one wrapper, only shapes tell whose it is.
    """
    of_modules: dict[str, list[str]] = {}
    for name, size in sizes.items():
        if size.num_experts is not None:
            of_modules.setdefault(name.rpartition(".")[0], []).append(name)
    found: dict[str, dict[str, str]] = {}
    for wrapper in sorted(tensors, key=len, reverse=True):
        module = wrapper.removesuffix(_INNER)
        if module not in of_modules:
            continue
        others = (name for name in tensors if name.startswith(f"{module}.") and name != module + _INNER)
        if (single := next(others, None)) is not None:
            raise ValueError(f"{path} adapts all experts of {module} together and {single} as well: use one way")
        own = tensors.pop(wrapper)
        shapes = down, up = files.shape(own[_DOWN]), files.shape(own[_UP])
        of_file = (*down[1:], *up[:1])
        left = [name for name in of_modules[module] if name not in found]
        orders = ({name: (sizes[name].in_size, sizes[name].out_size)[::step] for name in left} for step in (1, -1))
        fits = [name for order in orders for name in left if order[name] == of_file]
        if not fits or any(len(shape) != 2 for shape in shapes):
            wanted = " and ".join(
                f"{name.rpartition('.')[2]} A [.., {sizes[name].in_size}] and B [{sizes[name].out_size}, ..]"
                for name in left
            )
            raise ValueError(
                f"{path}: {own[_DOWN]} has shape {list(down)}, and {own[_UP]} {list(up)}. They fit no parameter of "
                f"{module} that is left, which are {wanted}"
            )
        found[fits[0]] = own
    return found


def _of_experts(
    files: WeightFiles, own: Mapping[str, str], rank: int, size: ModuleSize
) -> tuple[np.ndarray, np.ndarray]:
    """Returns A f32[X, r, in] and B f32[X, out, r] of all experts.

    PEFT has the ranks of an expert one after the other in A, and those of all experts in turn in B. It exchanges A and
    B for parameters [X, in, out], unless their module says that they are turned round.
    """
    count, sizes = size.num_experts, (size.in_size, size.out_size)
    assert count is not None, "a parameter has the matrices of experts"
    if files.shape(own[_DOWN])[1] != size.in_size:
        sizes = sizes[::-1]
    a = files.tensor(own[_DOWN], (rank * count, sizes[0])).astype(np.float32).reshape(count, rank, sizes[0])
    b = files.tensor(own[_UP], (sizes[1], rank * count)).astype(np.float32).reshape(sizes[1], rank, count)
    if sizes[0] == size.in_size:
        return a, b.transpose(2, 0, 1).copy()
    return b.transpose(2, 1, 0).copy(), a.transpose(0, 2, 1).copy()


def _config_in(path: Path) -> bytes:
    with path.open("rb") as file:
        content = file.read(_MOST_CONFIG_BYTES + 1)
    if len(content) > _MOST_CONFIG_BYTES:
        raise ValueError(f"{path} has more than {_MOST_CONFIG_BYTES} bytes: it is no adapter_config.json of PEFT")
    return content


def _modules(
    files: WeightFiles, path: Path, use_dora: bool, outside: Mapping[str, tuple[int, int]]
) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Returns the tensors of each module that a file adapts, by their kinds, and those of tables that it has whole.

    Each module has tensors of all kinds, and there are no others. The tables `outside` the layers, of these shapes, may
    be there as well: the model's beside an adapter of them, and others in their place.
    """
    kinds = (_DOWN, _UP, _MAGNITUDES) if use_dora else (_DOWN, _UP)
    found: dict[str, dict[str, str]] = {}
    saved: dict[str, str] = {}
    for name in files.names:
        if (base := _BASE.fullmatch(name)) is not None and base["module"] in outside:
            shape = files.shape(name)
            if sorted(shape) != sorted(outside[base["module"]]):
                raise ValueError(
                    f"{path}: {name} has shape {list(shape)}, so that the model was given another vocabulary before it "
                    "was trained: serve that model"
                )
            continue
        if (table := _SAVED.fullmatch(name)) is not None and table["module"] in outside:
            saved[table["module"]] = name
            continue
        match = _TENSOR.fullmatch(name)
        kind = "" if match is None else _RENAMED.get(match["kind"], match["kind"])
        if match is None or kind not in kinds:
            raise ValueError(
                f"{path}: unexpected tensor {name}: only lora_A and lora_B of linear modules and of embeddings are "
                f"supported, with use_dora {_MAGNITUDES}, and whole embeddings and LM heads without a bias"
            )
        found.setdefault(match["module"], {})[kind] = name
    if not found and not saved:
        raise ValueError(f"{path} has no tensor")
    for module, own in found.items():
        if missing := [kind for kind in kinds if kind not in own]:
            raise ValueError(f"{path}: {module} has only {', '.join(own)}, and needs {', '.join(missing)}, too")
    return found, saved
