"""Divides a step's room for drafts among rows: each token goes where it is most likely right.

A row has a measured share of right drafts, `acceptance` a. Its draft number j counts only if those before it are right,
so it is worth a^j: taking the most valuable ones brings most tokens for the price of the step.
"""

import jax
import jax.numpy as jnp

from jaxvllm.runtime.slot_fields import ACCEPTANCE

# Weight of the newest step in a row's acceptance: text changes within a few sentences.
_NEWEST = 0.2
# A row without drafts is forgotten so fast, or it would never have any again.
_FORGOTTEN = 0.02


def share_drafts(counts: jax.Array, acceptance: jax.Array, room: jax.Array, num_drafts: int) -> jax.Array:
    """Returns how many of its `counts` i32[R] drafts each row may have, i32[R], at most `room` i32 together.

    `acceptance` is f32[R], and no count is above `num_drafts`.
    """
    places = jnp.arange(num_drafts)
    # Strictly less for each later draft of a row, so that those chosen are its first ones.
    likely = jnp.broadcast_to(jnp.clip(acceptance, 0.05, 0.95)[:, None], (len(counts), num_drafts))
    values = jnp.cumprod(likely, axis=1)
    values = jnp.where(places < counts[:, None], values, 0.0).reshape(-1)
    order = jnp.argsort(-values, stable=True)
    is_chosen = jnp.zeros(len(values), jnp.bool_).at[order].set(jnp.arange(len(values)) < room)
    return (is_chosen & (values > 0)).reshape(len(counts), num_drafts).sum(axis=1, dtype=jnp.int32)


def measured_acceptance(acceptance: jax.Array, drafted: jax.Array, accepted: jax.Array) -> jax.Array:
    """Returns `acceptance` f32[R] after a step that accepted so many i32[R] of the drafts i32[R] of each row.

    Drafts after the first wrong one say nothing.
    """
    told = jnp.minimum(drafted, accepted + 1)
    newest = acceptance + _NEWEST * (accepted / jnp.maximum(told, 1) - acceptance)
    forgotten = acceptance + _FORGOTTEN * (ACCEPTANCE.default - acceptance)
    return jnp.where(told > 0, newest, forgotten).astype(jnp.float32)
