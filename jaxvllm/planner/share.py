"""One device's share of a model: bytes of its weights and pages, known without any device."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxvllm.models.params import ParamDecl, build
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.spread import Spread
from pallas_kernels.backend import Backend
from pallas_kernels.ragged_paged_attention import kv_pages_struct
from sharding.rules import MODEL, partition_spec

# The arrays of a layer that its tokens are multiplied by; the rest are norms and biases.
_MATRICES = ("qkv", "o", "gate_up", "down")


@dataclass(frozen=True)
class Share:
    """`spread.spec` in `dtype`, on one of `spread.size` devices."""

    spread: Spread
    dtype: np.dtype

    @property
    def spec(self) -> ModelSpec:
        """What the device computes."""
        return self.spread.shard

    @property
    def weight_bytes(self) -> int:
        return sum(self._bytes_by_name().values())

    @property
    def bytes_read(self) -> int:
        """Bytes of weights that every step reads whole: of an untied embedding it reads its tokens' rows alone."""
        by_name = self._bytes_by_name()
        return sum(by_name.values()) - (0 if self.spec.tie_embeddings else by_name["embed"])

    @property
    def smallest_matrix_bytes(self) -> int:
        """Bytes of the smallest matrix of one layer: temporaries below it hold a copy of none."""
        by_name = self._bytes_by_name()
        return min(by_name[name] for name in _MATRICES) // self.spec.num_layers

    def flops(self, num_tokens: int, num_rows: int) -> int:
        """Floating-point operations of the matrices for a step of so many tokens, attention not counted."""
        by_name = self._bytes_by_name()
        layers = sum(by_name[name] for name in _MATRICES)
        head = by_name["embed" if self.spec.tie_embeddings else "lm_head"]
        return 2 * (num_tokens * layers + num_rows * head) // self.dtype.itemsize

    def page_bytes(self, page_size: int, page_dtype: np.dtype, backend: Backend) -> int:
        """Bytes of one page, of all layers."""
        spec = self.spec
        page = kv_pages_struct(
            spec.num_layers, 1, page_size, spec.num_kv_heads, spec.head_size, jnp.dtype(page_dtype), backend
        )
        return int(page.size * page.dtype.itemsize)

    def _bytes_by_name(self) -> dict[str, int]:
        """Of each array on this device, all layers of it together."""

        def leaf(name: str, decl: ParamDecl, layers: tuple[int, ...] | None) -> tuple[str, int]:
            shares = self.spread.size if MODEL in partition_spec(decl.axes) else 1
            return name, math.prod(decl.shape) // shares * len(layers or (0,)) * self.dtype.itemsize

        tree = build(self.spread.whole, "stacked", leaf)
        return dict(jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, tuple)))
