"""The decoder: one forward pass over packed tokens, whatever the family and wherever the keys are kept.

The module `block` computes a layer. Norms, RoPE and logits are computed in float32.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxvllm.models.block import Block
from jaxvllm.models.forms import Matrix
from jaxvllm.models.layer_input import Attend, LayerInput, Recur, Rotation, Scalar, no_recur
from jaxvllm.models.layer_loops import OverLayers, over_layers
from jaxvllm.models.lora import LORA, layers_with_lora
from jaxvllm.models.ops import look_up, project, rows_of
from jaxvllm.models.params import Params
from jaxvllm.models.rope import RopeSpec
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.token_adapters import TokenAdapters
from pallas_kernels.backend import REFERENCE, Backend
from sharding.axis import ALONE, ModelAxis


def forward[Kv](
    params: Params,
    spec: ModelSpec,
    tokens: jax.Array,
    positions: jax.Array,
    kv: Kv,
    attend: Attend[Kv],
    axis: ModelAxis = ALONE,
    recur: Recur[Kv] = no_recur,
) -> tuple[jax.Array, Kv]:
    """Returns the hidden states after the final norm, and the cache with this step's keys and values.

    tokens, positions  # i32[T]: packed rows; every token id must be in the vocabulary, also those of padding
    The hidden states are [T, E] in the dtype of the parameters, and the same on every device. `kv` is any pytree that
    `attend` and `recur` understand; the layers only pass it on.
    Inside shard_map, `spec` and `params` are one device's share (`Spread.shard`), and each layer is summed over `axis`
    after the attention and after the FFN (Megatron-LM, arXiv 1909.08053).
    """
    x = embed_tokens(params, spec, tokens, positions, axis)
    embeddings = embed_for_layers(params, spec, tokens, x, axis)
    x, _, kv = run_layers(params, spec, x, positions, kv, attend, axis, embeddings=embeddings, recur=recur)
    return final_norm(params, spec, x), kv


def embed_tokens(
    params: Params,
    spec: ModelSpec,
    tokens: jax.Array,
    positions: jax.Array,
    axis: ModelAxis = ALONE,
    side_rows: jax.Array | None = None,
    adapters: TokenAdapters | None = None,
) -> jax.Array:
    """Returns what the first layer computes with, [T, E], for tokens i32[T] at positions i32[T].

    With `side_rows` [N, E], the token `-1 - r` is its row r, as it is: transformers does not scale `inputs_embeds`.
    """
    with jax.named_scope("embed"):
        x = embed(params["embed"], tokens, axis)
        if spec.lora is not None and adapters is not None:
            x = spec.lora.embedded(params[LORA], tokens, x, adapters, axis)
        if spec.embed_scale != 1:
            # Rounded to the dtype of the weights first, as every checkpoint was trained.
            x = x * jnp.asarray(spec.embed_scale, x.dtype)
        if side_rows is not None:
            rows = jnp.take(side_rows, -1 - tokens, axis=0, mode="clip")
            x = jnp.where(tokens[:, None] < 0, rows.astype(x.dtype), x)
        if spec.positions is not None:
            x = x + look_up(params["positions"], positions + spec.positions.offset)
        return x if spec.embed_norm is None else spec.embed_norm.apply(params, "embed_norm", x)


def embed_for_layers(
    params: Params, spec: ModelSpec, tokens: jax.Array, x: jax.Array, axis: ModelAxis = ALONE
) -> jax.Array | None:
    """Returns what tokens with embeddings x [T, E] mean to each layer alone, [L, T, P], if the model has that."""
    if spec.layer_embedding is None:
        return None
    with jax.named_scope("layer_embeddings"):
        return spec.layer_embedding.of_tokens(params, embed(params["layer_embeddings"], tokens, axis), x)


def final_norm(params: Params, spec: ModelSpec, x: jax.Array) -> jax.Array:
    """Returns the hidden states, of what the last layer returns."""
    with jax.named_scope("final_norm"):
        return spec.norm.apply(params, "final_norm", x)


def run_layers[Kv](
    params: Params,
    spec: ModelSpec,
    x: jax.Array,
    positions: jax.Array,
    kv: Kv,
    attend: Attend[Kv],
    axis: ModelAxis = ALONE,
    depths: tuple[int, ...] = (),
    embeddings: jax.Array | None = None,
    recur: Recur[Kv] = no_recur,
    is_real: jax.Array | None = None,
    is_read: jax.Array | None = None,
    count: Callable[[Kv, jax.Array, Scalar], Kv] | None = None,
    backend: Backend = REFERENCE,
) -> tuple[jax.Array, jax.Array, Kv]:
    """Returns x [T, E] after all layers, and what `run_part` returns beside it."""
    x = begin_layers(params, spec, x)
    ways = attend, axis, depths, embeddings, recur, is_real, is_read, count, backend
    x, states, kv = run_part(params, spec, x, positions, kv, *ways)
    return end_layers(params, spec, x), states, kv


def begin_layers(params: Params, spec: ModelSpec, x: jax.Array) -> jax.Array:
    """Returns what the first layer is given for x [T, E]: the same, or of each token all that layers hand on [T, A, E].

    The first of these A is the hidden state. The others are further states, or what a layer returns late.
    """
    if spec.states is not None:
        return spec.states.begin(params, x)
    return jnp.stack([x, jnp.zeros_like(x)], axis=1) if spec.is_with_late else x


def end_layers(params: Params, spec: ModelSpec, x: jax.Array) -> jax.Array:
    """Returns x [T, E] of what the last layer has returned."""
    if spec.states is not None:
        return spec.states.end(params, x)
    return x[:, 0] if spec.is_with_late else x


def run_part[Kv](
    params: Params,
    spec: ModelSpec,
    x: jax.Array,
    positions: jax.Array,
    kv: Kv,
    attend: Attend[Kv],
    axis: ModelAxis,
    depths: tuple[int, ...],
    embeddings: jax.Array | None,
    recur: Recur[Kv],
    is_real: jax.Array | None,
    is_read: jax.Array | None,
    count: Callable[[Kv, jax.Array, Scalar], Kv] | None,
    backend: Backend,
    adapters: TokenAdapters | None = None,
    over: OverLayers = over_layers,
) -> tuple[jax.Array, jax.Array, Kv]:
    """Returns what the layers of a stage hand on, the states [N, T, E] after the first `depths[n]`, and the cache.

    x  # [T, E], or [T, A, E]: what the layer before them has handed on, see `begin_layers`
    embeddings  # [L, T, P]: of these layers, what the tokens mean to each alone
    `is_real` bool[T] is False for padding, which may be computed or not. `is_read` bool[T] is False for tokens whose x
    nobody reads after the last layer, where it may be anything; None: all are read. `count` gets the experts i32[T, k]
    that tokens have chosen, and the number of the layer among these. Without `adapters` no token has one. `over` goes
    through the layers.
    """
    with jax.named_scope("rope"):
        rotation = rotations(spec.ropes, positions)

    # Where the state after each layer goes; past all, where nobody asks for it.
    places = np.full(spec.num_layers + 1, len(depths), np.int32)
    places[list(depths)] = np.arange(len(depths))

    def layer_step(
        carry: tuple[jax.Array, jax.Array, Kv],
        weights: Params,
        layer: Block,
        number: Scalar,
        window: Scalar,
        rope: Scalar,
    ) -> tuple[jax.Array, jax.Array, Kv]:
        x, states, kv = carry
        is_needed = is_real
        if is_real is not None and is_read is not None:
            is_needed = is_real & (is_read | (jnp.asarray(number) < spec.num_layers - 1))
        given = LayerInput(
            positions,
            rotation(rope),
            attend,
            recur,
            axis,
            layer.memory,
            number if layer.reads is None else layer.reads,
            window,
            is_needed,
            None if embeddings is None else embeddings[number],
            None if count is None else lambda kv, chosen: count(kv, chosen, number),
            backend,
            adapters,
        )
        x, kv = layer.apply(weights, x, kv, given)
        if depths:
            states = states.at[jnp.asarray(places)[number + 1]].set(hidden_of(x), mode="drop")
        return x, states, kv

    def hidden_of(x: jax.Array) -> jax.Array:
        return x if x.ndim == 2 else x[:, 0]

    states = jnp.zeros((len(depths), *hidden_of(x).shape), x.dtype)
    if 0 in depths:
        states = states.at[places[0]].set(hidden_of(x))
    return over(layer_step, (x, states, kv), layers_with_lora(params), spec)


def for_head(params: Params, spec: ModelSpec, hidden: jax.Array, adapters: TokenAdapters | None) -> jax.Array:
    """Returns what `project_logits` reads of hidden states [T, E] whose tokens have `adapters`, if any has one."""
    if spec.lora is None:
        return hidden
    return spec.lora.with_zeros(hidden) if adapters is None else spec.lora.with_columns(params[LORA], hidden, adapters)


def project_logits(params: Params, spec: ModelSpec, hidden: jax.Array) -> jax.Array:
    """Computes the logits of hidden states that `forward` returned, in float32, scaled and soft-capped.

    hidden  # [R, E], or what `for_head` makes of it
    The result is f32[R, V], where V is this device's share of the vocabulary.
    """
    with jax.named_scope("logits"):
        head = params["embed"] if spec.tie_embeddings else params["lm_head"]
        columns = None
        if hidden.shape[1] > spec.hidden_size:
            hidden, columns = jnp.split(hidden, [spec.hidden_size], axis=1)
        logits = project(hidden, head, params.get("lm_head_bias"), dtype=jnp.float32)
        if columns is not None:
            assert spec.lora is not None, "there are columns for adapters alone"
            logits = spec.lora.logits(params[LORA], hidden, columns, logits)
        if spec.logit_scale != 1:
            logits = logits * spec.logit_scale
        if spec.logit_soft_cap is not None:
            logits = jnp.tanh(logits / spec.logit_soft_cap) * spec.logit_soft_cap
        return logits


def embed(table: jax.Array | Matrix, tokens: jax.Array, axis: ModelAxis) -> jax.Array:
    """Looks up the rows [T, E] of `tokens` in `table`, of which each device has its share."""
    if axis.size == 1:
        return look_up(table, tokens)
    share = len(rows_of(table))
    tokens = tokens - axis.first(share)
    is_here = (tokens >= 0) & (tokens < share)
    return axis.sum(jnp.where(is_here[:, None], look_up(table, tokens), 0))


def rotations(ropes: tuple[RopeSpec | None, ...], positions: jax.Array) -> Callable[[Scalar], Rotation | None]:
    """Returns the function that picks cos and sin of a rope. Each is computed once a step.

    A rope's number may be read while the step runs only where all ropes are equally wide.
    """
    turning = [rope for rope in ropes if rope is not None]
    if len(turning) == len(ropes) and len({rope.rotary_dim for rope in turning}) == 1:
        cos, sin = rope_tables(turning, positions)
        return lambda rope: (cos[rope], sin[rope])
    tables = [None if rope is None else rope_tables((rope,), positions) for rope in ropes]

    def pick(rope: Scalar) -> Rotation | None:
        assert isinstance(rope, int), "layers whose ropes are not equally wide are not in one run"
        table = tables[rope]
        return None if table is None else (table[0][0], table[1][0])

    return pick


def rope_tables(ropes: Sequence[RopeSpec], positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes cos and sin f32[ropes, T, rotary_dim / 2] of every rope, once a step."""
    inv_freq = np.asarray([rope.inv_freq for rope in ropes], np.float32)
    scale = np.asarray([rope.scale for rope in ropes], np.float32)[:, None, None]
    angles = positions.astype(jnp.float32)[None, :, None] * inv_freq[:, None]
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale
