"""Spreads a model over devices in equal shares of heads, FFN and vocabulary, and makes these divide if they do not."""

from dataclasses import dataclass, replace
from functools import cached_property

from jaxvllm.models.spec import ModelSpec

# An error may recommend meshes of these sizes, which are also those of TPU slices.
_COMMON_SIZES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Spread:
    """A model spread over `size` devices. Raises ValueError when that cannot be, and names the meshes on which it can.

    KV heads that do not divide are copied, and the query heads of a KV head are shared out among its copies. If they do
    not divide among the copies, query heads with weights of zero, which add nothing to the output, fill the groups up.
    So 28 query heads over 4 KV heads run on 8 devices, as 32 over 8. Unsampled rows fill up the vocabulary.
    """

    spec: ModelSpec
    size: int = 1

    def __post_init__(self) -> None:
        if problem := _problem(self.spec, self.size):
            works = ", ".join(f"1x{size}" for size in _COMMON_SIZES if not _problem(self.spec, size))
            raise ValueError(f"{problem}: use a mesh of {works}, or as many replicas (DxM) as you like")

    @property
    def kv_copies(self) -> int:
        """The number of devices, or of heads of one device, that hold the same KV head."""
        return self.spec.usual_attention.kv_copies(self.size)

    @property
    def group_size(self) -> int:
        """The number of query heads for each copy of a KV head, heads of zeros included."""
        return self.whole.group_size

    @cached_property
    def whole(self) -> ModelSpec:
        """The spec that the arrays over all devices have. Each of its sizes divides."""
        usual = self.spec.usual_attention.spread(self.size)
        return replace(
            self.spec,
            num_kv_heads=usual.num_kv_heads,
            num_heads=usual.num_heads,
            vocab_size=-(-self.spec.vocab_size // self.size) * self.size,
            attentions=tuple(attention.spread(self.size) for attention in self.spec.attentions),
        )

    @cached_property
    def shard(self) -> ModelSpec:
        """The spec of the part that one device computes."""
        whole, usual = self.whole, self.whole.usual_attention.shard(self.size)
        return replace(
            whole,
            num_kv_heads=usual.num_kv_heads,
            num_heads=usual.num_heads,
            vocab_size=whole.vocab_size // self.size,
            ffn_size=whole.ffn_size // self.size,
            attentions=tuple(attention.shard(self.size) for attention in whole.attentions),
            ffns=tuple(ffn.shard(self.size) for ffn in whole.ffns),
        )


def _problem(spec: ModelSpec, size: int) -> str | None:
    """Returns why `spec` cannot be spread over `size` devices, or None when it can."""
    # The order is that of the layers, so that the same model always gets the same error.
    kinds = dict.fromkeys(kind for layer in spec.layers for kind in (layer.ffn, layer.attention))
    return next((problem for kind in kinds if (problem := kind.problem(size))), None)
