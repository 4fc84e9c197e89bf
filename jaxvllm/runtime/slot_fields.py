"""Slot fields: each value that the device keeps for every slot, declared once.

The arrays of the slot state, the words that an admission sends, what `admit` stores, the trash slot's values and the
bytes in the memory budget follow from these declarations (`state.py`). A logit rule declares the fields that it
reads.
"""

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

# The value of each slot field for all slots and the trash slot, by name. Donated to every call that changes it.
type DeviceState = dict[str, jax.Array]


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
        return self.state[name][self.slots]


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
    leaves it alone.

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

    def __post_init__(self) -> None:
        assert self.fill is None or np.dtype(self.dtype).itemsize == 4, "what an admission sends are 32-bit words"


def _seed_words(admission: Admission) -> np.ndarray:
    return np.array([admission.request.seed & (2**64 - 1)], np.uint64).view(np.uint32)


def _num_logprobs(params: SamplingParams) -> int:
    return -1 if params.logprobs is None or params.wants_distributions else params.logprobs


# How far a row got, and where it ends. The host sends the bounds; the device counts.
LENGTH = SlotField("length", np.int32, 0, lambda a: 0)  # tokens of a decoding row, 0 before its prompt is computed
LIMIT = SlotField("limit", np.int32, 0, lambda a: a.request.limit)  # a row is alive while it is shorter
IS_OVER = SlotField("is_over", np.int32, 0, lambda a: 0)  # its last token is a stop id
HISTORY = SlotField("history", np.int32, 0, None, lambda sizes: (sizes.max_tokens,))  # its tokens, prompt first
PAGE_TABLES = SlotField(
    "page_tables", np.int32, 0, lambda a: a.pages, lambda sizes: (sizes.num_groups, sizes.max_pages)
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
ACCEPTANCE = SlotField("acceptance", np.float32, 0.5, lambda a: 0.5)

# What proposers keep. Where there is none that keeps anything, the device has no such fields.
DRAFT_LENGTH = SlotField("draft_length", np.int32, 0, lambda a: a.num_cached)  # tokens that the proposer has computed
FEATURE_LENGTH = SlotField("feature_length", np.int32, 0, lambda a: 0)  # the features are those of the last of these
FEATURES = SlotField("features", np.float32, 0, None, lambda sizes: (sizes.num_features or 0,))
DRAFTING = (DRAFT_LENGTH, FEATURE_LENGTH, FEATURES)
