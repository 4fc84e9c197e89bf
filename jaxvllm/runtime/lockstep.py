"""`Lockstep`: the replicas of one mesh, which share experts, so that their steps are one program.

Everything else is each replica's own: its pages, its slots, and the calls that change these. Such a call is made for
all replicas, and changes nothing in the others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from jaxvllm.core.lora import LoraAdapter
from jaxvllm.core.step_plan import PageEntries, StepPlan
from jaxvllm.runtime.batch import pack
from jaxvllm.runtime.buckets import Bucket
from jaxvllm.runtime.multihost.calls import (
    Admit,
    AdmitRare,
    Call,
    FillSideRows,
    ForkSlots,
    Forward,
    Mask,
    Read,
    Recall,
    Recount,
    SampleSome,
    Step,
)
from jaxvllm.runtime.page_copies import PageContents
from jaxvllm.runtime.plan_runner import HeldStep, InFlight, PlanRunner, StepResult
from jaxvllm.runtime.readouts import DEVICE_READOUTS
from jaxvllm.runtime.runner import Runner


class Lockstep:
    """Runs a step of all replicas at once: the tokens of all of them come to every device's experts in each layer.

    A replica that has no plan takes part without tokens. All have the smallest bucket that holds each of the plans.
    """

    def __init__(self, devices: Runner):
        """Makes the replicas of the mesh of `devices`, which must run no plans itself."""
        self.devices = devices
        self.num_steps = 0  # dispatched so far
        self.replicas = tuple(LockstepReplica(self, index) for index in range(devices.num_replicas))
        none = np.zeros(0, np.int32)
        no_pages = (PageEntries.none(),) * devices.sizes.num_groups
        self._to_sample: set[int] = set()  # replicas that have a part of the last forward pass yet to sample
        self._no_plan = StepPlan(none, none, none, none, no_pages, none, 0, none, none, wants_logprobs=False)

    def dispatch(self, plans: Sequence[StepPlan | None]) -> list[InFlight | HeldStep | None]:
        """Starts a step of every replica that has a plan, and returns at once.

        It returns what `PlanRunner.dispatch` does for each of them. No replica may have a step that is held.
        """
        given = {index: plan for index, plan in enumerate(plans) if plan is not None}
        steps: dict[int, InFlight | HeldStep] = {}
        if given:
            self.num_steps += 1
            for index, plan in given.items():
                self.replicas[index].bring_in(plan.admissions)
            bucket = self.devices.programs.choose(*given.values())
            packed = np.concatenate([pack(plan or self._no_plan, bucket, self.devices.sizes) for plan in plans])
            if bucket.is_decode:
                steps |= self._in_flight(given, bucket, self.devices.call(Step(bucket, packed)))
            else:
                self.devices.call(Forward(bucket, packed))
                self._to_sample = set(given)
                steps |= {index: HeldStep(plan, bucket) for index, plan in given.items() if plan.is_masked}
                steps |= self.sample({index: plan for index, plan in given.items() if not plan.is_masked}, bucket)
        return [steps.get(index) for index in range(len(plans))]

    def sample(self, plans: Mapping[int, StepPlan], bucket: Bucket) -> dict[int, InFlight]:
        """Starts the second half of the step for these replicas, and what must come before it."""
        if not plans:
            return {}
        count = len(self.replicas)
        for number, readout in enumerate(DEVICE_READOUTS):
            wanted = {
                index: readout.calls(plan, bucket) for index, plan in plans.items() if readout.name in plan.readouts
            }
            for words in zip_longest(*wanted.values()):
                of_replicas = dict(zip(wanted, words, strict=True))
                self.devices.call(Read(bucket, _joined([of_replicas.get(index) for index in range(count)]), number))
        turns = np.array([index in plans for index in range(count)], np.int32)
        self._to_sample -= plans.keys()
        call = SampleSome(bucket, turns, is_last=not self._to_sample)
        return self._in_flight(plans, bucket, self.devices.call(call))

    def change(self, call: Call, index: int) -> None:
        """Makes a call that changes the slots of one replica."""
        match call:
            case Admit() | AdmitRare() | Recall() | Recount() | FillSideRows() | Mask() | ForkSlots():
                parts = [self.devices.unchanging[type(call)]] * len(self.replicas)
                parts[index] = call.packed
                self.devices.call(replace(call, packed=np.concatenate(parts)))
            case _:
                raise AssertionError(f"{call} is for all replicas together")

    def _in_flight(
        self, plans: Mapping[int, StepPlan], bucket: Bucket, result: StepResult | None
    ) -> dict[int, InFlight]:
        assert result is not None
        steps = {}
        for index, plan in plans.items():
            own = replace(result, reports={name: result.reports[name] for name in plan.readouts})
            steps[index] = self.replicas[index].in_flight(plan, bucket, self.devices.part(own, index))
        return steps


class LockstepReplica(PlanRunner):
    """The host's half of one replica among others. `Lockstep` dispatches its steps together with theirs."""

    def __init__(self, group: Lockstep, index: int):
        devices = group.devices
        self.programs, self.sizes, self.side = devices.programs, devices.sizes, devices.side
        self.overhead = devices.overhead
        self._group = group
        self._index = index

    def take_pages(self, pages: Sequence[NDArray[np.int32]]) -> list[PageContents]:
        return self._group.devices.take_pages(pages, self._index)

    def put_pages(self, pages: Sequence[NDArray[np.int32]], contents: Sequence[NDArray[np.generic]]) -> None:
        self._group.devices.put_pages(pages, contents, self._index)

    def bring_adapter(self, slot: int, adapter: LoraAdapter) -> None:
        self._group.devices.bring_adapter(slot, adapter, self._index)

    def _sample(self, plan: StepPlan, bucket: Bucket) -> InFlight:
        return self._group.sample({self._index: plan}, bucket)[self._index]

    def call(self, call: Call) -> StepResult | None:
        self._group.change(call, self._index)
        return None


def _joined(parts: Sequence[NDArray[np.int32] | None]) -> NDArray[np.int32]:
    """Returns the words of all replicas. A replica that has none gets zeros, and nobody reads what comes of them."""
    like = next(words for words in parts if words is not None)
    return np.concatenate([np.zeros_like(like) if words is None else words for words in parts])
