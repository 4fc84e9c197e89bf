"""Every parameter of the decoder, declared once: shapes, dummy weights and checkpoint targets derive from it.

The tree is plain dicts. Weights are `[out, in]`, as Hugging Face stores them and as XLA's CPU matmul reads
them fastest. What one matmul can do is one array: query, key and value of a KV head lie together, so that
the array still splits by KV head.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.spread import Spread
from sharding.placement import place

# separate: `layers` is a list of L dicts, read in place by XLA on CPU. stacked: one dict of arrays with a
# leading L, for lax.scan on TPU and GPU, where compile time then does not grow with depth.
Layout = Literal["separate", "stacked"]
Params = dict[str, Any]


@dataclass(frozen=True)
class ParamDecl:
    """One array: its shape, the logical axis of each dimension (None is never split), its dummy values.

    `random` weights have variance 1 / last dimension, which is the fan-in of every `[out, in]` weight.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: Literal["random", "ones", "zeros"] = "random"

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), (self.shape, self.axes)


def declare(spec: ModelSpec) -> dict[str, ParamDecl]:
    """The arrays outside the layers."""
    vocab_by_embed = ParamDecl((spec.vocab_size, spec.hidden_size), ("vocab", "embed"))
    decls = {"embed": vocab_by_embed, "final_norm": _norm(spec, (spec.hidden_size,), ("embed",))}
    if not spec.tie_embeddings:
        decls["lm_head"] = vocab_by_embed
    return decls


def declare_layer(spec: ModelSpec) -> dict[str, ParamDecl]:
    """The arrays of one layer; all layers are alike."""
    E, F, D = spec.hidden_size, spec.ffn_size, spec.head_size
    K, G = spec.num_kv_heads, spec.group_size
    decls = {
        # A KV head's G query heads, its key, its value.
        "qkv": ParamDecl((K, (G + 2) * D, E), ("kv_heads", None, "embed")),
        "o": ParamDecl((E, spec.num_heads * D), ("embed", "heads")),
        "gate_up": ParamDecl((2, F, E), (None, "ffn", "embed")),
        "down": ParamDecl((E, F), ("embed", "ffn")),
    }
    if spec.qkv_bias:
        decls["qkv_bias"] = ParamDecl((K, (G + 2) * D), ("kv_heads", None), "zeros")
    if spec.o_bias:
        decls["o_bias"] = ParamDecl((E,), ("embed",), "zeros")
    if spec.ffn_bias:
        decls["gate_up_bias"] = ParamDecl((2, F), (None, "ffn"), "zeros")
        decls["down_bias"] = ParamDecl((E,), ("embed",), "zeros")
    if spec.norm_placement in ("pre", "sandwich"):
        decls["attention_norm"] = decls["ffn_norm"] = _norm(spec, (E,), ("embed",))
    if spec.norm_placement in ("sandwich", "post"):
        decls["attention_post_norm"] = decls["ffn_post_norm"] = _norm(spec, (E,), ("embed",))
    if spec.qk_norm == "head":
        decls["q_norm"] = decls["k_norm"] = _norm(spec, (D,), (None,))
    elif spec.qk_norm == "full":
        decls["q_norm"] = _norm(spec, (K, G, D), ("kv_heads", None, None))
        decls["k_norm"] = _norm(spec, (K, 1, D), ("kv_heads", None, None))
    return decls


def num_parameters(spec: ModelSpec) -> int:
    """Weights of the model; a tied LM head counts once."""
    layer = sum(math.prod(decl.shape) for decl in declare_layer(spec).values())
    return spec.num_layers * layer + sum(math.prod(decl.shape) for decl in declare(spec).values())


def build(spec: ModelSpec, layout: Layout, array: Callable[[str, ParamDecl, tuple[int, ...] | None], Any]) -> Params:
    """The tree of one layout, with `array(name, decl, layers)` at its leaves.

    `layers` says which layers a leaf holds: None outside the layers, one for a separate leaf, all of them,
    along a new leading dimension, for a stacked leaf. `decl` is always that of a single layer.
    """
    params: Params = {name: array(name, decl, None) for name, decl in declare(spec).items()}
    decls = declare_layer(spec)
    if layout == "stacked":
        every = tuple(range(spec.num_layers))
        params["layers"] = {name: array(name, decl, every) for name, decl in decls.items()}
    elif layout == "separate":
        params["layers"] = [
            {name: array(name, decl, (layer,)) for name, decl in decls.items()} for layer in range(spec.num_layers)
        ]
    else:
        raise ValueError(f"layout must be separate or stacked, not {layout!r}")
    return params


def stacked(decl: ParamDecl, num_layers: int) -> ParamDecl:
    """The declaration of `num_layers` such arrays in one."""
    return ParamDecl((num_layers, *decl.shape), ("layers", *decl.axes), decl.init)


def abstract_params(spec: ModelSpec, dtype: DTypeLike, layout: Layout, mesh: Mesh) -> Params:
    """The tree of `spec` spread over `mesh`, as jax.ShapeDtypeStruct: enough to compile for, without one weight."""
    sharding = place(mesh)

    def leaf(name: str, decl: ParamDecl, layers: tuple[int, ...] | None) -> jax.ShapeDtypeStruct:
        whole = stacked(decl, spec.num_layers) if layers and layout == "stacked" else decl
        return jax.ShapeDtypeStruct(whole.shape, jnp.dtype(dtype), sharding=sharding(whole.axes))

    return build(Spread(spec, mesh.size).whole, layout, leaf)


def dummy_array(name: str, decl: ParamDecl, layer: int | None, dtype: DTypeLike, seed: int) -> np.ndarray:
    """Random values for one array of one layer: the same for the same arguments, whatever the device.

    Uniform, of variance 1 / fan-in: they keep the hidden state at its size, and cost half of normal ones.
    """
    if decl.init != "random":
        return np.full(decl.shape, decl.init == "ones", jnp.dtype(dtype))
    # Layer numbers are moved by one, as a seed has no negative parts.
    parts = (seed, zlib.crc32(name.encode()), 0 if layer is None else layer + 1)
    stream = np.random.Generator(np.random.PCG64(np.random.SeedSequence(parts)))
    values = stream.random(decl.shape, np.float32)
    values -= np.float32(0.5)
    values *= np.float32((12 / decl.shape[-1]) ** 0.5)
    return values.astype(jnp.dtype(dtype))


def _norm(spec: ModelSpec, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> ParamDecl:
    # Weight plus offset is 1 either way.
    return ParamDecl(shape, axes, "zeros" if spec.norm_offset else "ones")
