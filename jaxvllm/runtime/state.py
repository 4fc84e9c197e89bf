"""Device state: what the device remembers of every slot, so that a decode step needs almost nothing sent.

Arrays have `num_slots + 1` rows. The last is the trash slot: padding rows read and write there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxvllm.core.plan import Admission
from jaxvllm.core.slots import MAX_STOP_IDS, NO_TOKEN

# Requests that one `admit` call brings in. One padded call costs what one request would; 64 arriving at once cost 8.
ADMISSION_BATCH = 8


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["temperature", "top_k", "top_p", "min_p", "seed", "min_length", "stop_ids", "num_logprobs"],
    meta_fields=[],
)
@dataclass(frozen=True)
class SamplingState:
    """Sampling parameters of N slots or rows, in vLLM's meaning; `temperature` 0 is greedy, `top_k` 0 is off."""

    temperature: jax.Array  # f32[N]
    top_k: jax.Array  # i32[N]
    top_p: jax.Array  # f32[N]
    min_p: jax.Array  # f32[N]
    seed: jax.Array  # u32[N, 2]
    min_length: jax.Array  # i32[N]: no stop id is sampled at a position below it
    stop_ids: jax.Array  # i32[N, MAX_STOP_IDS], padded with NO_TOKEN
    num_logprobs: jax.Array  # i32[N]; -1 = none wanted

    def take(self, rows: jax.Array) -> "SamplingState":
        """The parameters of `rows`."""
        return jax.tree.map(lambda x: x[rows], self)


@partial(jax.tree_util.register_dataclass, data_fields=["last_token", "page_table", "sampling"], meta_fields=[])
@dataclass(frozen=True)
class DeviceState:
    """All slots. Donated to every call that changes it."""

    last_token: jax.Array  # i32[N + 1]: input of the slot's next decode row
    page_table: jax.Array  # i32[N + 1, max_pages]
    sampling: SamplingState

    @classmethod
    def create(cls, num_slots: int, max_pages: int) -> "DeviceState":
        """The state of an engine without requests."""
        n = num_slots + 1
        return cls(
            last_token=jnp.zeros(n, jnp.int32),
            page_table=jnp.zeros((n, max_pages), jnp.int32),
            sampling=SamplingState(
                temperature=jnp.zeros(n, jnp.float32),
                top_k=jnp.zeros(n, jnp.int32),
                top_p=jnp.ones(n, jnp.float32),
                min_p=jnp.zeros(n, jnp.float32),
                seed=jnp.zeros((n, 2), jnp.uint32),
                min_length=jnp.zeros(n, jnp.int32),
                stop_ids=jnp.full((n, MAX_STOP_IDS), NO_TOKEN, jnp.int32),
                num_logprobs=jnp.full(n, -1, jnp.int32),
            ),
        )

    @property
    def trash_slot(self) -> int:
        return len(self.last_token) - 1


# An admission is one row of 32-bit words: its slot, the sampling parameters in field order, its pages.
_SCALARS = ("temperature", "top_k", "top_p", "min_p", "min_length", "num_logprobs")
_FLOATS = ("temperature", "top_p", "min_p")
_SEED = 1 + len(_SCALARS)
_STOP_IDS = _SEED + 2
_PAGES = _STOP_IDS + MAX_STOP_IDS


def pack_admissions(admissions: Sequence[Admission], num_slots: int, max_pages: int) -> NDArray[np.int32]:
    """i32[ADMISSION_BATCH, words] for `admit`; unused rows go to no slot."""
    assert len(admissions) <= ADMISSION_BATCH
    packed = np.zeros((ADMISSION_BATCH, _PAGES + max_pages), np.int32)
    # Past the trash slot, so dropped: that one must never want log-probabilities or top_p, for padding rows read it.
    packed[:, 0] = num_slots + 1
    floats = packed.view(np.float32)
    for row, admission in enumerate(admissions):
        request, params = admission.request, admission.request.sampling_params
        packed[row, 0] = admission.slot
        floats[row, 1] = 0.0 if params.greedy else params.temperature
        packed[row, 2] = max(params.top_k, 0)
        floats[row, 3] = params.top_p
        floats[row, 4] = params.min_p
        packed[row, 5] = request.num_prompt_tokens + params.min_tokens
        packed[row, 6] = -1 if params.logprobs is None else params.logprobs
        packed[row, _SEED:_STOP_IDS] = np.array([request.seed & (2**64 - 1)], np.uint64).view(np.int32)
        packed[row, _STOP_IDS:_PAGES] = NO_TOKEN
        packed[row, _STOP_IDS : _STOP_IDS + len(request.stop_token_ids)] = request.stop_token_ids
        packed[row, _PAGES : _PAGES + len(admission.pages)] = admission.pages
    return packed


def admit(state: DeviceState, packed: jax.Array) -> DeviceState:
    """Stores the parameters and pages of newly admitted requests (`pack_admissions`) in their slots."""
    slots = packed[:, 0]
    news: dict[str, jax.Array] = {}
    for column, name in enumerate(_SCALARS, 1):
        word = packed[:, column]
        news[name] = jax.lax.bitcast_convert_type(word, jnp.float32) if name in _FLOATS else word
    news["seed"] = jax.lax.bitcast_convert_type(packed[:, _SEED:_STOP_IDS], jnp.uint32)
    news["stop_ids"] = packed[:, _STOP_IDS:_PAGES]
    olds = {field.name: getattr(state.sampling, field.name) for field in fields(SamplingState)}
    return replace(
        state,
        page_table=state.page_table.at[slots].set(packed[:, _PAGES:], mode="drop"),
        sampling=SamplingState(**{name: olds[name].at[slots].set(news[name], mode="drop") for name in olds}),
    )
