"""Spreads a model over devices in equal shares of layers, heads, FFN and vocabulary, and makes these divide."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from jax.sharding import Mesh

from jaxvllm.models.spec import ModelSpec
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

    All stages run one program, so each has layers like those of the first, in the same order. Layers with weights of
    zero, which leave the hidden state as it is, fill up the last stage: 27 layers in two stages are 14 and 13.
    """

    spec: ModelSpec
    size: int = 1
    stages: int = 1

    def __post_init__(self) -> None:
        if problem := _problem(self.spec, self.size):
            works = ", ".join(f"1x{size}" for size in _COMMON_SIZES if not _problem(self.spec, size))
            raise ValueError(f"{problem}: use a mesh of {works}, or as many replicas (DxM) as you like")
        shares = self.spec.shares_memory or self.spec.shared_choice is not None
        if self.stages > 1 and (shares or self.spec.layer_embedding is not None):
            raise ValueError(
                "layers that read another layer's keys and values, or what its index has chosen, or have embeddings of "
                "their own, cannot be divided among stages: use a mesh of DxM"
            )
        if self.stages > 1 and self.spec.is_with_late:
            raise ValueError("layers in pairs cannot be divided among stages: use a mesh of DxM")
        if self.stages > 1 and any(layer.keeps_state for layer in self.spec.layers):
            raise ValueError(
                "layers that keep a state cannot be divided among stages, which would compute a prompt in other parts: "
                "use a mesh of DxM"
            )
        if not _stage_layers(self.spec, self.stages):
            counts = (count for count in _COMMON_SIZES if _stage_layers(self.spec, count))
            works = ", ".join(str(MeshShape(1, self.size, count)) for count in counts)
            raise ValueError(
                f"{self.spec.num_layers} layers cannot be divided among {self.stages} stages so that each stage has "
                f"some, and layers like those of the others: use a mesh of {works}"
            )
        if any(layer.has_scale for layer in self.spec.layers) and self.stages > 1 and self.zero_layers:
            raise ValueError(
                f"{self.spec.num_layers} layers whose output is scaled cannot be filled up with layers of zeros for "
                f"{self.stages} stages: use as many stages as divide the layers"
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
            for whole, layer in zip(self.stage.layers, self.spec.layers, strict=False)
        )

    @property
    def stage_layers(self) -> int:
        """The layers of each stage, those of zeros included."""
        return _stage_layers(self.spec, self.stages)

    @property
    def zero_layers(self) -> int:
        """The layers of zeros, after the model's own."""
        return self.stages * self.stage_layers - self.spec.num_layers

    @cached_property
    def whole(self) -> ModelSpec:
        """The spec that the arrays over all devices have. Each of its sizes divides."""
        return replace(self.stage, layers=self.stage.layers * self.stages)

    @cached_property
    def stage(self) -> ModelSpec:
        """The spec that the arrays over the devices of one stage have."""
        return replace(
            self.spec,
            layers=tuple(layer.spread(self.size) for layer in self.spec.layers[: self.stage_layers]),
            vocab_size=-(-self.spec.vocab_size // self.size) * self.size,
        )

    @cached_property
    def shard(self) -> ModelSpec:
        """The spec of the part that one device computes: the layers of a stage, and a share of each."""
        return replace(
            self.stage,
            layers=tuple(layer.shard(self.size) for layer in self.stage.layers),
            vocab_size=self.stage.vocab_size // self.size,
        )


def _problem(spec: ModelSpec, size: int) -> str | None:
    """Returns why `spec` cannot be spread over `size` devices, or None when it can."""
    # The order is that of the layers, so that the same model always gets the same error.
    kinds = dict.fromkeys(
        kind for layer in spec.layers for kind in (layer.ffn, layer.late, layer.attention, layer.beside)
    )
    return next((problem for kind in kinds if kind is not None and (problem := kind.problem(size))), None)


def _stage_layers(spec: ModelSpec, stages: int) -> int:
    """Returns the fewest layers that each of `stages` can have, if all have layers alike and none is empty; 0: none."""
    layers, num_layers = spec.layers, spec.num_layers
    for count in range(-(-num_layers // stages), num_layers + 1):
        if (stages - 1) * count < num_layers and all(layers[i] == layers[i % count] for i in range(num_layers)):
            return count
    return 0
