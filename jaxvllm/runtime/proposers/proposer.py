"""What a proposer is: it runs on the device inside of the step, so nothing returns to the host before verification."""

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import jax

from jaxvllm.models.params import Params
from jaxvllm.runtime.cache_shape import DraftCache, KVCachePages
from jaxvllm.runtime.slot_fields import DeviceState
from jaxvllm.runtime.step_model import Computed, StepModel


@partial(jax.tree_util.register_dataclass, data_fields=["tokens", "counts"], meta_fields=[])
@dataclass(frozen=True)
class Drafts:
    """The tokens that may follow each row's last one: the first `counts[r]` of `tokens[r]`."""

    tokens: jax.Array  # i32[R, K]; ids outside of the vocabulary are allowed, and never accepted
    counts: jax.Array  # i32[R], K at most


@dataclass(frozen=True)
class Known:
    """What a proposer may look at: R rows between two steps."""

    params: Params
    kv_pages: KVCachePages
    state: DeviceState
    slots: jax.Array  # i32[R]; the trash slot where a row has ended
    lengths: jax.Array  # i32[R]: tokens of each row, of which all but the last are computed
    room: jax.Array  # i32[R]: drafts that are verified at most, and for whose KV the row has pages; may be negative
    model: StepModel


class Proposer(Protocol):
    """What guesses. It is frozen and hashable, because it is part of what a program is compiled from."""

    @property
    def cache(self) -> DraftCache | None:
        """What it keeps on the device; None: it keeps nothing, and `follow` is not called."""

    @property
    def follows_all(self) -> bool:
        """Whether it must follow steps without drafts, too. Otherwise it computes later what it missed of these."""

    @property
    def depths(self) -> tuple[int, ...]:
        """Numbers of layers behind which it wants to see the states of the model."""

    def propose(self, known: Known, num_drafts: int) -> tuple[KVCachePages, Drafts]:
        """Returns up to `num_drafts` tokens for each row, and the pages, to which it may have written."""

    def follow(
        self,
        params: Params,
        kv_pages: KVCachePages,
        state: DeviceState,
        slots: jax.Array,
        computed: Computed,
        counts: jax.Array,
        model: StepModel,
        num_drafted: jax.Array | None = None,
    ) -> tuple[KVCachePages, DeviceState]:
        """Takes in what the step computed of `slots` i32[R]: the first `counts[r]` tokens of row r are right.

        `num_drafted` i32[R] says how many of a row were drafts, in a step for which it proposed.
        """


class HistoryProposer:
    """A proposer that looks at the tokens of its rows alone, and keeps nothing."""

    @property
    def cache(self) -> None:
        return None

    @property
    def follows_all(self) -> bool:
        return False

    @property
    def depths(self) -> tuple[int, ...]:
        return ()

    def look(self, state: DeviceState, slots: jax.Array, lengths: jax.Array, num_drafts: int) -> Drafts:
        """Returns up to `num_drafts` tokens for each of `slots` i32[R], which have `lengths` i32[R] tokens."""
        raise NotImplementedError

    def propose(self, known: Known, num_drafts: int) -> tuple[KVCachePages, Drafts]:
        return known.kv_pages, self.look(known.state, known.slots, known.lengths, num_drafts)

    def follow(
        self,
        params: Params,
        kv_pages: KVCachePages,
        state: DeviceState,
        slots: jax.Array,
        computed: Computed,
        counts: jax.Array,
        model: StepModel,
        num_drafted: jax.Array | None = None,
    ) -> tuple[KVCachePages, DeviceState]:
        return kv_pages, state
