"""The interface of a proposer, which runs on the device within the step, so nothing returns to the host before
verification.
"""

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp

from jaxvllm.models.params import Params, activation_dtype
from jaxvllm.runtime.cache_shape import DraftCache, KVCachePages
from jaxvllm.runtime.slot_fields import FEATURE_LENGTH, FEATURES, DeviceState
from jaxvllm.runtime.step_model import Computed, StepModel, trash_slot


@partial(jax.tree_util.register_dataclass, data_fields=["tokens", "counts"], meta_fields=[])
@dataclass(frozen=True)
class Drafts:
    """The tokens that may follow each row's last one: the first `counts[r]` of `tokens[r]`."""

    tokens: jax.Array  # i32[R, K]; ids outside of the vocabulary are allowed, and never accepted
    counts: jax.Array  # i32[R], K at most


@dataclass(frozen=True)
class _OnDevice:
    """R rows, and all that the device has of them."""

    params: Params
    kv_pages: KVCachePages
    state: DeviceState
    slots: jax.Array  # i32[R]; the trash slot where a row has ended
    model: StepModel

    @property
    def features(self) -> jax.Array:
        """The features [R, F] that `SeenStep.with_features` has kept, in the dtype of the model."""
        return self.state[FEATURES.name][self.slots].astype(activation_dtype(self.params))


@dataclass(frozen=True)
class Known(_OnDevice):
    """The values at which a proposer may look: R rows between two steps."""

    lengths: jax.Array  # i32[R]: tokens of each row, of which all but the last are computed
    room: jax.Array  # i32[R]: drafts that are verified at most, and for whose KV the row has pages


@dataclass(frozen=True)
class SeenStep(_OnDevice):
    """A step that the model has computed, and what came of it."""

    computed: Computed
    counts: jax.Array  # i32[R]: the first so many tokens of each row were right
    num_guessed: jax.Array | None = None  # i32[R]: how many tokens were guessed for a row; None: nobody asked for any

    @property
    def starts(self) -> jax.Array:
        """i32[R]: the position of each row's first token."""
        return self.computed.rows.starts()

    @property
    def last(self) -> jax.Array:
        """i32[R]: which of the T tokens is the last one of each row that was right."""
        return jnp.clip(self.computed.rows.query_starts[:-1] + self.counts - 1, 0, len(self.computed.token_ids) - 1)

    def stored(self, name: str, values: jax.Array) -> jax.Array:
        """Returns the field `name` of all slots, with `values` [R, *shape] in those of rows that have a token."""
        trash = trash_slot(self.state)
        at = jnp.where((self.counts > 0) & (self.slots != trash), self.slots, trash + 1)  # past all, so dropped
        field = self.state[name]
        return field.at[at].set(values.astype(field.dtype), mode="drop")

    def with_features(self, features: jax.Array) -> DeviceState:
        """Returns the state with the one of `features` [T, F] that belongs to each row's last token."""
        return self.state | {
            FEATURES.name: self.stored(FEATURES.name, features[self.last]),
            FEATURE_LENGTH.name: self.stored(FEATURE_LENGTH.name, self.starts + self.counts),
        }


class Proposer(Protocol):
    """A part of the step that guesses tokens.

    It is frozen and hashable, because it is part of what a program is compiled from.
    """

    @property
    def cache(self) -> DraftCache | None:
        """The arrays that it keeps on the device, or None if it keeps nothing and `see` changes nothing."""

    @property
    def sees_all(self) -> bool:
        """Whether a row has drafts only if it has seen all its steps. Otherwise it computes later what it missed."""

    @property
    def reads_index(self) -> bool:
        """Whether it needs the suffix index (`suffix_index.py`), which the device keeps only then."""

    @property
    def depths(self) -> tuple[int, ...]:
        """Numbers of layers after which it wants to see the states of the model."""

    def propose(self, known: Known, num_drafts: int) -> tuple[KVCachePages, Drafts]:
        """Returns up to `num_drafts` tokens for each row, and the pages, to which it may have written."""

    def see(self, step: SeenStep) -> tuple[KVCachePages, DeviceState]:
        """Takes a step in, and returns the pages and the state that it has then."""


class HistoryProposer:
    """A proposer that looks at tokens alone, and keeps nothing."""

    @property
    def cache(self) -> None:
        return None

    @property
    def sees_all(self) -> bool:
        return False

    @property
    def reads_index(self) -> bool:
        return False

    @property
    def depths(self) -> tuple[int, ...]:
        return ()

    def look(self, state: DeviceState, slots: jax.Array, lengths: jax.Array, num_drafts: int) -> Drafts:
        """Returns up to `num_drafts` tokens for each of `slots` i32[R], which have `lengths` i32[R] tokens."""
        raise NotImplementedError

    def propose(self, known: Known, num_drafts: int) -> tuple[KVCachePages, Drafts]:
        return known.kv_pages, self.look(known.state, known.slots, known.lengths, num_drafts)

    def see(self, step: SeenStep) -> tuple[KVCachePages, DeviceState]:
        return step.kv_pages, step.state
