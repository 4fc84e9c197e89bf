"""`TpuStates`: lets states take tokens in by the kernels for TPUs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp

from jaxvllm.models.causal_conv import CausalConv
from jaxvllm.models.gated_delta import GatedDelta
from jaxvllm.models.kimi_delta import ChannelDelta
from jaxvllm.models.mamba import PACE, ChannelScan
from jaxvllm.models.mamba2 import SelectiveScan
from jaxvllm.models.recurrence import CHANNELS, SKIP, RecurrentRule
from jaxvllm.models.short_conv import WindowAlone
from jaxvllm.models.state_memory import StateMemory, Token
from pallas_kernels.backend import Backend
from pallas_kernels.chips import TpuChip
from pallas_kernels.linear_attention import Visits, plan_visits
from pallas_kernels.ragged_paged_attention import RaggedRows

if TYPE_CHECKING:
    from pallas_kernels.linear_attention.tpu import ScanShape, StateBlocks


@dataclass(frozen=True)
class TpuStates:
    """The states of a memory with such a rule."""

    rule: RecurrentRule
    blocks: "StateBlocks"
    chip: TpuChip
    interpret: bool

    @classmethod
    def of(cls, memory: StateMemory, backend: Backend) -> Self | None:
        """Returns those of `memory`, or None where the kernels do not take its sizes, or are not for this chip."""
        rule, chip = memory.rule, backend.chip
        if not isinstance(chip, TpuChip) or not isinstance(rule, RecurrentRule):
            return None
        blocks = _blocks(rule, memory.num_kv_heads, memory.num_rows, chip)
        return None if blocks is None else cls(rule, blocks, chip, backend.interpret)

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
        # Kernels are imported where they run, because Pallas takes half a second of start-up.
        from pallas_kernels.linear_attention import tpu

        where, channels = (pages, place, plan), tokens[CHANNELS]
        options: dict[str, Any] = {"blocks": self.blocks, "chip": self.chip, "interpret": self.interpret}
        match self.rule.recurrence:
            # The delta rule's axes are heads, matrices of a head, and rows of a matrix that forget by themselves.
            case GatedDelta():
                of_delta = tpu.DeltaTokens(weights["taps"], channels, tokens["g"][..., None], tokens["beta"])
                return tpu.delta_rule(*where, of_delta, **options)
            case ChannelDelta():
                g, beta = tokens["g"][:, :, None], tokens["beta"][..., None]
                read, pages = tpu.delta_rule(*where, tpu.DeltaTokens(weights["taps"], channels, g, beta), **options)
                return read[:, :, 0], pages
            case SelectiveScan() as scan:
                taps, bias, skip = weights["taps"], _bias(weights), weights[SKIP]
                of_scan = tpu.ScanTokens(taps, bias, skip, channels, tokens["g"], tokens["dt"])
                return tpu.selective_scan(*where, of_scan, shape=_shape(scan), **options)
            case ChannelScan():
                b, c, dt = (tokens[name] for name in ("b", "c", "dt"))
                of_channels = tpu.ChannelTokens(weights[PACE], weights[SKIP], channels, dt, b, c)
                return tpu.channel_scan(*where, of_channels, **options)
        assert self.rule.conv is not None
        of_window = tpu.WindowTokens(weights["taps"], _bias(weights), channels)
        return tpu.short_convolution(*where, of_window, has_activation=self.rule.conv.has_activation, **options)


def _blocks(rule: RecurrentRule, num_heads: int, page_rows: int, chip: TpuChip) -> "StateBlocks | None":
    """Returns the blocks of the kernels for a rule, or None where there is none for its sizes."""
    from pallas_kernels.linear_attention import tpu

    match rule:
        case RecurrentRule(CausalConv(has_bias=False, has_activation=True) as conv, GatedDelta() as delta):
            sizes = delta.key_size, delta.value_size
            return tpu.delta_blocks(num_heads, page_rows, delta.values_per_key, sizes, conv.size, chip)
        case RecurrentRule(CausalConv(has_bias=False, has_activation=True) as conv, ChannelDelta() as delta):
            return tpu.delta_blocks(num_heads, page_rows, 1, (delta.size, delta.size), conv.size, chip)
        case RecurrentRule(CausalConv(has_activation=True) as conv, SelectiveScan() as scan):
            return tpu.scan_blocks(num_heads, page_rows, _shape(scan), conv.size, chip)
        case RecurrentRule(None, ChannelScan() as channels):
            return tpu.channel_blocks(num_heads, page_rows, channels.num_channels, 1, chip)
        case RecurrentRule(CausalConv() as conv, WindowAlone()):
            return tpu.channel_blocks(num_heads, page_rows, conv.channels, conv.size, chip)
    return None


def _shape(scan: SelectiveScan) -> "ScanShape":
    from pallas_kernels.linear_attention.tpu import ScanShape

    return ScanShape(scan.num_heads, scan.head_size, scan.state_size)


def _bias(weights: Mapping[str, jax.Array]) -> jax.Array:
    """Returns the bias of a convolution f32[K, C], which may have none."""
    taps = weights["taps"]
    return weights.get("bias", jnp.zeros((len(taps), taps.shape[-1]), taps.dtype))
