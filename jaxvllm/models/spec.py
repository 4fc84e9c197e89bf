"""The spec of a model: one frozen value with everything that the decoder needs to know, except the weights."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from jaxvllm.models.alt_up import AltUp
from jaxvllm.models.block import Block
from jaxvllm.models.latent_attention import LatentAttention
from jaxvllm.models.layer_embedding import LayerEmbedding
from jaxvllm.models.norm import Norm
from jaxvllm.models.outer_lora import OuterLora
from jaxvllm.models.positive import require_positive
from jaxvllm.models.rope import RopeSpec
from jaxvllm.models.sparse_indexer import SparseIndexer


@dataclass(frozen=True)
class PositionTable:
    """Learned positions: a table whose row `offset` + p is added to the embedding of a token at position p."""

    size: int  # rows, those before the first position included
    offset: int = 0  # OPT's table begins with two rows that no position has

    @property
    def num_positions(self) -> int:
        return self.size - self.offset


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only model: its layers, in order, and what stands before and after them.

    It is hashable, so that a jitted function may take it as a static argument.
    """

    vocab_size: int
    layers: tuple[Block, ...]
    norm: Norm  # of what the last layer returns
    max_position: int  # tokens that the model can serve, its RoPE scaling included
    positions: PositionTable | None = None  # beside or in the place of ropes
    embed_scale: float = 1.0
    embed_norm: Norm | None = None  # of what the first layer computes with (BLOOM)
    logit_scale: float = 1.0  # multiplies the logits, before the soft cap
    logit_soft_cap: float | None = None
    tie_embeddings: bool = False  # the LM head is the embedding
    head_bias: bool = False  # of the LM head
    lora: OuterLora | None = None  # the room of the embedding and of the LM head for adapters
    part_of: "ModelSpec | None" = None  # the model, where `layers` are only those of a stage

    def __post_init__(self) -> None:
        require_positive(self, "vocab_size num_layers max_position embed_scale logit_scale logit_soft_cap")
        if self.positions is not None and self.max_position > self.positions.num_positions:
            raise ValueError(
                f"max_position {self.max_position} exceeds the {self.positions.num_positions} learned positions"
            )
        if len({(layer.hidden_size, layer.embedding, layer.states, layer.is_with_late) for layer in self.layers}) > 1:
            raise ValueError(
                "all layers must have hidden states of one size and kind, and the same embedding of their own"
            )
        for number, layer in enumerate(self.layers):
            size = layer.attention.head_size
            if layer.rope is not None and size < (rotated := layer.rope.rotary_dim):
                raise ValueError(f"the rope of layer {number} rotates {rotated} dimensions of heads of size {size}")
            if number == 0 and isinstance(layer.attention, LatentAttention) and layer.attention.indexer == "last":
                raise ValueError("layer 0 must have an index of its own, because no layer before it has one")
            if layer.attention.keeps != (layer.reads is None):
                raise ValueError(f"layer {number} must either keep keys and values or read those of an earlier layer")
            if layer.reads is not None and (
                not 0 <= layer.reads < number
                or self.layers[layer.reads].reads is not None
                or self.layers[layer.reads].memory != layer.memory
            ):
                raise ValueError(f"layer {number} cannot read layer {layer.reads}: it must be an earlier one like it")

    def part(self, numbers: range) -> Self:
        """Returns the spec of a stage, which has the layers with these numbers only, and those that they read."""
        own = self.layers[numbers.start : numbers.stop]
        layers = (one if one.reads is None else replace(one, reads=one.reads - numbers.start) for one in own)
        return replace(self, layers=tuple(layers), part_of=self)

    @property
    def whole(self) -> "ModelSpec":
        """The model. It decides what stages have in common: the stacks of arrays, the groups of pages, the windows."""
        return self if self.part_of is None else self.part_of

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def hidden_size(self) -> int:
        """The size of the hidden state, E."""
        return self.layers[0].hidden_size

    @property
    def layer_embedding(self) -> LayerEmbedding | None:
        """The value that says what tokens mean to each layer alone. All layers have it, or none."""
        return self.layers[0].embedding

    @property
    def states(self) -> AltUp | None:
        """The states of a token between the layers, where it has several."""
        return self.layers[0].states

    @property
    def is_with_late(self) -> bool:
        """Whether a token has, beside its hidden state, what a layer has returned late."""
        return self.layers[0].is_with_late

    @cached_property
    def ropes(self) -> tuple[RopeSpec | None, ...]:
        """The ropes of the layers, each once."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers))

    @property
    def shared_choice(self) -> int | None:
        """The positions that an index chooses for layers after its own, too. None: it chooses for its own alone."""
        indexers = [layer.attention.indexer for layer in self.layers if isinstance(layer.attention, LatentAttention)]
        if "last" not in indexers:
            return None
        return next(indexer.top_k for indexer in indexers if isinstance(indexer, SparseIndexer))

    @property
    def head_inputs(self) -> int:
        """The size of what the LM head reads of a token: a hidden state, and columns where adapters may change it."""
        return self.hidden_size + (0 if self.lora is None else self.lora.num_columns)

    @property
    def has_lora(self) -> bool:
        """Whether there is room for adapters."""
        return self.num_lora_slots > 0

    @property
    def num_lora_slots(self) -> int:
        """The number of adapters that there is room for at once."""
        return max((room.num_slots for layer in self.layers for room in layer.lora_rooms), default=0)

    @cached_property
    def without_layer_rooms(self) -> "ModelSpec":
        """The model that steps without adapters compute: its layers have no room for any.

        It has the same arrays otherwise, in the same stacks.
        """
        if not self.has_lora:
            return self
        return replace(self, layers=tuple(replace(layer, lora=None, expert_lora=None) for layer in self.layers))

    @property
    def shares_memory(self) -> bool:
        """Whether a layer reads the memory of another."""
        return any(layer.reads is not None for layer in self.layers)

    @property
    def seen_windows(self) -> tuple[int | None, ...]:
        """The windows of the layers whose tokens see positions, which those that keep a state do not."""
        return tuple(layer.window for layer in self.layers if not layer.memory.keeps_state)
