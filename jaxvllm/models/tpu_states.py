"""`TpuStates`: lets states of the delta rule take tokens in by the kernels for TPUs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import jax

from jaxvllm.models.causal_conv import CausalConv
from jaxvllm.models.gated_delta import GatedDelta
from jaxvllm.models.kimi_delta import ChannelDelta
from jaxvllm.models.recurrence import CHANNELS, RecurrentRule
from jaxvllm.models.state_memory import StateMemory, Token
from pallas_kernels.backend import Backend
from pallas_kernels.chips import TpuChip
from pallas_kernels.linear_attention import Visits, plan_visits
from pallas_kernels.ragged_paged_attention import RaggedRows

if TYPE_CHECKING:
    from pallas_kernels.linear_attention.tpu import DeltaBlocks


@dataclass(frozen=True)
class TpuStates:
    """The states of a memory whose heads forget as a whole, or each channel of a key by itself."""

    by_channel: bool
    blocks: "DeltaBlocks"
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
        from pallas_kernels.linear_attention.tpu import choose_blocks

        blocks = choose_blocks(memory.num_kv_heads, memory.num_rows, matrices, sizes, conv.size, backend.chip)
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
