"""States of linear attention on NVIDIA GPUs: rows with few tokens go token by token, and others by chunks.

Both kernels read a state from the page before its tokens, and write it to the pages of columns that end in the step.
"""

from pallas_kernels.linear_attention.gpu.chunk import (
    FEW_TOKENS,
    ChunkPlan,
    ChunkUnit,
    choose_chunks,
    plan_chunks,
    take_chunks,
)
from pallas_kernels.linear_attention.gpu.single import (
    StatePlan,
    StateTile,
    StateTokens,
    choose_tile,
    plan_states,
    take_tokens,
)

__all__ = [
    "FEW_TOKENS",
    "ChunkPlan",
    "ChunkUnit",
    "StatePlan",
    "StateTile",
    "StateTokens",
    "choose_chunks",
    "choose_tile",
    "plan_chunks",
    "plan_states",
    "take_chunks",
    "take_tokens",
]
