"""The slot table: all running requests as a structure of arrays, so that a decode step is vectorised.

A request owns one slot (a row number) from admission to release. Three counters explain the scheduler:

    num_computed <= num_tokens    the most positions whose KV the steps dispatched so far compute
    num_known    <= num_tokens    tokens whose ids the host has seen
    num_tokens                    the most tokens there may be, those still in flight on the device included

How far a row really got is known on the device first. The host plans with these bounds, and `Scheduler.update` lowers
them when a step yielded fewer tokens than it might have.
A slot is prefilling while `num_computed < prefill_len` and decoding afterwards; decoding, it always has exactly
one token to compute (`num_tokens - num_computed == 1`).
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from jaxvllm.core.readout import READOUTS
from jaxvllm.core.request import Request, TokenIds

# Stop ids (EOS included) a request may have. One cache line of int32 per slot on host and device; vLLM users
# pass a handful.
MAX_STOP_IDS = 32
NO_TOKEN = -1

type SlotIds = NDArray[np.int32] | NDArray[np.int64]


def some(flags: NDArray[np.bool_]) -> bool:
    """Returns whether any of `flags` is set.

    For the few hundred of a step it takes a third of the time of `flags.any()`.
    """
    return bool(np.count_nonzero(flags))


class SlotTable:
    """Per-slot arrays; row `s` means something only while `active[s]`."""

    def __init__(self, num_slots: int, max_model_len: int):
        self.num_slots = num_slots
        self.tenants: list[Request | None] = [None] * num_slots
        self.active = np.zeros(num_slots, np.bool_)
        # + 1 where outputs in flight are to be ignored: at every release, and when their tokens became known, or wrong.
        self.epoch = np.zeros(num_slots, np.int32)
        # What only some tenants have, and a slot without a tenant never. So a step looks at its rows only where `some`
        # slot has it.
        traits = np.zeros((8 + len(READOUTS), num_slots), np.bool_)
        self.watched = traits[0]  # somebody wants each token as it comes
        self.wants_logprobs = traits[1]  # those that every step can yield
        self.is_constrained = traits[2]  # the host has a say in each token
        self.detects_repetition = traits[3]
        self.is_beam = traits[4]  # one of several that search for the same request
        self.is_undecided = traits[5]  # a beam whose next token the host has not chosen yet
        self.has_rules = traits[6]  # something in the parameters changes the logits
        self.has_adapter = traits[7]
        self.num_prompt = np.zeros(num_slots, np.int32)
        self.prefill_len = np.zeros(num_slots, np.int32)
        self.num_computed = np.zeros(num_slots, np.int32)
        self.num_known = np.zeros(num_slots, np.int32)
        self.num_tokens = np.zeros(num_slots, np.int32)
        self.num_unreported = np.zeros(num_slots, np.int32)  # the last of the known ones that no update has reported
        self.limit = np.zeros(num_slots, np.int32)
        self.min_tokens = np.zeros(num_slots, np.int32)
        self.num_stop_ids = np.zeros(num_slots, np.int32)
        self.stop_ids = np.full((num_slots, MAX_STOP_IDS), NO_TOKEN, np.int32)
        # One more than the model's length: a prompt that long may be scored, and the step samples a token after it.
        self.token_ids = np.zeros((num_slots, max_model_len + 1), np.int32)
        # The one that was freed first is the next: until then the device remembers its tenant's tokens, for drafts.
        self._free = deque(range(num_slots))
        of_tenants = (value for name, value in vars(self).items() if name != "epoch")
        self._values = tuple(value for value in of_tenants if isinstance(value, np.ndarray))
        self._traits = traits
        self._readouts = traits[8:]  # of `READOUTS`, in order
        self._reserved: set[int] = set()  # neither free nor active

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_active(self) -> int:
        return self.num_slots - len(self._free) - len(self._reserved)

    def tenant(self, slot: int) -> Request:
        """Returns the request that has `slot`."""
        tenant = self.tenants[slot]
        assert tenant is not None, f"slot {slot} is vacant"
        return tenant

    def prefilling(self) -> SlotIds:
        return (self.active & (self.num_computed < self.prefill_len)).nonzero()[0]

    def decoding(self) -> SlotIds:
        """Returns the slots with one token to compute. A slot whose last token may be in flight has none."""
        is_decoding = self.active & (self.num_computed >= self.prefill_len) & (self.num_tokens < self.limit)
        found: NDArray[np.int64] = (is_decoding & ~self.is_undecided).nonzero()[0]
        return found

    def occupy(self, request: Request, num_computed: int, watched: bool) -> int:
        """Gives `request` a slot, whose first `num_computed` positions are cached."""
        slot = self._free.popleft()
        token_ids = request.token_ids()
        count = len(token_ids)
        params = request.sampling_params
        self.tenants[slot] = request
        self.active[slot] = True
        self.watched[slot] = watched
        self.wants_logprobs[slot] = params.wants_logprobs and not params.wants_distributions
        self.has_rules[slot] = params.has_logit_rules
        self.has_adapter[slot] = request.adapter is not None
        self._readouts[:, slot] = [readout.wants(request) for readout in READOUTS]
        self.is_constrained[slot] = request.constraint is not None
        self.detects_repetition[slot] = request.repetition is not None
        self.num_prompt[slot] = request.num_prompt_tokens
        self.prefill_len[slot] = self.num_known[slot] = self.num_tokens[slot] = count
        self.num_computed[slot] = num_computed
        self.num_unreported[slot] = request.num_unreported
        self.limit[slot] = request.limit
        self.min_tokens[slot] = params.min_tokens
        self.num_stop_ids[slot] = len(request.stop_token_ids)
        self.stop_ids[slot] = NO_TOKEN
        self.stop_ids[slot, : len(request.stop_token_ids)] = request.stop_token_ids
        self.token_ids[slot, :count] = token_ids
        return slot

    def vacate(self, slot: int, reserve: bool = False) -> None:
        """Frees or reserves `slot`. What its tenant computed and holds must have been read before."""
        self.tenants[slot] = None
        self.active[slot] = False
        self._traits[:, slot] = False
        self.num_stop_ids[slot] = 0
        self.epoch[slot] += 1
        if reserve:
            self._reserved.add(slot)
        else:
            self._free.append(slot)

    def reserve(self, count: int) -> list[int]:
        """Takes `count` free slots for beams to come."""
        slots = [self._free.popleft() for _ in range(count)]
        self._reserved.update(slots)
        return slots

    def unreserve(self, slots: Sequence[int]) -> None:
        """Frees slots that were reserved."""
        self._reserved.difference_update(slots)
        self._free.extend(slots)

    def fork(self, source: int, slot: int) -> None:
        """Gives the tenant of `source` one more slot, a reserved one, with everything that `source` has."""
        self._reserved.remove(slot)
        self.tenants[slot] = self.tenants[source]
        for values in self._values:
            values[slot] = values[source]
        self._traits[:, slot] = self._traits[:, source]

    def have_tokens_read(self, slots: SlotIds) -> bool:
        """Returns whether any of `slots` wants something to be read before each of its tokens is sampled."""
        if not some(self._readouts):
            return False
        each = zip(READOUTS, self._readouts, strict=True)
        return any(some(wants[slots]) for readout, wants in each if readout.reads != "prompts")

    def readouts(
        self, rows: SlotIds, are_prompts: NDArray[np.bool_], yield_tokens: NDArray[np.bool_]
    ) -> dict[str, NDArray[np.bool_]]:
        """Returns which rows of a step want each readout, bool[len(rows)], without those that no row wants."""
        if not some(self._readouts):
            return {}
        are_read = {"prompts": are_prompts, "tokens": yield_tokens, "all": are_prompts | yield_tokens}
        wanted = {
            readout.name: wants[rows] & are_read[readout.reads]
            for readout, wants in zip(READOUTS, self._readouts, strict=True)
            if some(wants)
        }
        return {name: flags for name, flags in wanted.items() if some(flags)}

    def stops(self, slots: SlotIds, tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Returns whether `tokens[i]` is a stop id of `slots[i]`, bool[len(slots)]."""
        most = int(self.num_stop_ids.max())  # a few of many columns
        if not most:
            return np.zeros(len(slots), np.bool_)
        stops: NDArray[np.bool_] = (self.stop_ids[:, :most][slots] == tokens[:, None]).any(axis=1)
        return stops

    def outputs(self, slot: int) -> TokenIds:
        """Returns the generated tokens of `slot` that the host knows, as a copy."""
        return self.token_ids[slot, self.num_prompt[slot] : self.num_known[slot]].copy()

    def append_tokens(self, slots: SlotIds, tokens: NDArray[np.int32], counts: NDArray[np.int32]) -> None:
        """Stores the first `counts[i]` of `tokens[i]`, which are newly known; `slots` are distinct."""
        known = self.num_known[slots]
        if tokens.shape[1] == 1 and counts.all():  # nearly every step, in a third of the time
            self.token_ids[slots, known] = tokens[:, 0]
        else:
            rows, at = np.nonzero(np.arange(tokens.shape[1]) < counts[:, None])
            self.token_ids[slots[rows], known[rows] + at] = tokens[rows, at]
        self.num_known[slots] = known + counts

    def append_forced(self, slot: int, token_ids: Sequence[int]) -> None:
        """Stores the tokens that follow those that are known, whatever is in flight. They are computed next."""
        known = int(self.num_known[slot])
        if self.num_tokens[slot] > known:
            self.epoch[slot] += 1
            self.num_computed[slot] = min(self.num_computed[slot], known)  # what is in flight may be other tokens
        end = known + len(token_ids)
        self.token_ids[slot, known:end] = token_ids
        self.num_known[slot] = self.num_tokens[slot] = end
        self.num_unreported[slot] += len(token_ids)

    def rewind(self, slot: int) -> None:
        """Forgets all tokens of `slot` that are in flight. Its last known one is to be computed again."""
        self.epoch[slot] += 1
        self.num_tokens[slot] = self.num_known[slot]
        self.num_computed[slot] = self.num_known[slot] - 1

    def check_invariants(self) -> None:
        active = np.flatnonzero(self.active)
        slots = sorted([*self._free, *self._reserved, *active.tolist()])
        assert slots == list(range(self.num_slots)), "a slot leaked"
        assert self.num_active == len(active)
        assert not some(self._traits[:, ~self.active]) and not self.num_stop_ids[~self.active].any(), "a trait is left"
        assert not (self.is_undecided & ~self.is_beam).any() and not (self.is_beam & ~self.active).any()
        assert all((self.tenants[s] is not None) == self.active[s] for s in range(self.num_slots))
        computed, known, tokens = self.num_computed[active], self.num_known[active], self.num_tokens[active]
        prefill, limit = self.prefill_len[active], self.limit[active]
        assert (computed < tokens).all(), "more KV computed than there are tokens to feed"
        assert (known <= tokens).all() and (tokens <= limit).all() and (prefill <= known).all()
        assert (self.num_unreported[active] <= known - self.num_prompt[active]).all(), "a prompt's token is an output"
        decoding = computed >= prefill
        assert (tokens[decoding] - computed[decoding] == 1).all(), "a decoding slot has one token to compute"
        assert (tokens[~decoding] == prefill[~decoding]).all(), "a prefilling slot has sampled"
