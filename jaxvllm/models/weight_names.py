"""Tells which tensors of a Hugging Face checkpoint become each of our arrays."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.norm import bias_of
from jaxvllm.models.params import declare, declare_layer
from jaxvllm.models.spec import ModelSpec


@dataclass(frozen=True)
class Source:
    """One tensor of a checkpoint, or some of its rows, and the part of our array that it fills."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor in the file
    at: tuple[int, ...]  # where that part of our array begins
    view: tuple[int, ...]  # the shape of that part, to which the rows are reshaped
    rows: slice | tuple[slice, ...] = slice(None)  # or of its matrices, where it is a stack of those
    is_turned: bool = False  # the tensor is [.., in, out], and its columns are our rows

    def part_of(self, tensor: np.ndarray) -> np.ndarray:
        """Returns that part of the whole tensor, as a view of it."""
        # A copy would put the whole tensor into the host's memory.
        return self.rows_of(tensor).reshape(self.view, copy=False)

    def rows_of(self, tensor: Any) -> Any:
        """Returns that part of the whole tensor, an array of NumPy or jax, in the shape that its rows have there."""
        return (tensor.swapaxes(-1, -2) if self.is_turned else tensor)[self.rows] if tensor.ndim else tensor

    def steps(self) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        """Returns where that part begins in the tensor, and the step of each of its axes along each of the tensor's.

        A view of a tensor is linear: element v of it is element start + sum of step * v of the tensor, on each axis.
        """
        numbers = np.meshgrid(*map(np.arange, self.shape), indexing="ij", copy=False)
        parts = [self.part_of(one) for one in numbers]
        start = tuple(int(part[(0,) * part.ndim]) for part in parts)
        return start, tuple(tuple(step // part.itemsize for step in part.strides) for part in parts)


@dataclass(frozen=True)
class OuterNames:
    """The names of the tensors outside the layers, and how the names of a layer's tensors begin, after the prefix."""

    embed: str = "embed_tokens.weight"
    final_norm: str = "norm"
    positions: str = ""  # the table of learned positions, where there is one
    layers: str = "layers"
    lm_head: str = "lm_head.weight"  # it stands beside the decoder
    others: tuple[tuple[str, str], ...] = ()  # our arrays that few models have, and their tensors

    def layer_prefix(self, prefix: str, layer: int) -> str:
        """Returns the beginning of the names of a layer's tensors."""
        return f"{prefix}{self.layers}.{layer}."


# Called with (spec, number of a layer, beginning of the names of its tensors): returns the sources of its arrays.
LayerSources = Callable[[ModelSpec, int, str], Mapping[str, tuple[Source, ...]]]


def whole(name: str, shape: tuple[int, ...], view: tuple[int, ...] | None = None) -> tuple[Source, ...]:
    """Returns the sources of an array that is one tensor, perhaps reshaped."""
    view = view or shape
    return (Source(name, shape, (0,) * len(view), view),)


def outer_sources(spec: ModelSpec, prefix: str, names: OuterNames) -> dict[str, tuple[Source, ...]]:
    """Returns the sources of the arrays outside the layers."""
    decls = declare(spec)
    sources = named_norms(decls, prefix, {"final_norm": names.final_norm})
    sources |= _unfused(decls, prefix, {"embed": names.embed, "positions": names.positions})
    for key, name in names.others:
        if key in decls:
            *rows, size = shape = decls[key].shape
            sources[key] = whole(prefix + name, (math.prod(rows), size) if rows else shape, shape)
    if spec.layer_embedding is not None and spec.layer_embedding.known_tokens is not None:
        [table] = sources["layer_embeddings"]
        sources["layer_embeddings"] = _filled_up(table, spec.layer_embedding.known_tokens)
    # Old multimodal checkpoints have the decoder and its LM head within a language_model.
    beside = prefix.removesuffix("model.") if prefix.endswith(".model.") else ""
    return sources | with_biases(decls, beside, {"lm_head": names.lm_head.removesuffix(".weight")})


def _filled_up(table: Source, known: int) -> tuple[Source, ...]:
    """Returns the sources of a table of which the checkpoint has the first `known` rows. Row 0 stands for others."""
    num_rows, size = table.shape
    first = replace(table, shape=(known, size), view=(min(known, num_rows), size), rows=slice(min(known, num_rows)))
    row = replace(first, view=(1, size), rows=slice(1))
    return (first, *(replace(row, at=(number, 0)) for number in range(known, num_rows)))


def separate_projections(spec: ModelSpec, layer: int, prefix: str) -> dict[str, tuple[Source, ...]]:
    """Returns the sources of a layer whose q, k, v, gate and up are separate tensors; names begin with `prefix`."""
    parts = (norm_sources, attention_sources, gated_ffn_sources)
    return {key: sources for part in parts for key, sources in part(spec, layer, prefix).items()}


def attention_sources(
    spec: ModelSpec, layer: int, prefix: str, output: str = "self_attn.o_proj", inputs: str = "self_attn."
) -> dict[str, tuple[Source, ...]]:
    """Returns the sources of grouped-query attention whose q, k and v are separate tensors."""
    decls = declare_layer(spec, layer)
    sources = with_biases(decls, prefix, {"o": output})
    for key, kind in (("qkv", "weight"), ("qkv_bias", "bias")):
        if key in decls:
            K, G, size = _heads(decls[key])
            D, tail = spec.layers[layer].attention.head_size, decls[key].shape[2:]
            queries = G * size  # each with its gate, where it has one
            sources[key] = tuple(
                rows_of_heads(f"{prefix}{inputs}{letter}_proj.{kind}", (K, count, *tail), first)
                for letter, first, count in (("q", 0, queries), ("k", queries, D), ("v", queries + D, D))
                if first < decls[key].shape[1]
            )
    return sources


def rows_of_heads(name: str, view: tuple[int, ...], first: int, begin: int = 0, num_rows: int | None = None) -> Source:
    """Returns the source of rows `first` and on of each of K heads, from a tensor that lists those of all heads.

    `view` is (K, rows of each head, ..). They begin at row `begin` of the tensor, which has `num_rows`, or no others.
    """
    K, count, *tail = view
    shape = (K * count if num_rows is None else num_rows, *tail)
    return Source(name, shape, (0, first, *(0 for _ in tail)), view, slice(begin, begin + K * count))


def gated_ffn_sources(spec: ModelSpec, layer: int, prefix: str) -> dict[str, tuple[Source, ...]]:
    """Returns the sources of a gated FFN whose gate and up are separate tensors."""
    return gated_sources(declare_layer(spec, layer), f"{prefix}mlp.")


def gated_sources(
    decls: Mapping[str, ParamDecl],
    prefix: str,
    ours: str = "",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> dict[str, tuple[Source, ...]]:
    """Returns the sources of gate, up and down, whose tensors begin with `prefix`, and our arrays with `ours`."""
    *halves, down = names
    sources = with_biases(decls, prefix, {f"{ours}down": down})
    for key, kind in ((f"{ours}gate_up", "weight"), (f"{ours}gate_up_bias", "bias")):
        if key in decls:
            _, *shape = decls[key].shape
            sources[key] = tuple(
                Source(f"{prefix}{half}.{kind}", tuple(shape), (i, *(0 for _ in shape)), (1, *shape))
                for i, half in enumerate(halves)
            )
    return sources


def sparse_projections(shared: str = "", attention: LayerSources = attention_sources, **others: str) -> LayerSources:
    """Returns the sources of layers that have a gated FFN or experts, one by one, both of which are named `mlp`.

    shared: the name of an expert beside the others there
    attention: the sources of a layer's attention
    others: the tensors there of further arrays that layers with experts have
    """

    def sources(spec: ModelSpec, layer: int, prefix: str) -> dict[str, tuple[Source, ...]]:
        decls, start = declare_layer(spec, layer), f"{prefix}mlp."
        found = norm_sources(spec, layer, prefix) | dict(attention(spec, layer, prefix))
        if "router" not in decls:
            return found | gated_ffn_sources(spec, layer, prefix)
        found |= expert_sources(decls, f"{start}experts.")
        if "shared_gate_up" in decls:
            found |= gated_sources(decls, f"{start}{shared}.", "shared_")
        tensors = {"router": "gate.weight", **others}
        return found | {key: whole(start + name, decls[key].shape) for key, name in tensors.items()}

    return sources


def expert_sources(
    decls: Mapping[str, ParamDecl], prefix: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, tuple[Source, ...]]:
    """Returns the sources of experts that are stored one by one: the names of a tensor begin with `prefix`, number."""
    gate, up, down = names
    num_experts, _, F, E = decls["experts_gate_up"].shape
    return {
        "experts_gate_up": tuple(
            Source(f"{prefix}{number}.{name}.weight", (F, E), (number, half, 0, 0), (1, 1, F, E))
            for number in range(num_experts)
            for half, name in enumerate((gate, up))
        ),
        "experts_down": tuple(
            Source(f"{prefix}{number}.{down}.weight", (E, F), (number, 0, 0), (1, E, F))
            for number in range(num_experts)
        ),
    }


def stacked_expert_sources(decls: Mapping[str, ParamDecl], gate_up: str, down: str) -> dict[str, tuple[Source, ...]]:
    """Returns the sources of experts of which one tensor has all, gate and up together."""
    num_experts, _, F, E = decls["experts_gate_up"].shape
    return {
        "experts_gate_up": whole(gate_up, (num_experts, 2 * F, E), (num_experts, 2, F, E)),
        "experts_down": whole(down, (num_experts, E, F)),
    }


def turned_expert_sources(
    decls: Mapping[str, ParamDecl], prefix: str, *, interleaved: bool
) -> dict[str, tuple[Source, ...]]:
    """Returns the sources of experts in stacks of matrices [in, out], gate and up together, and of their biases.

    Columns of gate and up take turns if they are `interleaved`. Otherwise all of the gate come first.
    """
    X, _, F, E = decls["experts_gate_up"].shape
    halves = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, F), slice(F, None))

    def parts(name: str, shape: tuple[int, ...], *tail: int) -> tuple[Source, ...]:
        zeros = (0,) * len(tail)
        return tuple(
            Source(prefix + name, shape, (0, half, 0, *zeros), (X, 1, F, *tail), (slice(None), rows), bool(tail))
            for half, rows in enumerate(halves)
        )

    found = {
        "experts_gate_up": parts("gate_up_proj", (X, E, 2 * F), E),
        "experts_down": (Source(f"{prefix}down_proj", (X, F, E), (0, 0, 0), (X, E, F), is_turned=True),),
    }
    if bias_of("experts_down") in decls:
        found[bias_of("experts_gate_up")] = parts("gate_up_proj_bias", (X, 2 * F))
        found[bias_of("experts_down")] = whole(f"{prefix}down_proj_bias", (X, E))
    return found


def fused_projections(spec: ModelSpec, layer: int, prefix: str) -> dict[str, tuple[Source, ...]]:
    """Returns the sources of a layer with q, k and v stacked in one tensor, and gate and up in another (Phi-3)."""
    decls = declare_layer(spec, layer)
    sources = norm_sources(spec, layer, prefix)
    sources |= with_biases(decls, prefix, {"o": "self_attn.o_proj", "down": "mlp.down_proj"})
    sources["qkv"] = fused_qkv(decls["qkv"], f"{prefix}self_attn.qkv_proj.weight")
    sources["gate_up"] = fused_gate_up(decls["gate_up"], f"{prefix}mlp.gate_up_proj.weight")
    return sources


def fused_qkv(qkv: ParamDecl, name: str, is_turned: bool = False) -> tuple[Source, ...]:
    """Returns the sources of queries, keys and values, or their biases, that one tensor has in this order."""
    K, G, D = _heads(qkv)
    num_rows, tail = K * (G + 2) * D, qkv.shape[2:]
    # Each lists all heads, and follows those before it in the tensor as it does in each KV head of our array.
    parts = ((G * D, 0), (D, G * D), (D, (G + 1) * D))
    found = (rows_of_heads(name, (K, count, *tail), first, K * first, num_rows) for count, first in parts)
    return tuple(replace(one, shape=one.shape[::-1], is_turned=True) if is_turned else one for one in found)


def qkv_by_head(decls: Mapping[str, ParamDecl], name: str) -> dict[str, tuple[Source, ...]]:
    """Returns the sources of queries, keys and values, and their biases, that one tensor lists by KV head, as we do."""
    return {
        key: whole(f"{name}.{kind}", (math.prod(decls[key].shape[:2]), *decls[key].shape[2:]), decls[key].shape)
        for key, kind in (("qkv", "weight"), ("qkv_bias", "bias"))
        if key in decls
    }


def fused_gate_up(gate_up: ParamDecl, name: str) -> tuple[Source, ...]:
    """Returns the source of gate and up where one tensor has both."""
    _, F, E = gate_up.shape
    return whole(name, (2 * F, E), (2, F, E))


def turned(name: str, decl: ParamDecl) -> tuple[Source, ...]:
    """Returns the source of a matrix that the checkpoint stores as [in, out]."""
    return (Source(name, decl.shape[::-1], (0, 0), decl.shape, is_turned=True),)


def norm_sources(spec: ModelSpec, layer: int, prefix: str) -> dict[str, tuple[Source, ...]]:
    """Returns the sources of the norms, whose names in a checkpoint depend on their placement."""
    placement = spec.layers[layer].placement
    names = {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        # In a model without norms after the branches, this name means the norm before the FFN.
        "ffn_norm": "post_attention_layernorm" if placement in ("pre", "twin") else "pre_feedforward_layernorm",
        "ffn_post_norm": "post_feedforward_layernorm",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
    }
    return named_norms(declare_layer(spec, layer), prefix, names)


def named_norms(decls: Mapping[str, ParamDecl], prefix: str, names: Mapping[str, str]) -> dict[str, tuple[Source, ...]]:
    """Returns the sources of the norms in `names` that are declared, with their biases. Checkpoints store them flat."""
    kinds = {key: f"{prefix}{name}.weight" for key, name in names.items()}
    kinds |= {bias_of(key): f"{prefix}{name}.bias" for key, name in names.items()}
    shapes = {key: decls[key].shape for key in kinds if key in decls}
    return {key: whole(kinds[key], (math.prod(shape),), shape) for key, shape in shapes.items()}


def with_biases(decls: Mapping[str, ParamDecl], prefix: str, names: Mapping[str, str]) -> dict[str, tuple[Source, ...]]:
    """Returns the sources of the matrices in `names`, and of their biases, that the layer has."""
    tensors = {key: f"{name}.weight" for key, name in names.items()}
    tensors |= {bias_of(key): f"{name}.bias" for key, name in names.items()}
    return _unfused(decls, prefix, tensors)


def _unfused(decls: Mapping[str, ParamDecl], prefix: str, names: Mapping[str, str]) -> dict[str, tuple[Source, ...]]:
    """Returns the sources of the arrays in `names` that the layer has. Checkpoints store these as we do."""
    return {key: whole(prefix + name, decls[key].shape) for key, name in names.items() if key in decls}


def _heads(qkv: ParamDecl) -> tuple[int, int, int]:
    """Returns K, G and D."""
    assert qkv.heads is not None
    return qkv.shape[0], qkv.heads.group, qkv.heads.size
