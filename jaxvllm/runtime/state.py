"""Slot state: what the device remembers of every slot, so that a decode step needs almost nothing sent.

Arrays have `num_slots + 1` rows. The last is the trash slot: padding rows read there, and what it holds never changes.
Only the suffix index, the side store and the loads of experts belong to no slot.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxvllm.core.request import TokenIds
from jaxvllm.core.step_plan import Admission
from jaxvllm.runtime.penalties import MAX_COUNT, OUTPUT_COUNTS
from jaxvllm.runtime.sampler import FILTER_RULES, LOGIT_RULES
from jaxvllm.runtime.slot_fields import (
    ACCEPTANCE,
    ADAPTER,
    ASKED,
    DRAFTING,
    HISTORY,
    PROGRESS,
    SAMPLING,
    AskedWords,
    DeviceState,
    FieldColumns,
    SlotField,
    SlotSizes,
)
from jaxvllm.runtime.suffix_index import new_index, record

# Requests that one `admit` call brings in. One padded call costs what one request would; 64 arriving at once cost 8.
ADMISSION_BATCH = 8
# Tokens that one `recall` or `recount` call brings in.
RECALL_TOKENS = 2048
RECALL_WORDS = 3 + RECALL_TOKENS  # slot, first position, number of tokens, tokens

_OF_RULES = (field for rule in (*LOGIT_RULES, *FILTER_RULES) for field in rule.fields)
SLOT_FIELDS: tuple[SlotField, ...] = tuple(dict.fromkeys((*PROGRESS, *SAMPLING, *_OF_RULES)))


def slot_fields(sizes: SlotSizes) -> tuple[SlotField, ...]:
    """Returns all fields of slots of these sizes."""
    fields = (*SLOT_FIELDS, ACCEPTANCE) if sizes.has_drafts else SLOT_FIELDS
    fields = (*fields, ADAPTER) if sizes.has_lora else fields
    if sizes.num_features is None:
        return fields
    return (*fields, *(field for field in DRAFTING if 0 not in field.shape(sizes)))


def new_state(sizes: SlotSizes) -> DeviceState:
    """Returns the slot state of an engine without requests."""
    rows = sizes.num_slots + 1
    own = (field for field in slot_fields(sizes) if not field.is_asked)
    state: DeviceState = {f.name: jnp.full((rows, *f.shape(sizes)), f.default, f.dtype) for f in own}
    state[ASKED] = _nothing_asked(sizes)
    if sizes.has_index:
        state |= new_index(sizes)
    if sizes.loads is not None:
        state |= sizes.loads.new()
    return state if sizes.side is None else state | sizes.side.new()


@cache
def state_shapes(sizes: SlotSizes) -> DeviceState:
    """Returns the shapes and dtypes of `new_state`. Tracing it takes 7 ms, and a start asks several times."""
    shapes: DeviceState = jax.eval_shape(partial(new_state, sizes))
    return shapes


def _layout(sizes: SlotSizes, is_rare: bool) -> dict[SlotField, FieldColumns]:
    """Returns where an admission has which field.

    It is one row of 32-bit words: its slot, and then the rare fields in order, or the others that it fills, of which
    `AskedWords` come first.
    """
    layout: dict[SlotField, FieldColumns] = {}
    first = 1
    for field in sorted(slot_fields(sizes), key=lambda field: not field.is_asked):
        if field.fill is not None and field.is_rare == is_rare:
            layout[field] = FieldColumns(field.name, field.dtype, first, field.shape(sizes))
            first = layout[field].columns.stop
    return layout


def _nothing_asked(sizes: SlotSizes) -> AskedWords:
    """Returns the words of slots that nobody had yet: as an admission has them, its slot too."""
    layout = {field: columns for field, columns in _layout(sizes, is_rare=False).items() if field.is_asked}
    fields = tuple(layout.values())
    row = np.zeros(fields[-1].columns.stop, np.int32)
    for field, columns in layout.items():
        _write(row, columns, (), field.default)
    return AskedWords(jnp.broadcast_to(row, (sizes.num_slots + 1, len(row))), fields)


def pack_admissions(admissions: Sequence[Admission], sizes: SlotSizes) -> NDArray[np.int32]:
    """Returns i32[ADMISSION_BATCH, words] for `admit`; unused rows go to no slot."""
    assert len(admissions) <= ADMISSION_BATCH
    layout = _layout(sizes, is_rare=False)
    packed = np.zeros((ADMISSION_BATCH, _num_words(layout)), np.int32)
    packed[:, 0] = sizes.num_slots + 1  # past the trash slot, so dropped
    for row, admission in zip(packed, admissions, strict=False):
        row[0] = admission.slot
        for field, columns in layout.items():
            assert field.fill is not None
            _write(row, columns, field.fill(admission), field.default)
    return packed


def admit(state: DeviceState, packed: jax.Array, sizes: SlotSizes) -> DeviceState:
    """Stores the parameters and pages of newly admitted requests (`pack_admissions`) in their slots."""
    slots = packed[:, 0]
    asked: AskedWords = state[ASKED]
    words = asked.words.at[slots].set(packed[:, : asked.words.shape[1]], mode="drop")
    filled: DeviceState = {ASKED: replace(asked, words=words)}
    for field, columns in _layout(sizes, is_rare=False).items():
        if not field.is_asked:
            filled[field.name] = state[field.name].at[slots].set(columns.of(packed), mode="drop")
    return state | filled


def rare_words(sizes: SlotSizes) -> int:
    """Returns the number of words of what `pack_rare` returns."""
    return _num_words(_layout(sizes, is_rare=True))


def _num_words(layout: dict[SlotField, FieldColumns]) -> int:
    return max(field.columns.stop for field in layout.values())


def pack_rare(admission: Admission, sizes: SlotSizes) -> NDArray[np.int32] | None:
    """Returns i32[rare_words(sizes)] for `admit_rare`, or None for a request that asks for nothing rare."""
    layout = _layout(sizes, is_rare=True)
    values = [field.fill and field.fill(admission) for field in layout]
    if all(value is None for value in values):
        return None
    packed = np.zeros(rare_words(sizes), np.int32)
    packed[0] = admission.slot
    for (field, columns), value in zip(layout.items(), values, strict=True):
        _write(packed, columns, () if value is None else value, field.default)
    return packed


def pack_nothing_rare(sizes: SlotSizes) -> NDArray[np.int32]:
    """Returns i32[rare_words(sizes)] for `admit_rare` that change no slot."""
    packed = np.zeros(rare_words(sizes), np.int32)
    packed[0] = sizes.num_slots + 1  # past the trash slot, so dropped
    return packed


def admit_rare(state: DeviceState, packed: jax.Array, sizes: SlotSizes) -> DeviceState:
    """Stores the rare fields of one newly admitted request (`pack_rare`) in its slot."""
    slot = packed[0]
    values = {field: columns.of(packed[None])[0] for field, columns in _layout(sizes, is_rare=True).items()}
    return state | {
        field.name: state[field.name]
        .at[slot]
        .set(values.get(field, np.dtype(field.dtype).type(field.default)), mode="drop")
        for field in SLOT_FIELDS
        if field.is_rare
    }


def _write(row: NDArray[np.int32], columns: FieldColumns, value: Any, default: float) -> None:
    """Writes what an admission fills into a field to its place in `row`."""
    at = row[columns.columns].view(columns.dtype).reshape(columns.shape or (1,))
    values = np.atleast_1d(np.asarray(value, columns.dtype))
    at[..., : values.shape[-1]] = values
    at[..., values.shape[-1] :] = default


def pack_recalls(admission: Admission) -> list[NDArray[np.int32]]:
    """Returns the arguments of `recall` for the tokens of a cached prefix, i32[RECALL_WORDS] each."""
    return _pack_tokens(admission.slot, admission.request.token_ids()[: admission.num_cached])


def pack_recounts(admission: Admission) -> list[NDArray[np.int32]]:
    """Returns the arguments of `recount`, i32[RECALL_WORDS] each, which only a preempted request has.

    No other request has output tokens when it is admitted.
    """
    request = admission.request
    if not len(request.output_token_ids) or not request.sampling_params.is_penalized:
        return []
    return _pack_tokens(admission.slot, request.output_token_ids)


def _pack_tokens(slot: int, tokens: TokenIds) -> list[NDArray[np.int32]]:
    packed = []
    for first in range(0, len(tokens), RECALL_TOKENS):
        part = tokens[first : first + RECALL_TOKENS]
        packed.append(np.zeros(RECALL_WORDS, np.int32))
        packed[-1][:3] = slot, first, len(part)
        packed[-1][3 : 3 + len(part)] = part
    return packed


def recall(state: DeviceState, packed: jax.Array) -> DeviceState:
    """Stores tokens of a cached prefix, which no step computes, in their slot's history."""
    slot, first, count = packed[0], packed[1], packed[2]
    index = jnp.arange(RECALL_TOKENS)
    positions = jnp.where(index < count, first + index, state[HISTORY.name].shape[1])
    return record(state, slot, positions, packed[3:])


def recount(state: DeviceState, packed: jax.Array) -> DeviceState:
    """Counts tokens that a preempted request had sampled before. They add to those that its slot counted already."""
    slot, count, tokens = packed[0], packed[2], packed[3:]
    counts = state[OUTPUT_COUNTS.name]
    at = jnp.where(jnp.arange(RECALL_TOKENS) < count, tokens, counts.shape[1])
    more = jnp.zeros(counts.shape[1], jnp.int32).at[at].add(1, mode="drop")
    total = jnp.minimum(counts[slot].astype(jnp.int32) + more, MAX_COUNT)
    return state | {OUTPUT_COUNTS.name: counts.at[slot].set(total.astype(counts.dtype))}


def state_bytes(sizes: SlotSizes) -> int:
    """Returns how many bytes of each device the slot state takes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state_shapes(sizes)))
