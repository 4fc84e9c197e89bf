"""`ExpertLora`: what adapters of low rank of a layer's experts are on the devices, and how they are used.

Each expert has two matrices A and B of its own in each slot, and a row that goes to an expert is multiplied by those of
its adapter. PEFT trains them in two forms. Either each expert is a linear module, and gate and up have a part of the
rank each, or one parameter has the matrices of all experts, gate and up together, and both have the first part.

There are two ways. On CPUs the kernel of `pallas_kernels.low_rank` reads the matrices of those experts and slots that
rows have. Elsewhere rows are multiplied by those of all slots of their expert, as groups like those of the experts
themselves, and what is not of a row's own slot is set to zero in between. There are as many slots as there are, because
a slot of experts takes so much memory that there are few.

Where replicas share experts, an expert has slots for the adapters of all of them, because it multiplies rows of all. A
device has its part of the experts, so each replica adds as much memory to it as if its experts were its own.

A norm of DoRA would be one of each row of each expert. PEFT computes none for parameters, and it is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.lora import LayerLora
from jaxvllm.models.ops import AdaptedExperts

# The names of the arrays begin so, and end with that of the matrices.
EXPERT_DOWN, EXPERT_UP = "lora_experts_a_", "lora_experts_b_"


@dataclass(frozen=True)
class ExpertLora:
    """The room of a layer's experts for adapters: that of a layer with these matrices, [X, .., in], for each expert.

    One by one, there is a kernel.
    """

    room: LayerLora
    num_replicas: int = 1  # that share the experts, each with the slots of the room

    @property
    def num_slots(self) -> int:
        """The slots of all replicas."""
        return self.num_replicas * self.room.num_slots

    def declare_one(self, matrices: Mapping[str, ParamDecl]) -> dict[str, ParamDecl]:
        """Returns the arrays of one adapter as it is read, A [X, W, in] and B [X, .., width], as `LayerLora` says."""
        decls = {}
        for name, count in self.room.parts:
            decl = matrices[name]
            (num_experts, *rows, size), (experts, *axes, contracted) = decl.shape, decl.axes
            width, up_width = self.room.width(count), self.room.up_width(count)
            decls[EXPERT_DOWN + name] = ParamDecl(
                (num_experts, width, size), (experts, None, contracted), "zeros", storage="experts"
            )
            decls[EXPERT_UP + name] = ParamDecl(
                (num_experts, *rows, up_width), (experts, *axes, None), "zeros", storage="experts"
            )
        return decls

    def declare(self, matrices: Mapping[str, ParamDecl]) -> dict[str, ParamDecl]:
        """Returns the arrays of all slots."""
        return {name: self._in_slots(name, one) for name, one in self.declare_one(matrices).items()}

    def _in_slots(self, name: str, one: ParamDecl) -> ParamDecl:
        shape, axes = self._order(name, one.shape), self._order(name, one.axes)
        axis = self.slot_axis(name, is_stacked=False)
        if self.room.one_by_one:
            shape.insert(axis, self.num_slots)
            axes.insert(axis, None)
        else:
            shape[axis] *= self.num_slots
        return replace(one, shape=tuple(shape), axes=tuple(axes))

    def _order[Item](self, name: str, of_axes: Sequence[Item]) -> list[Item]:
        """Returns what the axes of an adapter's array have, in the order of the devices: see `LayerLora`."""
        experts, *others = of_axes
        turns = self.room.one_by_one and name.startswith(EXPERT_UP)
        return [experts, others[-1], *others[:-1]] if turns else [experts, *others]

    def on_devices(self, name: str, array: np.ndarray) -> np.ndarray:
        """Returns an adapter's array as it was declared (`declare_one`), as it is in its slot."""
        return array.transpose(self._order(name, range(array.ndim)))

    def slot_axis(self, name: str, is_stacked: bool) -> int:
        """Returns the axis of slots in the arrays of that name, which may be stacks of those of several layers."""
        if self.room.one_by_one:
            return 2 if is_stacked else 1
        return -2 if name.startswith(EXPERT_DOWN) else -1

    def bound(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arrays of a layer whose experts add what the adapters of rows add."""
        adapted = {
            name: AdaptedExperts(
                weights[name],
                weights[EXPERT_DOWN + name],
                weights[EXPERT_UP + name],
                self.num_slots,
                self.room.one_by_one,
            )
            for name, _ in self.room.parts
        }
        return {**weights, **adapted}
