"""Declares every array of a model once. Shapes, dummy weights and checkpoint targets derive from the declarations.

The tree consists of plain dicts. Weights are `[out, in]`, as Hugging Face stores them. Weights that one matmul can read
are one array: query, key and value of a KV head lie together, so that the array can still be split by KV head.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.forms import PLAIN_FORMS, Forms
from jaxvllm.models.lora import LORA, OUTSIDE
from jaxvllm.models.ops import row_dtype
from jaxvllm.models.saved_tables import TABLES
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.spread import Spread
from sharding.placement import place

# separate: `layers` is a list of L dicts, read in place by XLA on CPU. stacked: one dict of arrays with a leading L (as
# many as have such an array), read in place by loops on TPU and GPU, where compile time does not grow with depth.
Layout = Literal["separate", "stacked"]
Params = dict[str, Any]


# The numbers of the layers of each stage, of those whose arrays are stacked.
StackLayers = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class LayerStack:
    """The arrays of one name and declaration, from all layers that have such an array."""

    name: str
    decl: ParamDecl  # of a single layer
    layers: tuple[int, ...]


def declare(spec: ModelSpec) -> dict[str, ParamDecl]:
    """Declares the arrays outside the layers."""
    shape, axes = (spec.vocab_size, spec.hidden_size), ("vocab", "embed")
    decls = {
        "embed": ParamDecl(shape, axes, storage="tied_table" if spec.tie_embeddings else "table"),
        **spec.norm.declare("final_norm", (spec.hidden_size,), ("embed",)),
    }
    if spec.positions is not None:
        decls["positions"] = ParamDecl((spec.positions.size, spec.hidden_size), (None, "embed"), storage="table")
    if spec.embed_norm is not None:
        decls |= spec.embed_norm.declare("embed_norm", (spec.hidden_size,), ("embed",))
    if spec.layer_embedding is not None:
        decls |= spec.layer_embedding.declare(spec.vocab_size)
    if spec.states is not None:
        decls |= spec.states.declare()
    if not spec.tie_embeddings:
        decls["lm_head"] = ParamDecl(shape, axes, storage="matrix")
    if spec.head_bias:
        decls["lm_head_bias"] = ParamDecl(shape[:1], axes[:1], "zeros")
    if spec.lora is not None:
        decls |= spec.lora.declare(spec.vocab_size, spec.hidden_size)
    return decls


def declare_layer(spec: ModelSpec, layer: int) -> dict[str, ParamDecl]:
    """Declares the arrays of one layer."""
    return spec.layers[layer].declare()


def declaration(spec: ModelSpec, name: str, layer: int | None) -> ParamDecl:
    """Returns the declaration of the array of that name, of a layer or, with None, outside the layers."""
    return (declare(spec) if layer is None else declare_layer(spec, layer))[name]


def layer_stacks(spec: ModelSpec) -> dict[str, LayerStack]:
    """Returns the stacks of the `stacked` layout by their keys.

    A key is the name of the arrays. A number follows where layers declare arrays of one name in several ways. A stage
    has the stacks of its model, of which some may have none of its layers.
    """
    kinds = (held for layer in range(spec.whole.num_layers) for held in declare_layer(spec.whole, layer).items())
    layers_of: dict[tuple[str, ParamDecl], list[int]] = {kind: [] for kind in kinds}
    for layer in range(spec.num_layers):
        for held in declare_layer(spec, layer).items():
            layers_of[held].append(layer)
    stacks: dict[str, LayerStack] = {}
    for (name, decl), layers in layers_of.items():
        others = sum(stack.name == name for stack in stacks.values())
        stacks[f"{name}.{others}" if others else name] = LayerStack(name, decl, tuple(layers))
    return stacks


def first_layer(layers: StackLayers | None) -> int | None:
    """Returns the first of the layers of a stack, or None outside the layers."""
    return None if layers is None else min(layer for stage in layers for layer in stage)


def most(layers: StackLayers) -> int:
    """Returns how many layers a stage has room for in a stack: as many as the stage has that has most of them."""
    return max(map(len, layers))


def head_of(params: Params) -> Params:
    """Returns the parameters that `project_logits` reads, without the hundreds of arrays of the layers."""
    head = {name: params[name] for name in ("embed", "lm_head", "lm_head_bias") if name in params}
    of_adapters = {name: params[LORA][name] for name in (OUTSIDE, TABLES) if name in params.get(LORA, {})}
    return head | ({LORA: of_adapters} if of_adapters else {})


def activation_dtype(params: Params) -> Any:
    """Returns the dtype that the layers compute in, whatever the forms of their matrices are."""
    return row_dtype(params["embed"])


def num_parameters(spec: ModelSpec) -> int:
    """Counts the weights of the model. A tied LM head counts once."""
    layers = (declare_layer(spec, layer) for layer in range(spec.num_layers))
    return sum(math.prod(decl.shape) for decls in (declare(spec), *layers) for decl in decls.values())


def build(spread: Spread, layout: Layout, array: Callable[[str, ParamDecl, StackLayers | None], Any]) -> Params:
    """Builds the tree of one layout, with `array(name, decl, layers)` at its leaves.

    `layers` says which layers a leaf holds: None outside the layers; one layer for a separate leaf; and for a stacked
    leaf, along a new leading dimension, all layers that have such an array, those of each stage apart. Each stage has
    room for as many as any other. `decl` is always that of a single layer of `spread.whole`.
    """
    spec = spread.whole
    params: Params = {name: array(name, decl, None) for name, decl in declare(spec).items()}
    if layout == "stacked":
        params["layers"] = {
            key: array(stack.name, stack.decl, spread.of_stages(stack.layers))
            for key, stack in layer_stacks(spec).items()
        }
    elif layout == "separate":
        params["layers"] = [
            {name: array(name, decl, ((layer,),)) for name, decl in declare_layer(spec, layer).items()}
            for layer in range(spec.num_layers)
        ]
    else:
        raise ValueError(f"layout must be separate or stacked, not {layout!r}")
    return params


def abstract_params(
    spec: ModelSpec, dtype: DTypeLike, layout: Layout, mesh: Mesh, forms: Forms = PLAIN_FORMS
) -> Params:
    """Returns the tree of `spec` spread over `mesh`, as jax.ShapeDtypeStruct: enough to compile, without weights."""
    sharding = place(mesh)

    def leaf(name: str, decl: ParamDecl, layers: StackLayers | None) -> Any:
        def array(decl: ParamDecl) -> jax.ShapeDtypeStruct:
            whole = decl.stacked(len(layers) * most(layers)) if layers and layout == "stacked" else decl
            return jax.ShapeDtypeStruct(whole.shape, decl.dtype_in(dtype), sharding=sharding(whole.axes))

        return forms.node(name, decl, first_layer(layers), array)

    return build(Spread.on(spec, mesh), layout, leaf)


def dummy_array(name: str, decl: ParamDecl, layer: int | None, dtype: DTypeLike, seed: int) -> np.ndarray:
    """Makes random values for one array of one layer, the same for the same arguments on every device.

    They are uniform with variance 1 / fan-in, which keeps the size of the hidden state. Normal values would take twice
    the time.
    """
    if decl.init != "random":
        return np.full(decl.shape, decl.init == "ones", decl.dtype_in(dtype))
    # The parts of a seed must not be negative, so 0 stands for None, and layer numbers are moved by one.
    parts = (seed, zlib.crc32(name.encode()), 0 if layer is None else layer + 1)
    stream = np.random.Generator(np.random.PCG64(np.random.SeedSequence(parts)))
    values = stream.random(decl.shape, np.float32)
    values -= np.float32(0.5)
    values *= np.float32((12 / decl.shape[-1]) ** 0.5)
    return values.astype(decl.dtype_in(dtype))
