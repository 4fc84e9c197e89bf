"""Stores the parameters of a model as an orbax checkpoint, whose arrays are split on disk and restored onto any mesh.

The shapes are those of a model on one device, so they depend on no mesh. Each layer's arrays are stored apart, so a
restore has one array of one layer on the host, or a batch of small ones, and not the stack of all layers.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.params import Params, declaration, declare, declare_layer
from jaxvllm.models.shards import Parts, ShardingOf
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.tiling import Box, spread_boxes
from pallas_kernels.extras import install_command
from sharding.placement import place

# The directory of the tree, beside config.json.
TREE = "orbax"
# The bytes that a device reads at once: small, so that it reads little of other devices' shards, but enough for a disk.
CHUNK_BYTES = 16 * 2**20
# The bytes that are read together. A read costs 8 ms (16 in a tree of 640 arrays), however small the arrays are.
BATCH_BYTES = 256 * 2**20
DTYPES = ("bfloat16", "float16", "float32")


def stored_sharding(mesh: Mesh) -> ShardingOf:
    """Returns how stored arrays are split: as in the model where that divides, else along the hidden size or not."""
    sharding = place(mesh)

    def sharding_of(decl: ParamDecl) -> NamedSharding:
        # The table of axes never splits the hidden size, so the name of an axis that it splits stands in.
        along_hidden = tuple("heads" if axis == "embed" else None for axis in decl.axes)
        for axes in (decl.axes, along_hidden):
            if _divides(sharding(axes), decl.shape):
                return sharding(axes)
        return sharding((None,) * len(decl.shape))

    return sharding_of


def save(directory: Path, params: Params) -> None:
    """Writes `params`, a `separate` layout that is not spread, into `directory`, which must not exist yet."""
    ocp = _orbax()
    arrays = {name: array for name, array in params.items() if name != "layers"}
    for layer, held in enumerate(params["layers"]):
        arrays |= {_key(name, layer): array for name, array in held.items()}
    how = {key: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for key in arrays}
    # Weights hardly compress, and every load would spend time on the decompression.
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as checkpointer:
        checkpointer.save(directory.absolute(), args=ocp.args.PyTreeSave(arrays, save_args=how))


@dataclass(frozen=True)
class OrbaxTree:
    """A stored tree that fits `spec`."""

    directory: Path
    spec: ModelSpec

    @classmethod
    def open(cls, directory: Path, spec: ModelSpec) -> Self:
        """Opens the tree. Raises ValueError naming an array that is missing, unexpected, of another shape or dtype."""
        ocp = _orbax()
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            metadata = checkpointer.metadata(directory.absolute()).item_metadata
        if metadata is None:  # orbax has logged why
            raise ValueError(f"{directory} is not a complete orbax tree: convert the model again")
        found = metadata.tree
        expected = _declared(spec)
        for key, decl in expected.items():
            shape, dtypes = decl.shape, DTYPES if decl.dtype is None else (decl.dtype,)
            if key not in found:
                raise ValueError(
                    f"{directory} lacks the array {key}, which should have shape {shape}: convert the model again"
                )
            if tuple(found[key].shape) != shape:
                raise ValueError(
                    f"{directory}: array {key} has shape {tuple(found[key].shape)}, and the config makes it {shape}: "
                    "convert the model again"
                )
            if str(jnp.dtype(found[key].dtype)) not in dtypes:
                raise ValueError(
                    f"{directory}: array {key} has dtype {found[key].dtype}: supported are {', '.join(dtypes)}"
                )
        if unexpected := sorted(set(found) - set(expected)):
            raise ValueError(f"{directory}: unexpected array {unexpected[0]}: the model of this config has none")
        return cls(directory, spec)

    def restore(self, mesh: Mesh, dtype: DTypeLike, end: int) -> Parts:
        """Reads the model's arrays in `dtype`, spread over `mesh`. The devices copy heads and fill them up with zeros.

        Small arrays of one name are read for several layers at once, none of them after layer `end`, and stay on the
        devices until their turn.
        """
        sharding, stored_on = place(mesh), stored_sharding(mesh)

        @cache
        def spreading(stored: ParamDecl, whole: ParamDecl) -> Any:
            spread_out = partial(_spread, decl=stored, whole=whole)
            return jax.jit(spread_out, out_shardings=sharding(whole.axes))

        read: dict[str, jax.Array] = {}

        def parts(name: str, whole: ParamDecl, layer: int | None) -> Iterator[jax.Array]:
            if whole.storage == "scales":
                yield jax.device_put(np.ones(whole.shape, whole.dtype), sharding(whole.axes))
                return
            decl, key = declaration(self.spec, name, layer), _key(name, layer)
            same, wanted = decl.shape == whole.shape, decl.dtype_in(dtype)
            if key not in read:
                keys = self._batch(name, decl, layer, end, wanted.itemsize)
                read.update(self._arrays(keys, sharding(whole.axes) if same else stored_on(decl), wanted))
            yield read.pop(key) if same else spreading(decl, whole)(read.pop(key))

        return parts

    def _batch(self, name: str, decl: ParamDecl, layer: int | None, end: int, itemsize: int) -> list[str]:
        """Returns the keys to read together: this array, and the equally declared ones of later layers before `end`."""
        if layer is None:
            return [name]
        alike = (i for i in range(layer, end) if declare_layer(self.spec, i).get(name) == decl)
        return [_key(name, i) for i in islice(alike, max(1, BATCH_BYTES // (math.prod(decl.shape) * itemsize)))]

    def _arrays(self, keys: Sequence[str], sharding: NamedSharding, dtype: np.dtype) -> dict[str, jax.Array]:
        ocp = _orbax()
        how = {key: ocp.ArrayRestoreArgs(sharding=sharding, dtype=dtype) for key in keys}
        args = ocp.args.PyTreeRestore(dict.fromkeys(keys, 0), restore_args=how, partial_restore=True)
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                arrays: dict[str, jax.Array] = checkpointer.restore(self.directory.absolute(), args=args)
        # A damaged tree may fail in many ways, because it contains several file formats.
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            which = f"array {keys[0]}" + (f", or one up to {keys[-1]}," if len(keys) > 1 else "")
            raise ValueError(f"{self.directory}: {which} cannot be read ({reason}): convert the model again") from error
        return arrays


def _spread(stored: jax.Array, decl: ParamDecl, whole: ParamDecl) -> jax.Array:
    array = jnp.zeros(whole.shape, stored.dtype)
    corner = (0,) * stored.ndim
    for box, origin in spread_boxes(decl, whole):
        array = array.at[box.index(corner)].set(stored[Box(origin, box.shape).index(corner)])
    return array


def _declared(spec: ModelSpec) -> Mapping[str, ParamDecl]:
    """Returns the declarations of the arrays of a tree, which has no scales of keys and values."""
    kept = {_key(name, i): decl for i in range(spec.num_layers) for name, decl in declare_layer(spec, i).items()}
    return declare(spec) | {key: decl for key, decl in kept.items() if decl.storage != "scales"}


def _key(name: str, layer: int | None) -> str:
    return name if layer is None else f"layers.{layer}.{name}"


def _divides(sharding: NamedSharding, shape: tuple[int, ...]) -> bool:
    try:
        sharding.shard_shape(shape)
    except ValueError:
        return False
    return True


def _orbax() -> Any:
    """Imports the package only when a tree is used, because the import takes more than a second."""
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise NotImplementedError(
            f"orbax trees need a package that is not here: {install_command('orbax')}; or load the safetensors"
        ) from error
    return orbax.checkpoint
