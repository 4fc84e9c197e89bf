"""`AdapterReader`: makes adapters of files that PEFT has saved, and of trees of arrays as the engine has them."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxvllm.core.errors import ParameterError
from jaxvllm.core.lora import LoraAdapter
from jaxvllm.engine.new_weights import checked_tree
from jaxvllm.models.block import Block
from jaxvllm.models.expert_lora import EXPERT_UP
from jaxvllm.models.lora import LAYERS, OUTSIDE, RATIO, UP
from jaxvllm.models.lora_arrays import LoraArrays
from jaxvllm.models.peft import LowRank, PeftAdapter
from jaxvllm.models.saved_tables import OWN, TABLES
from jaxvllm.runtime.adapter_fills import SlotAxes


@dataclass(frozen=True, eq=False)
class AdapterReader:
    """Reads adapters for one model, whose arrays `LoraArrays` makes. It keeps none of them."""

    arrays: LoraArrays
    tells_columns: bool  # whether the norms of the model's rows can be computed, which DoRA needs

    def read(self, directory: Path, name: str) -> LoraAdapter:
        """Reads the adapter of a directory. For errors see `PeftAdapter.read`."""
        of = self.arrays
        has_room = of.tables is not None
        found = PeftAdapter.read(directory, of.sizes, of.rank, of.dtype, of.outside, takes_tables=has_room)
        self._check_magnitudes(name, found.has_magnitudes)
        arrays = of.of_adapter(found.modules, found.tables)
        return LoraAdapter(name, found.digest, arrays, found.has_magnitudes, bool(found.tables))

    def of_tree(self, tree: Mapping[str, Any], name: str) -> LoraAdapter:
        """Returns the adapter of a tree like `LoraAdapter.arrays`. What only counts parts of matrices comes from here.

        Raises ValueError for arrays that are missing, unexpected, of another shape or dtype, or not finite.
        """
        try:
            arrays = self._checked(tree)
        except ValueError as error:
            raise ParameterError(f"the adapter {name!r}: {error}", "tensors") from error
        has_magnitudes = any(array.any() for key, array in _in_layers(arrays) if key.startswith(RATIO))
        self._check_magnitudes(name, has_magnitudes)
        digest = hashlib.sha256(b"arrays of an engine")
        for array in jax.tree.leaves(arrays):
            digest.update(f"\n{array.dtype} {array.shape}\n".encode() + array.tobytes())
        return LoraAdapter(name, digest.digest(), arrays, has_magnitudes, TABLES in arrays)

    def _checked(self, tree: Mapping[str, Any]) -> Any:
        """Returns arrays of our own for those of a tree. Raises ValueError for what is wrong with these."""
        like = self._empty()
        if tree.get(TABLES) and self.arrays.tables is not None:
            own = self.arrays.tables.like()
            like |= {TABLES: {name: own[name] for name in own if name in tree[TABLES]}}
        given = checked_tree(tree, like, like_what="llm.lora_weights(lora_request)")
        arrays = jax.tree.map(np.array, given)  # the caller may write to its own
        for path, array in jax.tree.leaves_with_path(arrays):
            if not np.isfinite(array.astype(np.float32)).all():
                raise ValueError(f"{jax.tree_util.keystr(path)} has numbers that are not finite")
        self._put_parts(arrays, like)
        for name, flag in arrays[OUTSIDE].items():
            if name.startswith(OWN):
                flag[...] = name.removeprefix(OWN) in arrays.get(TABLES, {})
        return arrays

    def _empty(self) -> Any:
        """Returns the arrays of an adapter that adds nothing, with the numbers of all parts."""
        # A module may have several names, and rows that two of them would fill are summed.
        modules = {(one.layer, one.matrix, one.part): (name, one) for name, one in self.arrays.modules.items()}
        zeros = {
            name: LowRank(np.zeros((1, module.in_size), np.float32), np.zeros((module.out_size, 1), np.float32))
            for name, module in modules.values()
            if module.layer is not None
            and not module.index
            and _has_parts(self.arrays.spec.layers[module.layer], module.matrix)
        }
        return self.arrays.of_adapter(zeros)

    def _put_parts(self, arrays: Any, like: Any) -> None:
        """Gives B the numbers of parts, which are its last row where adapters multiply one by one.

        PEFT has two forms of experts, whose parts are others. So the numbers of these are only checked.
        """
        axes = SlotAxes.of(self.arrays.spec)
        is_stacked = isinstance(arrays[LAYERS], dict)
        for (key, array), (_, own) in zip(_in_layers(arrays), _in_layers(like), strict=True):
            if key.startswith(UP) and axes.layers is not None and axes.layers.one_by_one:
                ranks = 1 + axes.layers.slot_axis(key, is_stacked)  # the axis after that of slots
                np.moveaxis(array, ranks, 0)[-1] = np.moveaxis(own, ranks, 0)[-1]
            if key.startswith(EXPERT_UP) and axes.experts is not None and axes.experts.room.one_by_one:
                numbers = np.moveaxis(array, 1 + axes.experts.slot_axis(key, is_stacked), 0)[-1]
                most = dict(axes.experts.room.parts)[key.removeprefix(EXPERT_UP)] - 1
                if not np.isin(numbers, range(most + 1)).all():
                    raise ValueError(
                        f"{key} must end with numbers of parts from 0 to {most}, as it did when it was read"
                    )

    def _check_magnitudes(self, name: str, has_magnitudes: bool) -> None:
        if has_magnitudes and not self.tells_columns:
            raise NotImplementedError(
                f"{name} is an adapter of DoRA, which needs the norms of the model's rows, and this checkpoint rounds "
                "tokens with scales that it stores: serve one in 16 bits, or in FP8 with dynamic scales"
            )


def _has_parts(layer: Block, matrix: str) -> bool:
    return layer.lora is not None and matrix in dict(layer.lora.parts)


def _in_layers(arrays: Any) -> list[tuple[str, np.ndarray]]:
    """Returns the arrays of an adapter's layers with their names, in one order for all adapters."""
    layers = arrays[LAYERS]
    return [
        (key, array)
        for layer in ([layers] if isinstance(layers, dict) else layers)
        for key, node in sorted(layer.items())
        for array in jax.tree.leaves(node)
    ]
