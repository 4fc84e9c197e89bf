"""Constrained rows: running requests whose tokens a constraint on the host decides, such as a grammar.

A token under a mask has a price: its step waits between the forward pass and sampling until the host knows all tokens
before it, and no row of that step takes more than one token. But most tokens of a model that does what it is asked are
allowed anyhow. So a row guesses where `Request.guesses` permits it: it decodes like a free row, in bursts too, and
`take` looks at its tokens when they arrive. Up to the first one that is not allowed they are what masks would have
given. From there on the row starts again, with masks for a while.

How many tokens a row guesses at once, and for how long it uses masks after a wrong guess, follows its own success: a
model that does not do what it is asked soon guesses hardly ever.
"""

import logging
from collections import OrderedDict
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from jaxvllm.core.request import FinishReason, Request
from jaxvllm.core.slots import SlotIds, SlotTable, some
from jaxvllm.core.step_plan import Finished, Ints, StepPlan

logger = logging.getLogger(__name__)

# Masks after a wrong guess: a wrong guess costs about two steps, and four masked steps cost about one more than free
# ones would. Every further wrong guess makes the pause four times longer, every right one halves it.
FIRST_PAUSE = 4
LONGEST_PAUSE = 256
MOST_GUESSES = 64
MOST_MASKS_FIRST = 63
# Forms of whose rows it is remembered how they fared: those whose grammars are kept.
MOST_FORMS = 256


class ConstrainedRows:
    """The scheduler's part for constraints: tokens that they force, masks, and guesses that it checks."""

    def __init__(self, slots: SlotTable, may_guess: bool = True):
        """Begins without constrained rows. They guess only if a wrong guess may be computed again (`may_guess`).

        A state has taken the wrong token in by then.
        """
        self._slots = slots
        self._may_guess = may_guess
        # Of slots whose tenant is constrained.
        self._num_guesses = np.zeros(slots.num_slots, np.int32)  # in the next step, at most; 0: it waits for a mask
        self._masks_left = [0] * slots.num_slots  # tokens before it guesses again
        self._pause = [0] * slots.num_slots  # tokens that a wrong guess would make wait for masks
        self._form = [0] * slots.num_slots  # the hash of the tenant's form, which may be a megabyte
        self._starts_again = np.zeros(slots.num_slots, np.bool_)  # from its last known token, behind a wrong guess
        # Tokens before a new row guesses, by its form, the one used longest ago first: rows with the same form tell how
        # it will fare.
        self._masks_first: OrderedDict[int, int] = OrderedDict()

    def open(self, slot: int) -> None:
        """Takes note of the new tenant of `slot`."""
        request = self._tenant(slot)
        self._form[slot] = hash(request.sampling_params.structured_outputs)
        masks_first = self._masks_first.get(self._form[slot], 0)
        self._num_guesses[slot] = masks_first == 0 and self._guesses(request)
        self._pause[slot] = FIRST_PAUSE
        self._masks_left[slot] = masks_first
        self._starts_again[slot] = False

    def row_tokens(self, decode: SlotIds, most: int) -> int:
        """Returns how many tokens, `most` at most, a row may get in a step of the slots `decode`.

        That is 1 if one of the slots waits for a mask or starts again. Otherwise it is the most that any of them may
        get.
        """
        if not len(decode) or some(self.waits(decode)):
            return 1
        return int(self.most(decode, most).max())

    def waits(self, decode: SlotIds) -> NDArray[np.bool_]:
        """Returns which of the slots `decode` wait for a mask in their next step, or start again, bool[len(decode)]."""
        waits: NDArray[np.bool_] = self._slots.is_constrained[decode]
        if some(waits):
            waits &= (self._num_guesses[decode] == 0) | self._starts_again[decode]
        return waits

    def most(self, decode: SlotIds, row_tokens: int) -> Ints:
        """Returns how many tokens, `row_tokens` at most, each of `decode` may get in a step: constrained ones get their
        guesses.
        """
        most = np.full(len(decode), row_tokens, np.int32)
        is_constrained = self._slots.is_constrained[decode]
        if some(is_constrained):
            most[is_constrained] = np.clip(self._num_guesses[decode[is_constrained]], 1, row_tokens)
        return most

    def forced(self, at: SlotIds, room: int) -> dict[int, list[int]]:
        """Returns the tokens after the known ones of the constrained slots `at` that are to be computed at once, by
        slot.

        Constraints force these tokens. They are more than what is in flight anyhow, and leave each slot one to sample.
        Together the rows compute at most `room` tokens more than one each.
        """
        slots = self._slots
        found: dict[int, list[int]] = {}
        for slot in at.tolist():
            request = self._tenant(slot)
            assert request.constraint is not None
            if not request.constraint.forced():  # as nearly always
                continue
            known = int(slots.num_known[slot])
            ahead = int(slots.num_tokens[slot]) - known
            tokens = request.forced(min(room - self._num_more(slot), int(slots.limit[slot]) - known - 1))
            if len(tokens) > ahead:
                found[slot] = tokens
                room -= len(tokens) + self._num_more(slot)
        return found

    def num_extra(self, forced: Mapping[int, list[int]]) -> int:
        """Returns how many tokens more than one each the slots of `forced` compute."""
        return sum(len(tokens) + self._num_more(slot) for slot, tokens in forced.items())

    def _num_more(self, slot: int) -> int:
        """Returns how many tokens more than one a row computes beside forced ones.

        It is 0 where nothing is in flight, since the last known token comes first then, and -1 elsewhere.
        """
        known = int(self._slots.num_known[slot])
        return known - min(int(self._slots.num_computed[slot]), known) - 1

    def given(self, decode: SlotIds, forced: Mapping[int, list[int]]) -> dict[int, list[int]]:
        """Returns the tokens that slots of `decode` compute in chunks: `forced` ones, or none after their last known
        token.

        A slot without forced tokens starts again, since a guess after its last known token was wrong.
        """
        again = decode[self._slots.is_constrained[decode] & self._starts_again[decode]]
        return {slot: forced.get(slot, []) for slot in sorted({*forced, *again.tolist()})}

    def take_forced(self, slot: int, tokens: list[int]) -> None:
        """Makes `tokens`, or none, known behind the known ones of `slot`, which computes from there on."""
        self._starts_again[slot] = False
        self._slots.append_forced(slot, tokens)
        constraint = self._tenant(slot).constraint
        assert constraint is not None
        constraint.take_forced(tokens)

    def masked(self, rows: SlotIds, num_decode: int, max_new: Ints) -> NDArray[np.bool_] | None:
        """Returns which `rows` of a plan, decode rows first, wait for a mask, bool[R], or None if none of them does."""
        if not some(self._slots.is_constrained):
            return None
        waits = self._slots.is_constrained[rows] & (max_new > 0)
        waits[:num_decode] &= self._num_guesses[rows[:num_decode]] == 0
        return waits if some(waits) else None

    def masks(self, plan: StepPlan, num_words: int) -> tuple[list[tuple[int, Ints]], list[Finished]]:
        """Returns the slots of `plan` that wait for a mask and still have their tenant, with the masks i32[num_words].

        It also returns the ends of requests whose constraint fails.
        """
        masks: list[tuple[int, Ints]] = []
        failed: list[Finished] = []
        if plan.masked is None:
            return masks, failed
        is_present = self._slots.epoch[plan.slots] == plan.epochs
        for slot in plan.slots[plan.masked & is_present].tolist():
            request = self._tenant(slot)
            assert request.constraint is not None
            words = np.zeros(num_words, np.int32)
            request.constraint.fill(words)
            if request.constraint.failure is None:
                masks.append((slot, words))
            else:
                failed.append(_failure(request, request.constraint.failure))
        return masks, failed

    def take(self, plan: StepPlan, rows: SlotIds, at: SlotIds, tokens: Ints, counts: Ints) -> dict[int, Finished]:
        """Tells the constraints of the slots `at` what came in `rows` of `plan`, `counts[i]` of `tokens[i]`.

        Lowers the counts of rows with a wrong guess to the tokens before it: these rows start again. Returns the ends
        of the requests that end because of what came, by their index in `at`; a request that its last token ends
        anyhow may be among them.
        """
        ended: dict[int, Finished] = {}
        for index in np.flatnonzero(self._slots.is_constrained[at] & (counts > 0)).tolist():
            slot, came = int(at[index]), tokens[index, : counts[index]].tolist()
            is_guess = plan.masked is None or not plan.masked[rows[index]]
            num_taken, end = self._take_row(slot, came, is_guess)
            if end is not None:
                ended[index] = end
            elif num_taken < len(came):
                self._starts_again[slot] = True
            counts[index] = num_taken
            self._learn(slot, is_guess, is_right=num_taken == len(came))
        return ended

    def rewind(self, at: SlotIds) -> None:
        """Forgets what is in flight of those slots of `at` that have to start again."""
        for slot in at[self._slots.is_constrained[at] & self._starts_again[at]].tolist():
            self._slots.rewind(slot)

    def _take_row(self, slot: int, tokens: list[int], is_guess: bool) -> tuple[int, Finished | None]:
        """Returns how many of `tokens` the constraint of `slot` takes, and the end of its request if that follows."""
        request, known = self._tenant(slot), int(self._slots.num_known[slot])
        constraint = request.constraint
        assert constraint is not None
        for index, token in enumerate(tokens):
            if constraint.is_complete and self._ends_complete(request, known + index):
                # Its last tokens were forced, so nobody saw that it was complete. An EOS behind them is not asked for.
                return index, Finished(request, FinishReason.STOP)
            was_complete = constraint.is_complete
            if is_guess and (forced := constraint.forced()) and forced[0] != token:
                # A mask would allow the forced token alone, although others may spell the same text.
                return index, None
            if constraint.advance([token]) != 1:
                if constraint.failure is not None:
                    return index, _failure(request, constraint.failure)
                return index, None if is_guess else _exclusion(request, known + index - request.num_prompt_tokens)
            if not is_guess and not request.allows(token):  # what a row draws that has nothing to draw from
                return index, _exclusion(request, known + index - request.num_prompt_tokens)
            if was_complete or (constraint.is_complete and self._ends_complete(request, known + index + 1)):
                return index + 1, Finished(request, FinishReason.STOP)
        return len(tokens), None

    @staticmethod
    def _ends_complete(request: Request, num_tokens: int) -> bool:
        """Returns whether a request of so many tokens ends as soon as it is complete, because EOS would not end it.

        Only EOS may follow then. Any other request goes on until EOS ends it.
        """
        params = request.sampling_params
        return params.ignore_eos or num_tokens - request.num_prompt_tokens < params.min_tokens

    def _learn(self, slot: int, is_guess: bool, is_right: bool) -> None:
        if not is_guess:
            self._masks_left[slot] -= 1
            if self._masks_left[slot] <= 0 and self._guesses(self._tenant(slot)):
                self._num_guesses[slot] = 1
        elif is_right:
            if (guesses := int(self._num_guesses[slot])) < MOST_GUESSES:
                self._num_guesses[slot] = 2 * guesses
            self._pause[slot] = max(self._pause[slot] // 2, FIRST_PAUSE)
            if masks_first := self._masks_first.get(self._form[slot]):
                self._remember(slot, masks_first // 2)
        else:
            self._num_guesses[slot] = 0
            self._masks_left[slot] = self._pause[slot]
            self._pause[slot] = min(4 * self._pause[slot], LONGEST_PAUSE)
            self._remember(slot, min(2 * self._masks_first.get(self._form[slot], 0) + 1, MOST_MASKS_FIRST))

    def _guesses(self, request: Request) -> bool:
        return self._may_guess and request.guesses

    def _remember(self, slot: int, masks_first: int) -> None:
        """Sets how many masks the next row with the form of `slot` has first."""
        form = self._form[slot]
        self._masks_first.pop(form, None)
        if masks_first:
            self._masks_first[form] = masks_first
            if len(self._masks_first) > MOST_FORMS:
                self._masks_first.popitem(last=False)

    def _tenant(self, slot: int) -> Request:
        tenant = self._slots.tenants[slot]
        assert tenant is not None, f"slot {slot} is vacant"
        return tenant


def _failure(request: Request, error: BaseException) -> Finished:
    """Returns the end of `request` by an error of its constraint."""
    logger.error("the constraint of request %s failed", request.request_id, exc_info=error)
    return Finished(request, FinishReason.ERROR, str(error) or type(error).__name__)


def _exclusion(request: Request, num_tokens: int) -> Finished:
    """Returns the end of `request`, which excludes all that its form allows behind `num_tokens`."""
    params = request.sampling_params
    excluding = [name for name in ("allowed_token_ids", "bad_words") if getattr(params, name)]
    if not excluding and request.masks_commute:
        return _failure(request, RuntimeError("the form of the request refuses a token that its mask allows"))
    told = (
        f"{' and '.join(excluding) or 'the logits processors of this engine'} must leave a token that the form of the "
        f"answer allows, and behind {num_tokens} tokens there is none: change the one or the other"
    )
    return Finished(request, FinishReason.ERROR, told, wrong_param=excluding[0] if excluding else "structured_outputs")
