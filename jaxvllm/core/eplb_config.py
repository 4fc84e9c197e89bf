"""The options of experts that move by load, by vLLM's names."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from jaxvllm.core.value_checks import boolean, check_members, integer, json_members

# Fields of vLLM that are no choice here: the values that change nothing, and what to tell who gives another.
_NO_CHOICE: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "policy": ((None, "default"), "there is one way of placing experts"),
    "use_async": ((None, False, True), "experts move between steps, those of one layer at a time"),
    "communicator": ((None,), "collectives of XLA move experts"),
    "log_balancedness_interval": ((None, 1), "there is a line each time that loads were measured"),
}


@dataclass(frozen=True)
class EplbConfig:
    """The times at which experts move, and the number of copies. Raises ValueError for values out of range."""

    window_size: int = 1000  # steps whose loads decide, the last ones; at most step_interval of them
    step_interval: int = 3000  # steps from one placement to the next
    num_redundant_experts: int = 0  # slots beyond one for each expert, in each layer
    log_balancedness: bool = False  # a line in the log when loads were measured

    def __post_init__(self) -> None:
        integer("window_size", self.window_size, 1, 2**31 - 1)
        integer("step_interval", self.step_interval, 1, 2**31 - 1)
        integer("num_redundant_experts", self.num_redundant_experts, 0, 2**16)
        boolean("log_balancedness", self.log_balancedness)

    @classmethod
    def read(cls, value: object) -> Self:
        """Reads a mapping or a JSON object. Raises ValueError for anything else, and for unknown names."""
        try:
            members, names = json_members(value), [field.name for field in fields(cls)]
            check_members(members, names, _NO_CHOICE)
            return cls(**{name: one for name, one in members.items() if name in names})
        except ValueError as error:
            example = '{"num_redundant_experts": 8}'
            raise ValueError(f"eplb_config {error}; an example: {example}") from error

    def __str__(self) -> str:
        return json.dumps(asdict(self))
