"""How a model is spread over devices: heads, FFN and vocabulary in equal shares, made to divide where they do not."""

import math
from dataclasses import dataclass, replace

from jaxvllm.models.spec import ModelSpec

# Meshes that an error may recommend: those that slices of TPUs have, too.
_COMMON_SIZES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Spread:
    """`spec` over `size` devices. ValueError when it cannot be, with the meshes on which it can.

    KV heads that do not divide are copied, and a head's query heads shared out among its copies. A group that does not
    divide among them either is filled with query heads whose weights are zeros: they add nothing to the output. So 28
    query heads over 4 KV heads run on 8 devices, as 32 over 8. The vocabulary is filled with rows that are
    never sampled.
    """

    spec: ModelSpec
    size: int = 1

    def __post_init__(self) -> None:
        if problem := _problem(self.spec, self.size):
            works = ", ".join(f"1x{size}" for size in _COMMON_SIZES if not _problem(self.spec, size))
            raise ValueError(f"{problem}: use a mesh of {works}, or as many replicas (DxM) as you like")

    @property
    def kv_copies(self) -> int:
        """Devices, or heads of a device, that hold the same KV head."""
        return _kv_copies(self.spec, self.size)

    @property
    def group_size(self) -> int:
        """Query heads of each copy of a KV head, those of zeros included."""
        return -(-self.spec.group_size // self.kv_copies)

    @property
    def whole(self) -> ModelSpec:
        """The model as its arrays are shaped, over all devices: each size divides."""
        num_kv_heads = self.spec.num_kv_heads * self.kv_copies
        return replace(
            self.spec,
            num_kv_heads=num_kv_heads,
            num_heads=num_kv_heads * self.group_size,
            vocab_size=-(-self.spec.vocab_size // self.size) * self.size,
        )

    @property
    def shard(self) -> ModelSpec:
        """What one device computes."""
        whole = self.whole
        return replace(
            whole,
            num_kv_heads=whole.num_kv_heads // self.size,
            num_heads=whole.num_heads // self.size,
            vocab_size=whole.vocab_size // self.size,
            ffn_size=whole.ffn_size // self.size,
        )


def _kv_copies(spec: ModelSpec, size: int) -> int:
    return size // math.gcd(spec.num_kv_heads, size)


def _problem(spec: ModelSpec, size: int) -> str | None:
    """Why `spec` cannot be spread over `size` devices."""
    if spec.ffn_size % size:
        return f"an FFN of size {spec.ffn_size} does not divide over {size} devices"
    if spec.qk_norm == "full" and spec.group_size % _kv_copies(spec, size):
        return (
            f"{spec.num_heads} query heads over {spec.num_kv_heads} KV heads do not divide over {size} devices, "
            "and this model norms all of them together"
        )
    return None
