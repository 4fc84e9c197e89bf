"""Computes one device's share of a model, in bytes of weights and pages, without any device."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.experts import replicas_of
from jaxvllm.models.forms import PLAIN_FORMS, Forms
from jaxvllm.models.layer_memory import LayerMemory
from jaxvllm.models.params import Layout, StackLayers, build, first_layer, most
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.spread import Spread
from pallas_kernels.backend import Backend
from pallas_kernels.ragged_paged_attention import AbstractPages, KVQuantization
from sharding.rules import DATA, MODEL, RULES


@dataclass(frozen=True)
class _DeclaredArrays:
    """The arrays with one declaration on a device: a single one, or one for each of several layers."""

    decl: ParamDecl
    is_of_layers: bool
    count: int  # that there is room for
    mean: float  # of the layers that a stage has; 1 outside the layers
    elements: int  # of each of them, on this device
    num_bytes: int  # of each

    @property
    def multiplied(self) -> int:
        """The weights of each by which a token is multiplied: not those of experts that it does not choose."""
        chosen, of = self.decl.chosen or (1, 1)
        return self.elements * self.decl.per_element * chosen // of


@dataclass(frozen=True)
class Share:
    """The share of `spread.spec` in `dtype` that each device has: of a stage's layers, and of all outside them.

    Stages may differ. A device has memory for as many layers of a kind as the stage has that has most of them. What
    devices read and compute is the mean over all stages.
    """

    spread: Spread
    dtype: np.dtype
    forms: Forms = PLAIN_FORMS  # in which the matrices are kept
    layout: Layout = "stacked"  # layers with arrays of their own have forms of their own

    @property
    def spec(self) -> ModelSpec:
        """The spec of all layers, of each of which the devices of its stage have this share."""
        return self.spread.shard

    @property
    def replicas(self) -> int:
        """The replicas that share the experts."""
        return replicas_of(self.spread.spec)

    @property
    def weight_bytes(self) -> int:
        return sum(one.count * one.num_bytes for one in self._arrays())

    @property
    def empty_bytes(self) -> float:
        """The bytes of `weight_bytes` for layers that only other stages have."""
        return sum((one.count - one.mean) * one.num_bytes for one in self._arrays())

    @property
    def bytes_read(self) -> float:
        """The bytes of weights that every step reads in full. Only a few rows of an untied embedding are read."""
        return sum(one.mean * one.num_bytes for one in self._arrays() if one.decl.storage != "table")

    @property
    def layer_bytes(self) -> float:
        """The bytes of weights that every microbatch reads: those of the layers."""
        return sum(one.mean * one.num_bytes for one in self._arrays() if one.is_of_layers)

    @property
    def expert_bytes(self) -> float:
        """The bytes of all experts, of which a step reads those that some token has chosen."""
        return sum(one.mean * one.num_bytes for one in self._arrays() if one.decl.chosen is not None)

    @property
    def chosen(self) -> float:
        """The part of the experts that a token chooses, in the first layer that has any."""
        chosen, of = next((one.decl.chosen for one in self._arrays() if one.decl.chosen is not None), (0, 1))
        return chosen / of

    @property
    def smallest_matrix_bytes(self) -> int:
        """The bytes of the smallest matrix of one layer. Smaller temporaries cannot hold a copy of a matrix."""
        matrices = (one for one in self._arrays() if one.is_of_layers and one.decl.is_multiplied)
        return min(one.num_bytes for one in matrices)

    def flops(self, num_tokens: int, num_rows: int) -> float:
        """Counts the floating-point operations of a step's matrix products, without attention.

        Replicas that share experts have as many tokens each.
        """
        # Outside the layers the head is the only matrix, and only rows that sample need it.
        return sum(
            2
            * (num_tokens if one.is_of_layers else num_rows)
            * (1 if one.decl.chosen is None else self.replicas)
            * one.mean
            * one.multiplied
            for one in self._arrays()
            if one.decl.is_multiplied
        )

    def page_bytes(self, page_size: int, backend: Backend, quantization: KVQuantization | None = None) -> float:
        """Returns the bytes of one page of keys and values, in all layers of a stage."""
        kept = [memory for memory in self._memories if not memory.keeps_state]
        return self._bytes([of.pages(1, 1, page_size, self.dtype, backend, quantization) for of in kept])

    def state_bytes(self, page_size: int, backend: Backend) -> float:
        """Returns the bytes of the states of one request, in all layers of a stage that keep one."""
        kept = [memory for memory in self._memories if memory.keeps_state]
        return self._bytes([of.pages(1, 1, page_size, self.dtype, backend) for of in kept])

    @property
    def _memories(self) -> list[LayerMemory]:
        return [memory for layer in self.spec.layers if layer.reads is None for memory in layer.memories]

    def _bytes(self, pages: Sequence[AbstractPages]) -> float:
        of_all: int = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(list(pages)))
        return of_all / self.spread.stages

    def _parts(self, axis: str | None) -> int:
        """Returns into how many parts the devices of the mesh divide a logical axis within a layer."""
        names = RULES[axis] if axis is not None else None
        sizes = {MODEL: self.spread.size, DATA: self.replicas}
        return math.prod(sizes.get(name, 1) for name in ((names,) if isinstance(names, str) else names or ()))

    def _arrays(self) -> list[_DeclaredArrays]:
        def leaf(name: str, matrix: ParamDecl, layers: StackLayers | None) -> Any:
            return self.forms.node(name, matrix, first_layer(layers), partial(of_array, layers=layers))

        def of_array(decl: ParamDecl, layers: StackLayers | None) -> _DeclaredArrays:
            elements = math.prod(decl.shape) // math.prod(self._parts(axis) for axis in decl.axes)
            count, mean = (1, 1.0) if layers is None else (most(layers), sum(map(len, layers)) / len(layers))
            num_bytes = elements * decl.dtype_in(self.dtype).itemsize
            return _DeclaredArrays(decl, layers is not None, count, mean, elements, num_bytes)

        arrays: list[_DeclaredArrays] = jax.tree.leaves(build(self.spread, self.layout, leaf))
        return arrays
