"""The states whose tokens the kernels for TPUs take in: those of the delta rule, and those of Mamba-2."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import jax
import jax.numpy as jnp

from jaxvllm.models.causal_conv import CausalConv
from jaxvllm.models.gated_delta import GatedDelta
from jaxvllm.models.kimi_delta import ChannelDelta
from jaxvllm.models.mamba2 import SKIP, SelectiveScan
from jaxvllm.models.recurrence import CHANNELS, RecurrentRule
from jaxvllm.models.state_memory import StateMemory, Token
from pallas_kernels.backend import Backend
from pallas_kernels.chips import TpuChip
from pallas_kernels.linear_attention import Visits, plan_visits
from pallas_kernels.ragged_paged_attention import RaggedRows

if TYPE_CHECKING:
    from pallas_kernels.linear_attention.tpu import ScanShape, StateBlocks


@dataclass(frozen=True)
class TpuDelta:
    """The states of a memory whose heads forget as a whole, or each channel of a key by itself."""

    by_channel: bool
    blocks: "StateBlocks"
    chip: TpuChip
    interpret: bool

    @classmethod
    def of(cls, memory: StateMemory, backend: Backend) -> Self | None:
        """Returns those of `memory`, or None where the kernels do not take its matrices, or are not for this chip."""
        if not isinstance(backend.chip, TpuChip):
            return None
        match memory.rule:
            case RecurrentRule(CausalConv(has_bias=False, has_activation=True) as conv, GatedDelta() as delta):
                by_channel, matrices, sizes = False, delta.values_per_key, (delta.key_size, delta.value_size)
            case RecurrentRule(CausalConv(has_bias=False, has_activation=True) as conv, ChannelDelta() as delta):
                by_channel, matrices, sizes = True, 1, (delta.size, delta.size)
            case _:
                return None
        # Kernels are imported where they run, because Pallas takes half a second of start-up.
        from pallas_kernels.linear_attention.tpu import delta_blocks

        blocks = delta_blocks(memory.num_kv_heads, memory.num_rows, matrices, sizes, conv.size, backend.chip)
        return None if blocks is None else cls(by_channel, blocks, backend.chip, backend.interpret)

    def plan(self, rows: RaggedRows, page_size: int) -> Visits:
        """Makes what all layers of a step share."""
        return plan_visits(rows, page_size)

    def __call__(
        self,
        pages: jax.Array,
        place: jax.Array | int,
        plan: Visits,
        weights: Mapping[str, jax.Array],
        tokens: Token,
    ) -> tuple[jax.Array, jax.Array]:
        """Implements `StateKernel`, and reads zeros for padding."""
        from pallas_kernels.linear_attention.tpu import DeltaTokens, delta_rule

        # The kernels' axes are heads, matrices of a head, and rows of a matrix that forget by themselves.
        g, beta = tokens["g"], tokens["beta"]
        g, beta = (g[:, :, None], beta[..., None]) if self.by_channel else (g[..., None], beta)
        read, pages = delta_rule(
            pages,
            place,
            plan,
            DeltaTokens(weights["taps"], tokens[CHANNELS], g, beta),
            blocks=self.blocks,
            chip=self.chip,
            interpret=self.interpret,
        )
        return (read[:, :, 0] if self.by_channel else read), pages


@dataclass(frozen=True)
class TpuScan:
    """The states of a memory whose groups of heads are those of Mamba-2."""

    shape: "ScanShape"
    blocks: "StateBlocks"
    chip: TpuChip
    interpret: bool

    @classmethod
    def of(cls, memory: StateMemory, backend: Backend) -> Self | None:
        """Returns those of `memory`, or None where the kernels do not take its states, or are not for this chip."""
        if not isinstance(backend.chip, TpuChip):
            return None
        match memory.rule:
            case RecurrentRule(CausalConv(has_activation=True) as conv, SelectiveScan() as scan):
                from pallas_kernels.linear_attention.tpu import ScanShape, scan_blocks

                shape = ScanShape(scan.num_heads, scan.head_size, scan.state_size)
                blocks = scan_blocks(memory.num_kv_heads, memory.num_rows, shape, conv.size, backend.chip)
                return None if blocks is None else cls(shape, blocks, backend.chip, backend.interpret)
        return None

    def plan(self, rows: RaggedRows, page_size: int) -> Visits:
        """Makes what all layers of a step share."""
        return plan_visits(rows, page_size)

    def __call__(
        self,
        pages: jax.Array,
        place: jax.Array | int,
        plan: Visits,
        weights: Mapping[str, jax.Array],
        tokens: Token,
    ) -> tuple[jax.Array, jax.Array]:
        """Implements `StateKernel`, and reads zeros for padding."""
        from pallas_kernels.linear_attention.tpu import ScanTokens, selective_scan

        taps = weights["taps"]
        bias = weights.get("bias", jnp.zeros((len(taps), taps.shape[-1]), taps.dtype))
        of_rule = ScanTokens(taps, bias, weights[SKIP], tokens[CHANNELS], tokens["g"], tokens["dt"])
        return selective_scan(
            pages,
            place,
            plan,
            of_rule,
            shape=self.shape,
            blocks=self.blocks,
            chip=self.chip,
            interpret=self.interpret,
        )


type TpuStates = TpuDelta | TpuScan


def tpu_states(memory: StateMemory, backend: Backend) -> TpuStates | None:
    """Returns the kernel for the states of `memory` on a TPU, if there is one."""
    return TpuDelta.of(memory, backend) or TpuScan.of(memory, backend)
