"""`PoolerConfig`: vLLM's `pooler_config`, which says how an engine makes vectors of prompts."""

import json
from dataclasses import asdict, dataclass, fields
from typing import Self, get_args

from jaxvllm.core.pooler import PoolingType
from jaxvllm.core.value_checks import MAX_INT32, boolean, check_members, integer, json_members

# Ways of pooling that vLLM has and that a causal decoder has no use for, or that need more than one vector a prompt.
_NOT_HERE = {
    "CLS": "the first token of a causal decoder sees only itself: use LAST or MEAN",
    "ALL": "a vector for each token is not supported: use LAST or MEAN",
    "STEP": "a vector for each step is not supported: use LAST or MEAN",
}


@dataclass(frozen=True)
class PoolerConfig:
    """The operator's choice of the pooling. What is None is the checkpoint's. Raises ValueError for a wrong value."""

    pooling_type: PoolingType | None = None
    seq_pooling_type: PoolingType | None = None  # vLLM's newer name of it
    use_activation: bool | None = None  # whether vectors get length 1
    dimensions: int | None = None  # of vectors whose requests do not say
    task: str | None = None  # embed, the only one

    def __post_init__(self) -> None:
        given = self.seq_pooling_type or self.pooling_type
        if self.pooling_type and self.seq_pooling_type and self.pooling_type != self.seq_pooling_type:
            raise ValueError("pooling_type and seq_pooling_type differ, and mean the same: leave one of them out")
        if given is not None and given not in get_args(PoolingType):
            known = f"pooling_type must be LAST or MEAN, not {given!r}"
            raise ValueError(f"{known}: {_NOT_HERE[given]}" if given in _NOT_HERE else known)
        if self.use_activation is not None:
            boolean("use_activation", self.use_activation)
        if self.dimensions is not None:
            integer("dimensions", self.dimensions, 1, MAX_INT32)
        if self.task not in (None, "embed"):
            raise ValueError(f"task must be embed, not {self.task!r}: no other task is supported yet")

    @classmethod
    def read(cls, value: object) -> Self:
        """Reads a mapping or a JSON object. Raises ValueError for anything else, and for unknown names."""
        try:
            members = json_members(value)
            check_members(members, [field.name for field in fields(cls)])
            return cls(**members)
        except ValueError as error:
            raise ValueError(f'pooler_config {error}; an example: {{"pooling_type": "MEAN"}}') from error

    def __str__(self) -> str:
        return json.dumps({name: value for name, value in asdict(self).items() if value is not None})

    @property
    def kind(self) -> PoolingType | None:
        """LAST or MEAN, or None where the checkpoint says it."""
        return self.seq_pooling_type or self.pooling_type
