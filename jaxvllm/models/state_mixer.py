"""`StateMixer`: what stands in the place of a layer's attention where the layer keeps a state."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import jax

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.layer_input import LayerInput
from jaxvllm.models.recurrence import RecurrentRule
from jaxvllm.models.state_memory import StateMemory


@dataclass(frozen=True)
class StateMixer(ABC):
    """A mixer of tokens whose groups of heads have a state each, and are shared out among devices."""

    hidden_size: int
    num_groups: int

    head_size: ClassVar[int] = 0  # no rope turns anything
    keeps: ClassVar[bool] = True
    group_name: ClassVar[str]  # what errors call the groups

    @property
    @abstractmethod
    def rule(self) -> RecurrentRule:
        """The rule by which the state of a group takes in a token."""

    @property
    @abstractmethod
    def num_heads(self) -> int:
        """The heads of all groups."""

    @abstractmethod
    def declare(self) -> dict[str, ParamDecl]:
        """Returns its arrays by name, as `Attention.declare` does."""

    @abstractmethod
    def apply(self, weights: Mapping[str, Any], x: jax.Array, kv: Any, given: LayerInput) -> tuple[jax.Array, Any]:
        """Returns the output [T, E] for x [T, E], as `Attention.apply` does."""

    def memory(self, window: int | None) -> StateMemory:
        return StateMemory(self.num_groups, self.rule)

    @property
    def more_memories(self) -> tuple[StateMemory, ...]:
        """The memories that it keeps beside that one."""
        return ()

    def kv_copies(self, size: int) -> int:
        return 1

    def problem(self, size: int) -> str | None:
        if self.num_groups % size:
            return f"{self.num_groups} {self.group_name} do not divide over {size} devices"
        return None

    def spread(self, size: int) -> Self:
        return self

    def shard(self, size: int) -> Self:
        return replace(self, num_groups=self.num_groups // size)
