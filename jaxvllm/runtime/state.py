"""Device state: what the device remembers of every slot, so that a decode step needs almost nothing sent.

Arrays have `num_slots + 1` rows. The last is the trash slot: padding rows read there, and what it holds never changes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxvllm.core.step_plan import Admission
from jaxvllm.runtime.sampler import FILTER_STAGES, LOGIT_STAGES
from jaxvllm.runtime.slot_fields import HISTORY, PROGRESS, SAMPLING, DeviceState, SlotField, SlotSizes

# Requests that one `admit` call brings in. One padded call costs what one request would; 64 arriving at once cost 8.
ADMISSION_BATCH = 8
# Tokens of a cached prefix that one `recall` call brings in.
RECALL_TOKENS = 2048
RECALL_WORDS = 3 + RECALL_TOKENS  # slot, first position, number of tokens, tokens

_OF_STAGES = (field for stage in (*LOGIT_STAGES, *FILTER_STAGES) for field in stage.fields)
SLOT_FIELDS: tuple[SlotField, ...] = tuple(dict.fromkeys((*PROGRESS, *SAMPLING, *_OF_STAGES)))


def new_state(sizes: SlotSizes) -> DeviceState:
    """The state of an engine without requests."""
    rows = sizes.num_slots + 1
    return {f.name: jnp.full((rows, *f.shape(sizes)), f.default, f.dtype) for f in SLOT_FIELDS}


@dataclass(frozen=True)
class _Words:
    """Where an admission has a field's words."""

    field: SlotField
    first: int
    shape: tuple[int, ...]

    @property
    def columns(self) -> slice:
        return slice(self.first, self.first + math.prod(self.shape))


def _layout(sizes: SlotSizes) -> list[_Words]:
    """An admission is one row of 32-bit words: its slot, then the fields that it fills, in order."""
    words: list[_Words] = []
    first = 1
    for field in SLOT_FIELDS:
        if field.fill is not None:
            words.append(_Words(field, first, field.shape(sizes)))
            first += math.prod(words[-1].shape)
    return words


def pack_admissions(admissions: Sequence[Admission], sizes: SlotSizes) -> NDArray[np.int32]:
    """i32[ADMISSION_BATCH, words] for `admit`; unused rows go to no slot."""
    assert len(admissions) <= ADMISSION_BATCH
    layout = _layout(sizes)
    packed = np.zeros((ADMISSION_BATCH, layout[-1].columns.stop), np.int32)
    packed[:, 0] = sizes.num_slots + 1  # past the trash slot, so dropped
    for row, admission in enumerate(admissions):
        packed[row, 0] = admission.slot
        for words in layout:
            field = words.field
            assert field.fill is not None
            at = packed[row, words.columns].view(field.dtype).reshape(words.shape or (1,))
            values = np.atleast_1d(np.asarray(field.fill(admission), field.dtype))
            at[..., : values.shape[-1]] = values
            at[..., values.shape[-1] :] = field.default
    return packed


def admit(state: DeviceState, packed: jax.Array, sizes: SlotSizes) -> DeviceState:
    """Stores the parameters and pages of newly admitted requests (`pack_admissions`) in their slots."""
    slots = packed[:, 0]
    filled: DeviceState = {}
    for words in _layout(sizes):
        name = words.field.name
        values = jax.lax.bitcast_convert_type(packed[:, words.columns], words.field.dtype)
        filled[name] = state[name].at[slots].set(values.reshape(len(slots), *words.shape), mode="drop")
    return state | filled


def pack_recalls(admission: Admission) -> list[NDArray[np.int32]]:
    """For `recall`, i32[RECALL_WORDS] each."""
    tokens = admission.request.token_ids()[: admission.num_cached]
    packed = []
    for first in range(0, len(tokens), RECALL_TOKENS):
        part = tokens[first : first + RECALL_TOKENS]
        packed.append(np.zeros(RECALL_WORDS, np.int32))
        packed[-1][:3] = admission.slot, first, len(part)
        packed[-1][3 : 3 + len(part)] = part
    return packed


def recall(state: DeviceState, packed: jax.Array) -> DeviceState:
    """Stores tokens of a cached prefix, which no step computes, in their slot's history."""
    slot, first, count = packed[0], packed[1], packed[2]
    history = state[HISTORY.name]
    index = jnp.arange(RECALL_TOKENS)
    positions = jnp.where(index < count, first + index, history.shape[1])
    return state | {HISTORY.name: history.at[slot, positions].set(packed[3:], mode="drop")}


def state_bytes(sizes: SlotSizes) -> int:
    """Bytes that the state takes of each device."""
    words = sum(math.prod(field.shape(sizes)) for field in SLOT_FIELDS)
    return 4 * words * (sizes.num_slots + 1)
