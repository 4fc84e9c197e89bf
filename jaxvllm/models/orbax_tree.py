"""The parameters of a model as an orbax checkpoint: arrays that are split on disk, and restored onto any mesh.

What is stored is the model as one device has it, each layer's arrays apart: its shapes depend on no mesh, and a
restore has one array of one layer on the host, or a batch of small ones, not the stack of all.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from jaxvllm.models.params import ParamDecl, Params, declare, declare_layer
from jaxvllm.models.placing import Parts, Where
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.spread import Spread
from jaxvllm.models.spread_weights import boxes
from jaxvllm.models.tiling import Box
from sharding.placement import place

# The directory of the tree, beside config.json.
TREE = "orbax"
# What a device reads at once: little of other devices' shards, and enough for a disk.
CHUNK_BYTES = 16 * 2**20
# What is read together. A read costs 8 ms, and 16 in a tree of 640 arrays, however small the arrays are.
BATCH_BYTES = 256 * 2**20
DTYPES = ("bfloat16", "float16", "float32")


def stored_where(mesh: Mesh) -> Where:
    """How stored arrays are split: as the model's are where that divides, else along the hidden size, else not."""
    sharding = place(mesh)

    def where(decl: ParamDecl) -> NamedSharding:
        # The table splits no hidden size: let it go where heads go.
        along_hidden = tuple("heads" if axis == "embed" else None for axis in decl.axes)
        for axes in (decl.axes, along_hidden):
            if _divides(sharding(axes), decl.shape):
                return sharding(axes)
        return sharding((None,) * len(decl.shape))

    return where


def save(directory: Path, params: Params) -> None:
    """Writes `params`, a `separate` layout that is not spread, into `directory`, which must not exist yet."""
    ocp = _orbax()
    arrays = {name: array for name, array in params.items() if name != "layers"}
    for layer, held in enumerate(params["layers"]):
        arrays |= {_key(name, layer): array for name, array in held.items()}
    how = {key: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for key in arrays}
    # Random bits do not compress, and every load would pay for the attempt.
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as checkpointer:
        checkpointer.save(directory.absolute(), args=ocp.args.PyTreeSave(arrays, save_args=how))


@dataclass(frozen=True)
class OrbaxTree:
    """A stored tree that fits `spec`."""

    directory: Path
    spec: ModelSpec

    @classmethod
    def open(cls, directory: Path, spec: ModelSpec) -> Self:
        """ValueError names what is missing, unexpected, or of another shape or dtype."""
        ocp = _orbax()
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            metadata = checkpointer.metadata(directory.absolute()).item_metadata
        if metadata is None:  # orbax has logged why
            raise ValueError(f"{directory} is not a complete orbax tree: convert the model again")
        found = metadata.tree
        expected = _shapes(spec)
        for key, shape in expected.items():
            if key not in found:
                raise ValueError(f"{directory} lacks the array {key}, which should have shape {shape}")
            if tuple(found[key].shape) != shape:
                raise ValueError(
                    f"{directory}: array {key} has shape {tuple(found[key].shape)}, and the config makes it {shape}"
                )
            if str(jnp.dtype(found[key].dtype)) not in DTYPES:
                raise ValueError(
                    f"{directory}: array {key} has dtype {found[key].dtype}: supported are {', '.join(DTYPES)}"
                )
        if unexpected := sorted(set(found) - set(expected)):
            raise ValueError(f"{directory}: unexpected array {unexpected[0]}: the model of this config has none")
        return cls(directory, spec)

    def restore(self, mesh: Mesh, dtype: DTypeLike) -> Parts:
        """The model's arrays, in `dtype` and spread over `mesh`; heads are copied and filled up on the devices.

        Small arrays of one name are read for several layers at once, and wait on the devices for their turn.
        """
        spread = Spread(self.spec, mesh.size)
        decls = declare(self.spec) | declare_layer(self.spec)
        sharding, stored = place(mesh), stored_where(mesh)

        @cache
        def spreading(name: str, whole: ParamDecl) -> Any:
            spread_out = partial(_spread, name=name, decl=decls[name], whole=whole, spread=spread)
            return jax.jit(spread_out, out_shardings=sharding(whole.axes))

        read: dict[str, jax.Array] = {}

        def parts(name: str, whole: ParamDecl, layer: int | None) -> Iterator[jax.Array]:
            decl, key = decls[name], _key(name, layer)
            same = decl.shape == whole.shape
            if key not in read:
                keys = self._batch(name, layer, math.prod(decl.shape) * jnp.dtype(dtype).itemsize)
                read.update(self._arrays(keys, sharding(whole.axes) if same else stored(decl), dtype))
            yield read.pop(key) if same else spreading(name, whole)(read.pop(key))

        return parts

    def _batch(self, name: str, layer: int | None, size: int) -> list[str]:
        """The keys to read together: this array, of `size` bytes, and the same of the layers behind it."""
        if layer is None:
            return [name]
        end = min(self.spec.num_layers, layer + max(1, BATCH_BYTES // size))
        return [_key(name, i) for i in range(layer, end)]

    def _arrays(self, keys: Sequence[str], sharding: NamedSharding, dtype: DTypeLike) -> dict[str, jax.Array]:
        ocp = _orbax()
        how = {key: ocp.ArrayRestoreArgs(sharding=sharding, dtype=jnp.dtype(dtype)) for key in keys}
        args = ocp.args.PyTreeRestore(dict.fromkeys(keys, 0), restore_args=how, partial_restore=True)
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                arrays: dict[str, jax.Array] = checkpointer.restore(self.directory.absolute(), args=args)
        # A damaged tree fails in as many ways as there are formats in it.
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            which = f"array {keys[0]}" + (f", or one up to {keys[-1]}," if len(keys) > 1 else "")
            raise ValueError(f"{self.directory}: {which} cannot be read ({reason}): convert the model again") from error
        return arrays


def _spread(stored: jax.Array, name: str, decl: ParamDecl, whole: ParamDecl, spread: Spread) -> jax.Array:
    array = jnp.zeros(whole.shape, stored.dtype)
    corner = (0,) * stored.ndim
    for box, origin in boxes(name, decl, spread):
        array = array.at[box.index(corner)].set(stored[Box(origin, box.shape).index(corner)])
    return array


def _shapes(spec: ModelSpec) -> Mapping[str, tuple[int, ...]]:
    outer = {name: decl.shape for name, decl in declare(spec).items()}
    layer = declare_layer(spec).items()
    return outer | {_key(name, i): decl.shape for i in range(spec.num_layers) for name, decl in layer}


def _key(name: str, layer: int | None) -> str:
    return name if layer is None else f"layers.{layer}.{name}"


def _divides(sharding: NamedSharding, shape: tuple[int, ...]) -> bool:
    try:
        sharding.shard_shape(shape)
    except ValueError:
        return False
    return True


def _orbax() -> Any:
    """The package, imported when a tree is: that costs more than a second."""
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise NotImplementedError(
            "orbax trees need a package that is not here: pip install jaxvllm[orbax], or load the safetensors"
        ) from error
    return orbax.checkpoint
