"""States on NVIDIA GPUs: matrices take in few tokens one by one and others by chunks, and channels all one by one.

All kernels read a state from the page before its tokens, and write it to the pages of columns that end in the step.
"""

from pallas_kernels.linear_attention.channel_tokens import ChannelTokens, WindowTokens
from pallas_kernels.linear_attention.gpu.channel_scan import choose_channels, scan_channels
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
from pallas_kernels.linear_attention.gpu.window import WindowPlan, choose_lanes, convolve_windows, plan_windows

__all__ = [
    "FEW_TOKENS",
    "ChannelTokens",
    "ChunkPlan",
    "ChunkUnit",
    "StatePlan",
    "StateTile",
    "StateTokens",
    "WindowPlan",
    "WindowTokens",
    "choose_channels",
    "choose_chunks",
    "choose_lanes",
    "choose_tile",
    "convolve_windows",
    "plan_chunks",
    "plan_states",
    "plan_windows",
    "scan_channels",
    "take_chunks",
    "take_tokens",
]
