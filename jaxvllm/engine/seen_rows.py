"""The rows that may have drafts: the proposer has seen every step of their requests."""

import numpy as np
from numpy.typing import NDArray

from jaxvllm.core.slots import SlotIds
from jaxvllm.core.step_plan import StepPlan


class SeenRows:
    """The host's knowledge of the requests of which the proposer has seen every step.

    The device decides for each row; the host needs to know whether asking is of use.
    """

    def __init__(self, num_slots: int) -> None:
        self._missed = np.zeros(num_slots, np.bool_)

    def dispatched(self, plan: StepPlan, is_blind: bool) -> None:
        """Takes in that the step `plan` was dispatched, and whether the proposer sees it."""
        for admission in plan.admissions:
            self._missed[admission.slot] = False
        if is_blind:
            self._missed[plan.slots] = True

    def all_steps_of(self, slots: SlotIds) -> NDArray[np.bool_]:
        """Returns which of `slots` may have drafts, bool[len(slots)]."""
        return ~self._missed[slots]
