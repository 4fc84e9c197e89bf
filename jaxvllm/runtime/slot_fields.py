"""Slot fields: each value that the device keeps for every slot, declared once.

The arrays of the slot state, the words that an admission sends, what `admit` stores, the trash slot's values and the
bytes in the memory budget follow from these declarations (`state.py`). A logit rule declares the fields that it
reads.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxvllm.core.lora import NO_ADAPTER
from jaxvllm.core.sampling_params import SamplingParams
from jaxvllm.core.slots import MAX_STOP_IDS, NO_TOKEN
from jaxvllm.core.step_plan import Admission
from jaxvllm.runtime.expert_loads import LoadShape
from jaxvllm.runtime.side_rows import SideShape

# The value of each slot field for all slots and the trash slot, by name, and under `ASKED` those of an `AskedWords`.
# Donated to every call that changes it.
type DeviceState = dict[str, Any]
ASKED = "asked"


@dataclass(frozen=True)
class FieldColumns:
    """The columns of a field in rows of 32-bit words that have several fields."""

    name: str
    dtype: type[np.generic]
    first: int
    shape: tuple[int, ...]

    @property
    def columns(self) -> slice:
        return slice(self.first, self.first + math.prod(self.shape))

    def of(self, words: jax.Array) -> jax.Array:
        """Returns the field [R, *shape] of i32[R, words]."""
        return jax.lax.bitcast_convert_type(words[:, self.columns], self.dtype).reshape(len(words), *self.shape)


@partial(jax.tree_util.register_dataclass, data_fields=["words"], meta_fields=["fields"])
@dataclass(frozen=True)
class AskedWords:
    """The slot fields that an admission fills and no step changes: all in one array.

    With an array each, the program that admits requests had 18 scatters, and took 0.34 s of the CPU to compile and not
    0.11 (embedded model).
    """

    words: jax.Array  # i32[slots + 1, words]
    fields: tuple[FieldColumns, ...]

    def of(self, name: str, slots: jax.Array) -> jax.Array:
        """Returns the field `name` of each of `slots` i32[R], [R, *shape]."""
        [field] = [field for field in self.fields if field.name == name]
        return field.of(self.words[slots])


@partial(jax.tree_util.register_dataclass, data_fields=["state", "slots"], meta_fields=["num_drafts"])
@dataclass(frozen=True)
class Rows:
    """The slot fields of a step's rows.

    With `num_drafts` the position of a row may be up to so many tokens after the last one that counts in its slot. The
    tokens between are drafts, and they are in the slot's history.

    A field is gathered where it is read. Inside a branch that is not taken that costs nothing, however large the field
    is: masks of 256 rows and 152k tokens took 0.6 ms a step on CPU when they were gathered first.
    """

    state: DeviceState
    slots: jax.Array  # i32[R]
    num_drafts: int = 0

    def __getitem__(self, name: str) -> jax.Array:
        """Returns the field `name` of each row, [R, *shape]."""
        own: jax.Array | None = self.state.get(name)
        return self.state[ASKED].of(name, self.slots) if own is None else own[self.slots]


@dataclass(frozen=True)
class SlotSizes:
    """The number of slots, and the greatest lengths of what they hold."""

    num_slots: int
    max_pages: int  # of one slot
    page_size: int  # tokens
    vocab_size: int
    windows: tuple[int | None, ...]  # of each group of the KV cache: the last positions that it sees; None: all
    num_features: int | None = None  # that a proposer keeps of a row's last token; None: there is no such proposer
    has_index: bool = False  # whether there is a suffix index of their histories
    has_drafts: bool = False  # whether there is a proposer
    side: SideShape | None = None  # of the store of side inputs; None: there is none
    loads: LoadShape | None = None  # of the loads of experts; None: nobody counts them
    has_lora: bool = False  # whether there is room for adapters

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    @property
    def trash_slot(self) -> int:
        """The row after all slots: padding rows of a step read it."""
        return self.num_slots

    @property
    def max_tokens(self) -> int:
        """One more than the pages hold: the KV of a request's last token is never computed."""
        return self.max_pages * self.page_size + 1


@dataclass(frozen=True)
class SlotField:
    """One value of every slot. The trash slot, and a slot that nobody had yet, hold `default`.

    `fill` tells what an admitted request puts into its slot: one value, or up to as many as the last axis of `shape`
    has room for, of which those missing are `default`. Without it the device alone writes the field, and an admission
    leaves it alone. Where steps change what an admission fills, `is_changed` says so, and the field has an array of its
    own; the others share one (`AskedWords`).

    A rare field is large, and few requests fill it: it crosses in a call of its own, which is made only for a request
    for which some rare field's `fill` returns a value. All rare fields of its slot are set then, those for which it
    returns None, and those without `fill`, to `default`. In the slot of any other request a rare field has what a
    former tenant left, so a logit rule reads it only for rows that ask.
    """

    name: str
    dtype: type[np.int32 | np.uint32 | np.float32 | np.int16]
    default: float
    fill: Callable[[Admission], Any] | None = None
    shape: Callable[[SlotSizes], tuple[int, ...]] = lambda sizes: ()
    is_rare: bool = False
    is_changed: bool = False

    @property
    def is_asked(self) -> bool:
        """Whether it is among `AskedWords`."""
        return self.fill is not None and not self.is_rare and not self.is_changed

    def __post_init__(self) -> None:
        assert self.fill is None or np.dtype(self.dtype).itemsize == 4, "what an admission sends are 32-bit words"


def _seed_words(admission: Admission) -> np.ndarray:
    return np.array([admission.request.seed & (2**64 - 1)], np.uint64).view(np.uint32)


def _num_logprobs(params: SamplingParams) -> int:
    return -1 if params.logprobs is None or params.wants_distributions else params.logprobs


# How far a row got, and where it ends. The host sends the bounds; the device counts.
LENGTH = SlotField("length", np.int32, 0, lambda a: 0, is_changed=True)  # tokens of a decoding row; 0: in its prompt
LIMIT = SlotField("limit", np.int32, 0, lambda a: a.request.limit)  # a row is alive while it is shorter
IS_OVER = SlotField("is_over", np.int32, 0, lambda a: 0, is_changed=True)  # its last token is a stop id
HISTORY = SlotField("history", np.int32, 0, None, lambda sizes: (sizes.max_tokens,))  # its tokens, prompt first
PAGE_TABLES = SlotField(
    "page_tables", np.int32, 0, lambda a: a.pages, lambda sizes: (sizes.num_groups, sizes.max_pages), is_changed=True
)
# No stop id ends a row, and no late id is sampled, at a position below this.
MIN_LENGTH = SlotField(
    "min_length", np.int32, 0, lambda a: a.request.num_prompt_tokens + a.request.sampling_params.min_tokens
)
STOP_IDS = SlotField("stop_ids", np.int32, NO_TOKEN, lambda a: a.request.stop_token_ids, lambda sizes: (MAX_STOP_IDS,))
NUM_PROMPT = SlotField("num_prompt", np.int32, 0, lambda a: a.request.num_prompt_tokens)
LATE_IDS = SlotField("late_ids", np.int32, NO_TOKEN, lambda a: a.request.late_token_ids, lambda sizes: (MAX_STOP_IDS,))
PROGRESS = (LENGTH, LIMIT, IS_OVER, HISTORY, PAGE_TABLES, MIN_LENGTH, STOP_IDS, LATE_IDS, NUM_PROMPT)

# The slot of the adapter of its request; there is such a field where there is room for adapters.
ADAPTER = SlotField("adapter", np.int32, NO_ADAPTER, lambda a: a.adapter_slot)

# What sampling needs of every row. Temperature 0 is greedy.
TEMPERATURE = SlotField(
    "temperature", np.float32, 0, lambda a: 0.0 if (p := a.request.sampling_params).greedy else p.temperature
)
SEED = SlotField("seed", np.uint32, 0, _seed_words, lambda sizes: (2,))
NUM_LOGPROBS = SlotField(  # -1: none wanted, or others than every step can yield
    "num_logprobs", np.int32, -1, lambda a: _num_logprobs(a.request.sampling_params)
)
# What logits are divided by before log-probabilities are taken: beam search has a temperature there, others have none.
LOGIT_DIVISOR = SlotField("logit_divisor", np.float32, 1, lambda a: a.request.logit_divisor)
SAMPLING = (TEMPERATURE, SEED, NUM_LOGPROBS, LOGIT_DIVISOR)

# How often the drafts of a row were right lately, in steps that divide drafts among rows; nobody knows at first. Only
# devices with a proposer have it.
ACCEPTANCE = SlotField("acceptance", np.float32, 0.5, lambda a: 0.5, is_changed=True)

# What proposers keep. Where there is none that keeps anything, the device has no such fields.
DRAFT_LENGTH = SlotField(  # tokens that the proposer has computed
    "draft_length", np.int32, 0, lambda a: a.num_cached, is_changed=True
)
FEATURE_LENGTH = SlotField(  # the features are those of the last of these
    "feature_length", np.int32, 0, lambda a: 0, is_changed=True
)
FEATURES = SlotField("features", np.float32, 0, None, lambda sizes: (sizes.num_features or 0,))
DRAFTING = (DRAFT_LENGTH, FEATURE_LENGTH, FEATURES)
