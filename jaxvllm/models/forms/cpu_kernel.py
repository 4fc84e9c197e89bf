"""The form for our own kernels on CPUs: the array as checkpoints store it, multiplied where it is."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Sharding
from jax.typing import DTypeLike

from jaxvllm.models.declaration import ParamDecl
from jaxvllm.models.forms.form import Arrays, Experts, Form, Gating
from jaxvllm.models.forms.plain import MATRIX
from pallas_kernels.chips import CpuChip
from pallas_kernels.grouped_matmul import RowOrder, grouped_gated_matmul, grouped_matmul
from pallas_kernels.low_rank import add_low_rank
from pallas_kernels.small_matmul import small_gated_matmul, small_matmul


@dataclass(frozen=True)
class OnCpu(Form):
    """Matrices that `pallas_kernels.small_matmul` reads where they are. It chooses among those of all layers."""

    chip: CpuChip

    @abstractmethod
    def operands(self, matrices: Sequence[Arrays]) -> tuple[list[jax.Array], list[jax.Array] | None]:
        """Returns what the kernel multiplies by, and the scales of its rows where it has any."""

    def product(self, x: jax.Array, arrays: Arrays, dtype: DTypeLike | None, is_slice: bool = False) -> jax.Array:
        return self.product_with_one(x, [arrays], 0, dtype)

    def product_with_one(
        self, x: jax.Array, matrices: Sequence[Arrays], index: jax.Array | int, dtype: DTypeLike | None
    ) -> jax.Array:
        ours, scales = self.operands(matrices)
        y = small_matmul(x, ours, index, scales=scales, dtype=dtype, chip=self.chip)
        return y.reshape(x.shape[0], *ours[0].shape[:-1])

    def gated_product(
        self, x: jax.Array, matrices: Sequence[Arrays], index: jax.Array | int, gating: Gating
    ) -> jax.Array | None:
        if gating != "silu" and gating != "gelu_tanh":
            return None
        ours, scales = self.operands(matrices)
        return small_gated_matmul(x, ours, index, scales=scales, gate=gating, chip=self.chip)

    def grouped_product(
        self, x: jax.Array, experts: Experts, starts: jax.Array, dtype: DTypeLike | None = None
    ) -> jax.Array:
        ours, scales = self._experts(experts)
        y = grouped_matmul(x, ours, experts.index, starts, scales=scales, dtype=dtype, chip=self.chip)
        return y.reshape(x.shape[0], *ours[0].shape[1:-1])

    def grouped_gated_product(
        self, x: jax.Array, experts: Experts, starts: jax.Array, gating: Gating
    ) -> jax.Array | None:
        if gating != "silu" and gating != "gelu_tanh":
            return None
        ours, scales = self._experts(experts)
        return grouped_gated_matmul(x, ours, experts.index, starts, scales=scales, gate=gating, chip=self.chip)

    def _experts(self, experts: Experts) -> tuple[list[jax.Array], list[jax.Array] | None]:
        assert isinstance(experts.first, int) and not experts.first, "on a CPU each layer has arrays of its own"
        return self.operands(experts.stacks)


@dataclass(frozen=True)
class CpuKernel(OnCpu):
    """One array, which is never copied."""

    def declare(self, matrix: ParamDecl) -> dict[str, ParamDecl]:
        return {MATRIX: matrix}

    def keep(self, matrix: jax.Array, shardings: Mapping[str, Sharding]) -> dict[str, jax.Array]:
        return {MATRIX: matrix}

    def plain(self, arrays: Arrays) -> jax.Array:
        return arrays[MATRIX]

    def operands(self, matrices: Sequence[Arrays]) -> tuple[list[jax.Array], list[jax.Array] | None]:
        return [arrays[MATRIX] for arrays in matrices], None

    def add_low_rank(
        self,
        y: jax.Array,
        x: jax.Array,
        downs: Sequence[Arrays],
        ups: Sequence[Arrays],
        index: jax.Array | int,
        order: RowOrder,
        gating: Gating | None = None,
        ratios: Sequence[Arrays] | None = None,
    ) -> jax.Array | None:
        if gating not in (None, "silu", "gelu_tanh"):
            return None
        own_downs, own_ups = ([arrays[MATRIX] for arrays in several] for several in (downs, ups))
        factors = None if ratios is None else [arrays[MATRIX] for arrays in ratios]
        return add_low_rank(y, x, own_downs, own_ups, index, order, ratios=factors, gate=gating, chip=self.chip)

    def look_up(self, arrays: Arrays, numbers: jax.Array) -> jax.Array:
        return jnp.take(arrays[MATRIX], numbers, axis=0, mode="clip")
