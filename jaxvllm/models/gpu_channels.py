"""`GpuChannels`: lets states of channels that know nothing of each other take tokens in by the kernels for NVIDIA GPUs.

Such are those of the first Mamba, and the windows of short convolutions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import jax
import jax.numpy as jnp

from jaxvllm.models.causal_conv import CausalConv
from jaxvllm.models.mamba import PACE, ChannelScan
from jaxvllm.models.recurrence import CHANNELS, SKIP, RecurrentRule
from jaxvllm.models.short_conv import WindowAlone
from jaxvllm.models.state_memory import StateMemory, Token
from pallas_kernels.backend import Backend
from pallas_kernels.chips import GpuChip
from pallas_kernels.ragged_paged_attention import RaggedRows

if TYPE_CHECKING:
    from pallas_kernels.linear_attention.gpu import StatePlan, WindowPlan


@dataclass(frozen=True)
class GpuChannels:
    """The states of a memory with such a rule: a convolution or a recurrence, and not both."""

    rule: CausalConv | ChannelScan
    interpret: bool

    @classmethod
    def of(cls, memory: StateMemory, backend: Backend) -> Self | None:
        """Returns those of `memory`, or None where the kernels do not take its sizes, or are not for this chip."""
        if not isinstance(backend.chip, GpuChip) or not backend.chip.has_copy_engine:
            return None
        # Kernels are imported where they run, because Pallas takes half a second of start-up.
        from pallas_kernels.linear_attention.gpu import choose_channels, choose_lanes

        match memory.rule:
            case RecurrentRule(None, ChannelScan() as scan):
                # The kernel reads a page as rows of all channels.
                is_whole = memory.num_rows * memory.width % scan.num_channels == 0
                takes = is_whole and choose_channels(scan.state_size, scan.num_channels) is not None
                return cls(scan, backend.interpret) if takes else None
            case RecurrentRule(CausalConv() as conv, WindowAlone()):
                return None if choose_lanes(conv.channels) is None else cls(conv, backend.interpret)
        return None

    def plan(self, rows: RaggedRows, page_size: int) -> "tuple[RaggedRows, StatePlan | WindowPlan]":
        """Makes what all layers of a step share."""
        from pallas_kernels.linear_attention.gpu import plan_states, plan_windows

        if isinstance(self.rule, ChannelScan):
            return rows, plan_states(rows, page_size)
        return rows, plan_windows(rows, page_size, self.rule.size)

    def __call__(
        self,
        pages: jax.Array,
        place: jax.Array | int,
        plan: "tuple[RaggedRows, StatePlan | WindowPlan]",
        weights: Mapping[str, jax.Array],
        tokens: Token,
    ) -> tuple[jax.Array, jax.Array]:
        """Implements `StateKernel`, and reads zeros for padding."""
        from pallas_kernels.linear_attention import gpu

        rows, of_kernel = plan
        channels = tokens[CHANNELS]
        match self.rule, of_kernel:
            case ChannelScan() as scan, gpu.StatePlan():
                b, c, dt = (tokens[name] for name in ("b", "c", "dt"))
                of_scan = gpu.ChannelTokens(weights[PACE], weights[SKIP], channels, dt, b, c)
                tile = gpu.choose_channels(scan.state_size, scan.num_channels)
                assert tile is not None
                read, pages = gpu.scan_channels(pages, place, of_kernel, of_scan, tile=tile, interpret=self.interpret)
            case CausalConv() as conv, gpu.WindowPlan():
                taps = weights["taps"]
                bias = weights["bias"] if conv.has_bias else jnp.zeros((len(taps), conv.channels), jnp.float32)
                of_window = gpu.WindowTokens(taps, bias, channels)
                read, pages = gpu.convolve_windows(
                    pages,
                    place,
                    of_kernel,
                    of_window,
                    has_activation=conv.has_activation,
                    interpret=self.interpret,
                )
        return jnp.where(rows.is_real()[:, None, None], read, 0.0), pages
