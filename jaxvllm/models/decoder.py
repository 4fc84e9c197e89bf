"""The decoder: one forward pass over packed tokens, whatever the family and wherever the keys are kept.

Few, large operations: XLA on CPU pays for each. Norms, RoPE and logits are computed in float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxvllm.models.orientation import MATRICES, InOut
from jaxvllm.models.params import Params
from jaxvllm.models.spec import Activation, ModelSpec, RopeSpec
from pallas_kernels.ragged_paged_attention import NO_WINDOW
from sharding.axis import ALONE, ModelAxis

# A layer's number, window or rope: a Python int where it is known, an i32 scalar inside a scan.
Scalar = int | jax.Array


class Attend[Kv](Protocol):
    """Writes the keys and values of a layer to the cache and attends.

    q  # [T, H, D]: normed and rotated, not yet scaled by spec.attention_scale; head h reads KV head h // G
    k, v  # [T, K, D]
    layer: an i32 scalar
    window: an int, or an i32 scalar inside a scan over layers that differ in it; a token sees the last
    `window` positions, itself included, and all of them when that is NO_WINDOW
    -> [T, H, D] and the new cache
    """

    def __call__(
        self, kv: Kv, layer: Scalar, q: jax.Array, k: jax.Array, v: jax.Array, window: Scalar, /
    ) -> tuple[jax.Array, Kv]: ...


def forward[Kv](
    params: Params,
    spec: ModelSpec,
    tokens: jax.Array,
    positions: jax.Array,
    kv: Kv,
    attend: Attend[Kv],
    axis: ModelAxis = ALONE,
) -> tuple[jax.Array, Kv]:
    """The hidden states behind the final norm, and the cache with this step's keys and values in it.

    tokens, positions  # i32[T]: packed rows; a token id must be in the vocabulary, padding included
    -> [T, E] in the dtype of the parameters, the same on every device
    `kv` is carried through the layers as it is: any pytree that `attend` understands.
    Inside shard_map, `spec` and `params` are one device's share (`Spread.shard`), and each layer is summed over `axis`
    behind the attention and behind the FFN (Megatron-LM, arXiv 1909.08053).
    """
    with jax.named_scope("embed"):
        x = _embed(params["embed"], tokens, axis)
        if spec.embed_scale != 1:
            # Rounded to the dtype of the weights first, as every checkpoint was trained.
            x = x * jnp.asarray(spec.embed_scale, x.dtype)
    with jax.named_scope("rope"):
        cos, sin = _rope_tables(spec.ropes, positions)

    project = partial(_project, stacked=isinstance(params["layers"], dict))

    def layer_step(
        carry: tuple[jax.Array, Kv], weights: Params, layer: Scalar, window: Scalar, rope: Scalar
    ) -> tuple[jax.Array, Kv]:
        x, kv = carry
        with jax.named_scope("attention"):
            h = _rms_norm(x, weights["attention_norm"], spec) if "attention_norm" in weights else x
            q, k, v = _project_qkv(project, weights, spec, h, cos[rope], sin[rope], axis)
            h, kv = attend(kv, layer, q, k, v, window)
            h = _biased(axis.sum(project(h.reshape(h.shape[0], -1), weights["o"])), weights.get("o_bias"))
            x = x + _branch_output(h, weights.get("attention_post_norm"), spec)
        with jax.named_scope("ffn"):
            h = _rms_norm(x, weights["ffn_norm"], spec) if "ffn_norm" in weights else x
            gate_up = project(h, weights["gate_up"], weights.get("gate_up_bias"))  # [T, 2, F]
            h = _activate(gate_up[:, 0], spec.activation) * gate_up[:, 1]
            h = _biased(axis.sum(project(h, weights["down"])), weights.get("down_bias"))
            x = x + _branch_output(h, weights.get("ffn_post_norm"), spec)
        return x, kv

    x, kv = _over_layers(layer_step, (x, kv), params["layers"], spec)
    with jax.named_scope("final_norm"):
        return _rms_norm(x, params["final_norm"], spec), kv


def project_logits(params: Params, spec: ModelSpec, hidden: jax.Array) -> jax.Array:
    """float32 logits, scaled and soft-capped, of hidden states that `forward` returned.

    hidden  # [R, E]
    -> f32[R, V], V being this device's share of the vocabulary
    """
    with jax.named_scope("logits"):
        head = params["embed"] if spec.tie_embeddings else params["lm_head"]
        logits = _project(hidden, head, dtype=jnp.float32)
        if spec.logit_scale != 1:
            logits = logits * spec.logit_scale
        if spec.logit_soft_cap is not None:
            logits = jnp.tanh(logits / spec.logit_soft_cap) * spec.logit_soft_cap
        return logits


def _embed(table: jax.Array, tokens: jax.Array, axis: ModelAxis) -> jax.Array:
    """The rows of `table`, of which each device has its share, that belong to `tokens`: [T, E]."""
    if axis.size == 1:
        return jnp.take(table, tokens, axis=0, mode="clip")
    tokens = tokens - axis.first(len(table))
    is_here = (tokens >= 0) & (tokens < len(table))
    return axis.sum(jnp.where(is_here[:, None], jnp.take(table, tokens, axis=0, mode="clip"), 0))


@dataclass(frozen=True)
class _LayerMatrix:
    """One matrix of the layer with number `layer`, chosen while the step runs among those of all layers."""

    of_layers: tuple[jax.Array | InOut, ...]
    layer: jax.Array


def _over_layers[Carry](
    step: Callable[[Carry, Params, Scalar, Scalar, Scalar], Carry],
    carry: Carry,
    layers: list[Params] | Params,
    spec: ModelSpec,
) -> Carry:
    """Returns what `step(carry, weights, layer, window, rope)` makes of `carry` in a loop over all layers.

    The loop runs on the device, so that a layer is compiled once: 28 layers took 82 s and 122 MiB a program one by one,
    35 s and 36 MiB in a loop (CPU, 16 tokens, busy machine). What all layers share stays a Python int, so that a model
    without windows compiles none.
    """
    windows = tuple(NO_WINDOW if window is None else window for window in spec.windows)
    varying = {"window": windows, "rope": spec.layer_rope}
    constant = {name: values[0] for name, values in varying.items() if len(set(values)) == 1}
    scanned = {name: np.asarray(v, np.int32) for name, v in varying.items() if name not in constant}
    scanned["layer"] = np.arange(spec.num_layers, dtype=np.int32)
    if isinstance(layers, list):
        # A stack of the matrices would be copied slice by slice on CPU: each matmul branches to its layer's own array.
        matrices = {name: tuple(layer[name] for layer in layers) for name in layers[0] if name in MATRICES}
        stacked = {name: jnp.stack([layer[name] for layer in layers]) for name in layers[0] if name not in MATRICES}
    else:
        matrices, stacked = {}, layers

    def scan_step(carry: Carry, xs: tuple[Params, dict[str, Any]]) -> tuple[Carry, None]:
        weights, numbers = xs
        about: dict[str, Any] = constant | numbers
        layer = about["layer"]
        chosen = {name: _LayerMatrix(of_layers, layer) for name, of_layers in matrices.items()}
        return step(carry, weights | chosen, layer, about["window"], about["rope"]), None

    return jax.lax.scan(scan_step, carry, (stacked, scanned))[0]


def _project_qkv(
    project: Callable[..., jax.Array],
    weights: Params,
    spec: ModelSpec,
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    axis: ModelAxis,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q [T, H, D], k and v [T, K, D] of x [T, E]; q and k normed and rotated by cos, sin."""
    T, K, G, D = x.shape[0], spec.num_kv_heads, spec.group_size, spec.head_size
    qkv = project(x, weights["qkv"], weights.get("qkv_bias")).reshape(T, K, G + 2, D)
    q, k, v = qkv[:, :, :G], qkv[:, :, G : G + 1], qkv[:, :, G + 1]
    if spec.qk_norm == "head":
        q, k = _rms_norm(q, weights["q_norm"], spec), _rms_norm(k, weights["k_norm"], spec)
    elif spec.qk_norm == "full":
        # Copies of KV heads, where there are any, are as many of each: they leave the mean as it is.
        over = partial(_rms_norm, spec=spec, axes=(1, 2, 3), mean=axis.mean)
        q, k = over(q, weights["q_norm"]), over(k, weights["k_norm"])
    return _rotate(q, cos, sin).reshape(T, K * G, D), _rotate(k, cos, sin).reshape(T, K, D), v


def _project(
    x: jax.Array,
    weight: jax.Array | InOut | _LayerMatrix,
    bias: jax.Array | None = None,
    dtype: DTypeLike | None = None,
    stacked: bool = False,
) -> jax.Array:
    """x [T, in] by weight [..., in] to [T, ...], in `dtype` (None: that of x).

    `stacked`: the weight is one layer's slice of all layers', which XLA:TPU reads in place only if neither it nor the
    output is reshaped within the matmul: else it copied each 160 MiB of Llama 3 70B's qkv (compiled HLO, v5e and v7x).
    """
    if isinstance(weight, _LayerMatrix):
        branches = [partial(_project, weight=matrix, dtype=dtype) for matrix in weight.of_layers]
        return _biased(jax.lax.switch(weight.layer, branches, x), bias)
    if isinstance(weight, InOut):
        matrix, contracted, out_shape = weight.array, 0, weight.out_shape
    else:
        # XLA CPU's fast matmul takes two dimensions only: 23 ms a step with three, 6 ms with two.
        matrix = weight if stacked else weight.reshape(-1, weight.shape[-1])
        contracted, out_shape = matrix.ndim - 1, weight.shape[:-1]
    y = jax.lax.dot_general(x, matrix, (((1,), (contracted,)), ((), ())), preferred_element_type=dtype)
    y = jax.lax.optimization_barrier(y) if stacked else y
    return _biased(y.reshape(x.shape[0], *out_shape), bias)


def _biased(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    return x if bias is None else x + bias


def _branch_output(x: jax.Array, post_norm: jax.Array | None, spec: ModelSpec) -> jax.Array:
    """What a branch adds to the residual."""
    if post_norm is not None:
        x = _rms_norm(x, post_norm, spec)
    return x if spec.residual_scale == 1 else x * jnp.asarray(spec.residual_scale, x.dtype)


def _rms_norm(
    x: jax.Array,
    weight: jax.Array,
    spec: ModelSpec,
    axes: tuple[int, ...] = (-1,),
    mean: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> jax.Array:
    """x / rms(x) * (weight + offset), the root mean square over `axes` and, by `mean`, devices; computed in float32."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(mean(jnp.mean(y * y, axis=axes, keepdims=True)) + spec.norm_eps)
    return (y * (weight.astype(jnp.float32) + spec.norm_offset)).astype(x.dtype)


def _rope_tables(ropes: tuple[RopeSpec, ...], positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin of every rope, once a step: f32[ropes, T, rotary_dim / 2]."""
    inv_freq = np.asarray([rope.inv_freq for rope in ropes], np.float32)
    scale = np.asarray([rope.scale for rope in ropes], np.float32)[:, None, None]
    angles = positions.astype(jnp.float32)[None, :, None] * inv_freq[:, None]
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """RoPE of x [T, heads.., D]: dimension i of the first rotary_dim turns with i + rotary_dim / 2."""
    half = cos.shape[-1]
    cos, sin = (table[:, None, None] for table in (cos, sin))
    a, b, rest = jnp.split(x.astype(jnp.float32), (half, 2 * half), axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1).astype(x.dtype)


def _activate(x: jax.Array, activation: Activation) -> jax.Array:
    if activation == "silu":
        return jax.nn.silu(x)
    return jax.nn.gelu(x, approximate=activation == "gelu_tanh")
