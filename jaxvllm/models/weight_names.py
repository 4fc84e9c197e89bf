"""Where each of our arrays comes from in a Hugging Face checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

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


# From (spec, beginning of the names of a layer) to the sources of each of its arrays.
LayerSources = Callable[[ModelSpec, str], Mapping[str, tuple[Source, ...]]]


def whole(name: str, shape: tuple[int, ...], view: tuple[int, ...] | None = None) -> tuple[Source, ...]:
    """The sources of an array that is one tensor, perhaps reshaped."""
    view = view or shape
    return (Source(name, shape, (0,) * len(view), view),)


def outer_sources(spec: ModelSpec, prefix: str) -> dict[str, tuple[Source, ...]]:
    """The sources of the arrays outside the layers."""
    decls = declare(spec)
    names = {
        "embed": f"{prefix}embed_tokens.weight",
        "final_norm": f"{prefix}norm.weight",
        "lm_head": "lm_head.weight",
    }
    return {key: whole(names[key], decl.shape) for key, decl in decls.items()}


def separate_projections(spec: ModelSpec, prefix: str) -> dict[str, tuple[Source, ...]]:
    """q, k, v, gate and up as tensors of their own, in the layer whose names begin with `prefix`."""
    K, G, D, E, F = spec.num_kv_heads, spec.group_size, spec.head_size, spec.hidden_size, spec.ffn_size
    inside = {"q": slice(0, G * D), "k": slice(G * D, (G + 1) * D), "v": slice((G + 1) * D, (G + 2) * D)}
    sources = norm_sources(spec, prefix) | unfused_outputs(spec, prefix)

    def qkv(kind: str, tail: tuple[int, ...]) -> tuple[Source, ...]:
        return tuple(
            Source(
                f"{prefix}self_attn.{letter}_proj.{kind}",
                (K * (part.stop - part.start), *tail),
                (0, part.start, *(0 for _ in tail)),
                (K, part.stop - part.start, *tail),
            )
            for letter, part in inside.items()
        )

    def gate_up(kind: str, shape: tuple[int, ...]) -> tuple[Source, ...]:
        names = (f"{prefix}mlp.{half}_proj.{kind}" for half in ("gate", "up"))
        return tuple(Source(name, shape, (i, *(0 for _ in shape)), (1, *shape)) for i, name in enumerate(names))

    sources["qkv"] = qkv("weight", (E,))
    sources["gate_up"] = gate_up("weight", (F, E))
    if spec.qkv_bias:
        sources["qkv_bias"] = qkv("bias", ())
    if spec.ffn_bias:
        sources["gate_up_bias"] = gate_up("bias", (F,))
    return sources


def fused_projections(spec: ModelSpec, prefix: str) -> dict[str, tuple[Source, ...]]:
    """q, k and v one below the other in one tensor, gate and up in another (Phi-3)."""
    H, K, G, D = spec.num_heads, spec.num_kv_heads, spec.group_size, spec.head_size
    E, F = spec.hidden_size, spec.ffn_size
    name, shape = f"{prefix}self_attn.qkv_proj.weight", ((H + 2 * K) * D, E)
    parts = (
        (slice(0, H * D), slice(0, G * D)),
        (slice(H * D, (H + K) * D), slice(G * D, (G + 1) * D)),
        (slice((H + K) * D, (H + 2 * K) * D), slice((G + 1) * D, (G + 2) * D)),
    )
    sources = norm_sources(spec, prefix) | unfused_outputs(spec, prefix)
    sources["qkv"] = tuple(
        Source(name, shape, (0, at.start, 0), (K, at.stop - at.start, E), rows) for rows, at in parts
    )
    sources["gate_up"] = whole(f"{prefix}mlp.gate_up_proj.weight", (2 * F, E), (2, F, E))
    return sources


def unfused_outputs(spec: ModelSpec, prefix: str) -> dict[str, tuple[Source, ...]]:
    """The output projections, which every family stores as we do."""
    decls = declare_layer(spec)
    names = {
        "o": "self_attn.o_proj.weight",
        "o_bias": "self_attn.o_proj.bias",
        "down": "mlp.down_proj.weight",
        "down_bias": "mlp.down_proj.bias",
    }
    return {key: whole(prefix + names[key], decls[key].shape) for key in names if key in decls}


def norm_sources(spec: ModelSpec, prefix: str) -> dict[str, tuple[Source, ...]]:
    """The norms, whose names in a checkpoint follow from where they stand."""
    decls = declare_layer(spec)
    names = {
        "attention_norm": "input_layernorm.weight",
        "attention_post_norm": "post_attention_layernorm.weight",
        # Without norms behind the branches, the name says "behind attention" and means before the FFN.
        "ffn_norm": "post_attention_layernorm.weight"
        if spec.norm_placement == "pre"
        else "pre_feedforward_layernorm.weight",
        "ffn_post_norm": "post_feedforward_layernorm.weight",
        "q_norm": "self_attn.q_norm.weight",
        "k_norm": "self_attn.k_norm.weight",
    }
    sources = {}
    for key, name in names.items():
        if key in decls:
            shape = decls[key].shape
            stored = 1
            for size in shape:
                stored *= size
            sources[key] = whole(prefix + name, (stored,), shape)
    return sources
