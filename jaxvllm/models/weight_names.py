"""Tells which tensors of a Hugging Face checkpoint become each of our arrays."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.params import declare, declare_layer
from jaxvllm.models.spec import ModelSpec


@dataclass(frozen=True)
class Source:
    """One tensor of a checkpoint, or some of its rows, and the part of our array that it fills."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor in the file
    at: tuple[int, ...]  # where that part of our array begins
    view: tuple[int, ...]  # the shape of that part, to which the rows are reshaped
    rows: slice = slice(None)


# Called with (spec, number of a layer, beginning of the names of its tensors): returns the sources of its arrays.
LayerSources = Callable[[ModelSpec, int, str], Mapping[str, tuple[Source, ...]]]


def whole(name: str, shape: tuple[int, ...], view: tuple[int, ...] | None = None) -> tuple[Source, ...]:
    """Returns the sources of an array that is one tensor, perhaps reshaped."""
    view = view or shape
    return (Source(name, shape, (0,) * len(view), view),)


def outer_sources(spec: ModelSpec, prefix: str) -> dict[str, tuple[Source, ...]]:
    """Returns the sources of the arrays outside the layers."""
    decls = declare(spec)
    names = {
        "embed": f"{prefix}embed_tokens.weight",
        "final_norm": f"{prefix}norm.weight",
        "lm_head": "lm_head.weight",
    }
    return {key: whole(names[key], decl.shape) for key, decl in decls.items()}


def separate_projections(spec: ModelSpec, layer: int, prefix: str) -> dict[str, tuple[Source, ...]]:
    """Returns the sources of a layer whose q, k, v, gate and up are separate tensors; names begin with `prefix`."""
    parts = (norm_sources, attention_sources, gated_ffn_sources)
    return {key: sources for part in parts for key, sources in part(spec, layer, prefix).items()}


def attention_sources(spec: ModelSpec, layer: int, prefix: str) -> dict[str, tuple[Source, ...]]:
    """Returns the sources of grouped-query attention whose q, k and v are separate tensors."""
    decls = declare_layer(spec, layer)
    sources = _unfused(decls, prefix, {"o": "self_attn.o_proj.weight", "o_bias": "self_attn.o_proj.bias"})
    for key, kind in (("qkv", "weight"), ("qkv_bias", "bias")):
        if key in decls:
            K, G, D = _heads(decls[key])
            tail = decls[key].shape[2:]
            sources[key] = tuple(
                Source(
                    f"{prefix}self_attn.{letter}_proj.{kind}",
                    (K * heads * D, *tail),
                    (0, first * D, *(0 for _ in tail)),
                    (K, heads * D, *tail),
                )
                for letter, first, heads in (("q", 0, G), ("k", G, 1), ("v", G + 1, 1))
            )
    return sources


def gated_ffn_sources(spec: ModelSpec, layer: int, prefix: str) -> dict[str, tuple[Source, ...]]:
    """Returns the sources of a gated FFN whose gate and up are separate tensors."""
    decls = declare_layer(spec, layer)
    sources = _unfused(decls, prefix, {"down": "mlp.down_proj.weight", "down_bias": "mlp.down_proj.bias"})
    for key, kind in (("gate_up", "weight"), ("gate_up_bias", "bias")):
        if key in decls:
            _, *shape = decls[key].shape
            sources[key] = tuple(
                Source(f"{prefix}mlp.{half}_proj.{kind}", tuple(shape), (i, *(0 for _ in shape)), (1, *shape))
                for i, half in enumerate(("gate", "up"))
            )
    return sources


def fused_projections(spec: ModelSpec, layer: int, prefix: str) -> dict[str, tuple[Source, ...]]:
    """Returns the sources of a layer with q, k and v stacked in one tensor, and gate and up in another (Phi-3)."""
    decls = declare_layer(spec, layer)
    (K, G, D), E = _heads(decls["qkv"]), spec.hidden_size
    H, F = K * G, decls["gate_up"].shape[1]
    name, shape = f"{prefix}self_attn.qkv_proj.weight", ((H + 2 * K) * D, E)
    parts = (
        (slice(0, H * D), slice(0, G * D)),
        (slice(H * D, (H + K) * D), slice(G * D, (G + 1) * D)),
        (slice((H + K) * D, (H + 2 * K) * D), slice((G + 1) * D, (G + 2) * D)),
    )
    unfused = {"o": "self_attn.o_proj.weight", "down": "mlp.down_proj.weight"}
    sources = norm_sources(spec, layer, prefix) | _unfused(decls, prefix, unfused)
    sources["qkv"] = tuple(
        Source(name, shape, (0, at.start, 0), (K, at.stop - at.start, E), rows) for rows, at in parts
    )
    sources["gate_up"] = whole(f"{prefix}mlp.gate_up_proj.weight", (2 * F, E), (2, F, E))
    return sources


def norm_sources(spec: ModelSpec, layer: int, prefix: str) -> dict[str, tuple[Source, ...]]:
    """Returns the sources of the norms, whose names in a checkpoint depend on their placement."""
    names = {
        "attention_norm": "input_layernorm.weight",
        "attention_post_norm": "post_attention_layernorm.weight",
        # In a model without norms after the branches, this name means the norm before the FFN.
        "ffn_norm": "post_attention_layernorm.weight"
        if spec.norm_placement == "pre"
        else "pre_feedforward_layernorm.weight",
        "ffn_post_norm": "post_feedforward_layernorm.weight",
        "q_norm": "self_attn.q_norm.weight",
        "k_norm": "self_attn.k_norm.weight",
    }
    decls = declare_layer(spec, layer)
    shapes = {key: decls[key].shape for key in names if key in decls}
    return {key: whole(prefix + names[key], (math.prod(shape),), shape) for key, shape in shapes.items()}


def _unfused(decls: Mapping[str, ParamDecl], prefix: str, names: Mapping[str, str]) -> dict[str, tuple[Source, ...]]:
    """Returns the sources of the arrays in `names` that the layer has. Checkpoints store these as we do."""
    return {key: whole(prefix + name, decls[key].shape) for key, name in names.items() if key in decls}


def _heads(qkv: ParamDecl) -> tuple[int, int, int]:
    """Returns K, G and D."""
    assert qkv.heads is not None
    return qkv.shape[0], qkv.heads.group, qkv.heads.size
