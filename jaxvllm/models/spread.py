"""Spreads a model over devices: its layers over stages, and heads, FFN and vocabulary, which are made to divide."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from jax.sharding import Mesh

from jaxvllm.models.experts import replicas_of
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.stage_cuts import beginnings, divided
from sharding.mesh import MeshShape
from sharding.rules import MODEL, STAGE

# An error may recommend meshes of these sizes, which are also those of TPU slices.
_COMMON_SIZES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Spread:
    """A model whose layers are divided among `stages`, each spread over `size` devices.

    Raises ValueError when that cannot be, and names the meshes on which it can.

    KV heads that do not divide are copied, and the query heads of a KV head are shared out among its copies. If they do
    not divide among the copies, query heads with weights of zero, which add nothing to the output, fill the groups up.
    So 28 query heads over 4 KV heads run on 8 devices, as 32 over 8. Unsampled rows fill up the vocabulary.

    Stages are as even as the layers allow, and the later ones have fewer: 27 layers in two stages are 14 and 13. They
    may be of any kinds. But layers that read what another layer keeps, or what its index has chosen, are in its stage.
    An array over all devices has equal parts, so where one stage has more layers of a kind than another, the other has
    as much memory for them, which stays empty.
    """

    spec: ModelSpec
    size: int = 1
    stages: int = 1

    def __post_init__(self) -> None:
        if problem := _problem(self.spec, self.size):
            shared = replicas_of(self.spec)
            works = ", ".join(f"{shared}x{size}" for size in _COMMON_SIZES if not _problem(self.spec, size))
            if shared > 1:
                raise ValueError(
                    f"{problem}: use a mesh of {works or 'fewer replicas'}, or leave enable_expert_parallel out"
                )
            raise ValueError(f"{problem}: use a mesh of {works}, or as many replicas (DxM) as you like")
        begins = len(beginnings(self.spec.layers))
        if self.stages > begins:
            counts = (count for count in _COMMON_SIZES if count <= begins)
            works = ", ".join(str(MeshShape(1, self.size, count)) for count in counts)
            alone = "" if begins == self.spec.num_layers else ", with all layers that it reads from"
            raise ValueError(
                f"{self.spec.num_layers} layers cannot be divided among {self.stages} stages so that each stage has "
                f"some{alone}: use a mesh of {works}"
            )

    @classmethod
    def on(cls, spec: ModelSpec, mesh: Mesh) -> Self:
        """Returns the model spread over all of `mesh`, which holds it once."""
        return cls(spec, mesh.shape[MODEL], mesh.shape[STAGE])

    @property
    def kv_copies(self) -> int:
        """The most devices, or heads of one device, that hold the same KV head of a layer."""
        return max(layer.attention.kv_copies(self.size) for layer in self.spec.layers)

    @property
    def zero_heads(self) -> int:
        """The most query heads of zeros in a layer."""
        return max(
            whole.attention.num_heads - layer.attention.num_heads
            for whole, layer in zip(self.whole.layers, self.spec.layers, strict=True)
        )

    @cached_property
    def stage_layers(self) -> tuple[range, ...]:
        """The numbers of the layers of each stage."""
        return divided(beginnings(self.spec.layers), self.spec.num_layers, self.stages)

    def of_stages(self, layers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Returns those of `layers` that each stage has."""
        return tuple(tuple(layer for layer in layers if layer in own) for own in self.stage_layers)

    @cached_property
    def whole(self) -> ModelSpec:
        """The spec that the arrays over all devices have. Each of its sizes divides."""
        return replace(
            self.spec,
            layers=tuple(layer.spread(self.size) for layer in self.spec.layers),
            vocab_size=-(-self.spec.vocab_size // self.size) * self.size,
        )

    @cached_property
    def shard(self) -> ModelSpec:
        """The spec of all layers, of each of which a device of its stage computes this share."""
        return replace(
            self.whole,
            layers=tuple(layer.shard(self.size) for layer in self.whole.layers),
            vocab_size=self.whole.vocab_size // self.size,
        )

    @cached_property
    def parts(self) -> tuple[ModelSpec, ...]:
        """The spec of what one device of each stage computes. Stages with equal ones run the same program."""
        if self.stages == 1:
            return (self.shard,)
        return tuple(self.shard.part(layers) for layers in self.stage_layers)


def _problem(spec: ModelSpec, size: int) -> str | None:
    """Returns why `spec` cannot be spread over `size` devices, or None when it can."""
    # The order is that of the layers, so that the same model always gets the same error.
    kinds = dict.fromkeys(
        kind for layer in spec.layers for kind in (layer.ffn, layer.late, layer.attention, layer.beside)
    )
    return next((problem for kind in kinds if kind is not None and (problem := kind.problem(size))), None)
