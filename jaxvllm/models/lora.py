"""`LayerLora`: what the adapters of low rank of a layer's matrices are on the devices, and how they are used.

An adapter adds (x A^T) B^T to the product of a matrix with the tokens x that have this adapter (LoRA, arXiv
2106.09685). The matrix itself stays in any form, so quantized bases need nothing of their own. Where one matrix of ours
is several of a checkpoint, each of these has its part of the rank: A has their rows one after the other, and B is zero
where it would mix them, or has no such numbers. Smaller ranks are filled up with zeros, and so are matrices that an
adapter leaves alone, which is why an adapter comes and goes without anything being compiled.

DoRA (arXiv 2402.09353) gives each row of the changed matrix a length of its own, its magnitude m. So the sum is
multiplied by m / norm, and the norm, that of the row of W + B A, is computed on the devices when the adapter comes
(`models.dora`). B is multiplied by it there. The step multiplies the product of W, by one and what is kept of each
output: m / norm - 1 in float32, or 0, which leaves all bits as they are.

There are two ways. One by one: what is read are the adapters that a token of the step has, and no others. CPUs take it
with a kernel (`pallas_kernels.low_rank`), so that the bits of a token depend neither on the slot nor on other tokens.
Elsewhere each adapter multiplies all tokens, one after the other, and what is not its own is set to zero in between.
Masked: all tokens are multiplied by the adapters of all slots at once. Accelerators take it for up to `MOST_MASKED`
slots: 16 cost v6e 21k cycles a matrix where gathering each token's own matrices takes 242k.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.ops import Adapted
from jaxvllm.models.token_adapters import TokenAdapters

# The names of the arrays begin so, and end with that of the matrix.
DOWN, UP, RATIO = "lora_a_", "lora_b_", "lora_ratio_"
# The place of these arrays in the tree of parameters. There are those of the layers, in the same layout as the layers,
# and those of the embedding and of the LM head.
LORA = "lora"
LAYERS, OUTSIDE = "layers", "outside"
# The most slots whose adapters accelerators multiply all at once. Memory that is read grows with them, used or not.
MOST_MASKED = 16
# The ranks of a matrix's parts together are a multiple of this: the kernels for CPUs compute so many at once.
_LANES = 16


@dataclass(frozen=True)
class LayerLora:
    """The room of a layer for adapters: `num_slots` of them, of up to `rank` in each part of a matrix."""

    num_slots: int
    rank: int
    parts: tuple[tuple[str, int], ...]  # the matrices that adapters may change, and how many parts each has
    one_by_one: bool  # which of the two ways

    def width(self, count: int) -> int:
        """Returns the rank of a matrix with so many parts."""
        return -(-count * self.rank // _LANES) * _LANES

    def up_width(self, count: int) -> int:
        """Returns how many numbers each row of B has, of a matrix with so many parts.

        One by one, these are the ranks of its own part, and the number of this part. What would be zero is not stored,
        because few tokens are bound by what is read.
        """
        return self.rank + 1 if self.one_by_one else self.width(count)

    def declare_one(self, matrices: Mapping[str, ParamDecl]) -> dict[str, ParamDecl]:
        """Returns the arrays of one adapter as it is read, of a layer with these matrices.

        They are A [W, in], B [.., width], for which see `up_width`, and what an output is multiplied by beside one,
        f32[..].
        """
        decls = {}
        for name, count in self.parts:
            decl, width, up_width = matrices[name], self.width(count), self.up_width(count)
            *rows, size = decl.shape
            *axes, contracted = decl.axes
            of_columns = decl.heads if contracted == "heads" else None
            of_rows = decl.heads if "kv_heads" in axes else None
            own = partial(ParamDecl, init="zeros", dtype=decl.dtype)
            decls[DOWN + name] = own((width, size), (None, contracted), heads=of_columns)
            decls[UP + name] = own((*rows, up_width), (*axes, None), heads=of_rows)
            decls[RATIO + name] = ParamDecl(tuple(rows), tuple(axes), "zeros", dtype="float32", heads=of_rows)
        return decls

    def declare(self, matrices: Mapping[str, ParamDecl]) -> dict[str, ParamDecl]:
        """Returns the arrays of all slots."""
        return {name: self._in_slots(name, decl) for name, decl in self.declare_one(matrices).items()}

    def _in_slots(self, name: str, one: ParamDecl) -> ParamDecl:
        if self.one_by_one or name.startswith(RATIO):
            shape, axes = self._order(name, one.shape), self._order(name, one.axes)
            return replace(one, shape=(self.num_slots, *shape), axes=(None, *axes), storage="experts", heads=None)
        shape = list(one.shape)
        shape[self.slot_axis(name, is_stacked=False)] *= self.num_slots
        return replace(one, shape=tuple(shape), storage="matrix", heads=None)

    def _order[Item](self, name: str, of_axes: Sequence[Item]) -> list[Item]:
        """Returns what the axes of an adapter's array have, in the order of the devices.

        One by one, the rank comes first, as the kernel for CPUs reads B.
        """
        return [of_axes[-1], *of_axes[:-1]] if self.one_by_one and name.startswith(UP) else [*of_axes]

    def on_devices(self, name: str, array: np.ndarray) -> np.ndarray:
        """Returns an adapter's array as it was declared (`declare_one`), as it is in its slot."""
        return array.transpose(self._order(name, range(array.ndim)))

    def slot_axis(self, name: str, is_stacked: bool) -> int:
        """Returns the axis of slots in the arrays of that name, which may be stacks of those of several layers."""
        if self.one_by_one or name.startswith(RATIO):
            return 1 if is_stacked else 0
        return -2 if name.startswith(DOWN) else -1

    def bound(self, weights: Mapping[str, Any], tokens: TokenAdapters) -> dict[str, Any]:
        """Returns the arrays of a layer whose matrices add what the adapters of `tokens` add."""
        return {**weights, **{name: self.adapted(weights, name, tokens) for name, _ in self.parts}}

    def adapted(self, weights: Mapping[str, Any], name: str, tokens: TokenAdapters) -> Adapted:
        """Returns one matrix of a layer, whose products add what the adapters of `tokens` add."""
        down, up, ratio = (weights[kind + name] for kind in (DOWN, UP, RATIO))
        return Adapted(weights[name], down, up, ratio, tokens, self.one_by_one)


def without_adapters(params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters of a model without the arrays of adapters.

    A program that does not read these hundred arrays is not called with them, either: that took 0.3 ms of each step of
    a narrow model (AMD EPYC).
    """
    return {name: value for name, value in params.items() if name != LORA}


def layers_with_lora(params: Mapping[str, Any]) -> Any:
    """Returns the arrays of all layers, with those of adapters where there are any."""
    layers = params["layers"]
    if LORA not in params:
        return layers
    own = params[LORA][LAYERS]
    if isinstance(layers, dict):
        return layers | own
    return [mine | more for mine, more in zip(layers, own, strict=True)]


def filled(slots: jax.Array, one: jax.Array, number: jax.Array, axis: int) -> jax.Array:
    """Returns the array of all slots with that of one adapter in slot `number`, i32, counted from 1."""
    size = one.shape[axis]
    return jax.lax.dynamic_update_slice_in_dim(slots, one, (number - 1) * size, axis)
