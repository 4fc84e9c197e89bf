"""`LoraModule`: what adapters may change in a model, by the names that checkpoints of its family have."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.families.family import Family
from jaxvllm.models.outer_lora import EMBED, HEAD
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import Source, outer_sources, whole

_ENDING = ".weight"
# The module of all experts, and its parameters in transformers.
_EXPERTS = "experts"
_PARAMETERS = {"experts_gate_up": "gate_up_proj", "experts_up": "up_proj", "experts_down": "down_proj"}
_RENAMED = ".block_sparse_moe.", ".mlp."
# The kernels for CPUs take no matrix with fewer rows, which gates of a few heads have.
_LEAST_ROWS = 4


@dataclass(frozen=True)
class LoraModule:
    """A linear module of a checkpoint, or its embedding, and the part of one of our matrices that it is.

    It may be one of experts, or a parameter that has the matrices of all of these.
    """

    layer: int | None  # None: outside the layers
    matrix: str
    part: int  # its number among the modules of the matrix
    in_size: int
    out_size: int
    sources: tuple[Source, ...]  # of the matrix, those that are rows of this module
    expert: int | None = None  # which one it is
    num_experts: int | None = None  # of a parameter

    @property
    def index(self) -> tuple[int | slice, ...]:
        """The place of its experts in an array whose first dimension is that of experts."""
        if self.num_experts is not None:
            return (slice(None),)
        return () if self.expert is None else (self.expert,)

    def put_rows(self, rows: np.ndarray, to: np.ndarray) -> None:
        """Puts what each row of the module has, [.., out, ..], where its rows are in that of the matrix, [.., ..]."""
        for source in self.sources:
            tail = rows.shape[len(source.shape) - 1 :]
            own = replace(source, shape=rows.shape, view=(*source.view[:-1], *tail), is_turned=False)
            box = tuple(slice(at, at + size) for at, size in zip(source.at[:-1], source.view[:-1], strict=True))
            to[box] += own.part_of(rows)


def lora_modules(spec: ModelSpec, family: Family) -> dict[str, LoraModule]:
    """Returns the modules that adapters may change, by the names that they have in checkpoints of the family."""
    found: dict[str, LoraModule] = {}
    for prefix in dict.fromkeys((*family.prefixes, "")):
        for number, layer in enumerate(spec.layers):
            sources = family.layer_sources(spec, number, family.names.layer_prefix(prefix, number))
            for matrix, decl in layer.matrices.items():
                found |= _modules_of(number, matrix, decl, sources.get(matrix, ()))
            for matrix, decl in layer.expert_matrices.items():
                found |= _modules_of_experts(number, matrix, decl, sources[matrix])
                parents = _expert_parents(family.names.layer_prefix(prefix, number), sources[matrix])
                found |= _expert_parameters(number, matrix, decl, sources[matrix], parents)
        found |= _outer_modules(spec, family, prefix)
    # transformers has given modules of experts a new name, and PEFT writes the name that it finds.
    return {name.replace(*_RENAMED): module for name, module in found.items()} | found


def _outer_modules(spec: ModelSpec, family: Family, prefix: str) -> dict[str, LoraModule]:
    """Returns the embedding and the LM head, which are two modules also where they share a table."""
    sources = outer_sources(replace(spec, tie_embeddings=False), prefix, family.names)
    found = {}
    for matrix in (EMBED, HEAD):
        [source, *others] = sources[matrix]
        if not others and source.name.endswith(_ENDING) and source.view == source.shape:
            out_size, size = source.shape
            if matrix == EMBED:
                out_size, size = size, out_size
                source = replace(source, view=(out_size, size), is_turned=True)
            found[source.name.removesuffix(_ENDING)] = LoraModule(None, matrix, 0, size, out_size, (source,))
    return found


def _modules_of(layer: int, matrix: str, decl: ParamDecl, sources: Sequence[Source]) -> dict[str, LoraModule]:
    """Returns the modules of a matrix, or none where it is something else than whole rows of such modules."""
    size = decl.shape[-1]
    are_rows = (
        source.name.endswith(_ENDING)
        and len(source.shape) == 2
        and isinstance(source.rows, slice)
        and source.view[-1] == size == source.shape[0 if source.is_turned else 1]
        for source in sources
    )
    if not sources or not all(are_rows) or decl.shape[-2] < _LEAST_ROWS:
        return {}
    modules = {}
    for part, name in enumerate(dict.fromkeys(source.name for source in sources)):
        own = tuple(source for source in sources if source.name == name)
        out_size = own[0].shape[1 if own[0].is_turned else 0]
        modules[name.removesuffix(_ENDING)] = LoraModule(layer, matrix, part, size, out_size, own)
    return modules


def _modules_of_experts(layer: int, matrix: str, decl: ParamDecl, sources: Sequence[Source]) -> dict[str, LoraModule]:
    """Returns the modules of experts that a checkpoint stores one by one, or none where it does not."""
    of_experts: dict[int, list[Source]] = {}
    for source in sources:
        if len(source.shape) != 2 or source.view[0] != 1:
            return {}
        of_experts.setdefault(source.at[0], []).append(source)
    found = {}
    for number, own in of_experts.items():
        for name, module in _modules_of(layer, matrix, decl, own).items():
            found[name] = replace(module, expert=number)
    return found


def _expert_parents(prefix: str, sources: Sequence[Source]) -> tuple[str, ...]:
    """Returns the names that the module of all experts may have, of a layer whose names begin with `prefix`."""
    before, named, _ = sources[0].name.partition(f".{_EXPERTS}.")
    if not named:
        before = ".".join(sources[0].name.removesuffix(_ENDING).split(".")[:-1])
    return tuple(dict.fromkeys((f"{prefix}mlp.{_EXPERTS}", f"{before}.{_EXPERTS}")))


def _expert_parameters(
    layer: int, matrix: str, decl: ParamDecl, sources: Sequence[Source], parents: Sequence[str]
) -> dict[str, LoraModule]:
    """Returns the parameters that have the matrices of all experts, as transformers has them in modules `parents`."""
    num_experts, *rows, size = decl.shape
    out_size = math.prod(rows)
    if not any(source.is_turned for source in sources):  # all rows in our order, whatever the checkpoint stores
        sources = whole(sources[0].name, (num_experts, out_size, size), decl.shape)
    module = LoraModule(layer, matrix, 0, size, out_size, tuple(sources), num_experts=num_experts)
    return {f"{parent}.{_PARAMETERS[matrix]}": module for parent in parents}
