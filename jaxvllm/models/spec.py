"""The spec of a model: one frozen value with everything that the decoder needs to know, except the weights."""

import math
from dataclasses import dataclass
from functools import cached_property, partial

from jaxvllm.models.attention import Attention, GroupedQueryAttention, QkNorm, QueryGrowth, RopePairs
from jaxvllm.models.block import Block, Placement
from jaxvllm.models.ffn import Ffn, GatedFfn
from jaxvllm.models.forms.form import Activation
from jaxvllm.models.layer_embedding import LayerEmbedding
from jaxvllm.models.norm import Norm


@dataclass(frozen=True)
class RopeSpec:
    """A rotary embedding with its scaling already applied. `jaxvllm.models.rope` makes such specs.

    `inv_freq` is in radians per position, with one number for each pair of rotated dimensions. A layer without
    positions (SmolLM 3) has zeros there, which rotate nothing, and a model without rope has no numbers at all. cos and
    sin are multiplied by `scale`.
    """

    inv_freq: tuple[float, ...]
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not all(math.isfinite(value) and value >= 0 for value in self.inv_freq):
            raise ValueError(f"rope frequencies must be finite and not negative, not {self.inv_freq}")
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"rope scale must be positive, not {self.scale}")

    @property
    def rotary_dim(self) -> int:
        return 2 * len(self.inv_freq)


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
    """A decoder-only transformer. It is hashable, so that a jitted function may take it as a static argument.

    Heads, FFN and biases describe the layers, unless `attentions` or `ffns` name an attention or FFN for each layer.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    ffn_size: int
    norm: Norm  # that the model uses everywhere
    max_position: int  # tokens that the model can serve, its RoPE scaling included
    attention_scale: float  # multiplies q . k
    windows: tuple[int | None, ...]  # one a layer: the last positions a token sees, itself included; None is all
    ropes: tuple[RopeSpec, ...]
    layer_rope: tuple[int, ...]  # one a layer: an index into ropes
    activation: Activation = "silu"
    placement: Placement = "pre"  # of the norms
    qk_norm: QkNorm = "none"
    qkv_bias: bool = False
    o_bias: bool = False
    ffn_bias: bool = False
    rope_pairs: RopePairs = "halves"
    q_growth: QueryGrowth | None = None
    positions: PositionTable | None = None  # beside or in the place of ropes
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # multiplies what attention and FFN add to the hidden state
    logit_scale: float = 1.0  # multiplies the logits, before the soft cap
    tie_embeddings: bool = False  # the LM head is the embedding
    attentions: tuple[Attention, ...] = ()  # one a layer; empty: `usual_attention` in all
    ffns: tuple[Ffn, ...] = ()  # one a layer; empty: `usual_ffn` in all
    # One a layer: the layer whose memory it reads, or None for its own. Empty: None in all.
    reads: tuple[int | None, ...] = ()
    layer_embedding: LayerEmbedding | None = None
    layer_scales: bool = False  # one number multiplies what each layer returns

    def __post_init__(self) -> None:
        for name in (
            "vocab_size hidden_size num_layers num_heads num_kv_heads head_size ffn_size "
            "max_position attention_scale embed_scale residual_scale logit_scale"
        ).split():
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be positive, not {value}")
        for name in ("attention_soft_cap", "logit_soft_cap"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be positive or None, not {value}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")
        if len(self.windows) != self.num_layers or len(self.layer_rope) != self.num_layers:
            raise ValueError(
                f"{len(self.windows)} windows and {len(self.layer_rope)} layer_rope entries "
                f"for {self.num_layers} layers: one of each a layer"
            )
        for name in ("attentions", "ffns", "reads"):
            if (count := len(getattr(self, name))) not in (0, self.num_layers):
                raise ValueError(f"{count} {name} for {self.num_layers} layers: name one for each layer, or none")
        if not all(window is None or window > 0 for window in self.windows):
            raise ValueError(f"windows must be positive or None, not {self.windows}")
        if not all(0 <= index < len(self.ropes) for index in self.layer_rope):
            raise ValueError(f"layer_rope {self.layer_rope} must index the {len(self.ropes)} ropes")
        if self.positions is not None and self.max_position > self.positions.num_positions:
            raise ValueError(
                f"max_position {self.max_position} exceeds the {self.positions.num_positions} learned positions"
            )
        for number, layer in enumerate(self.layers):
            size = layer.attention.head_size
            if 0 < size < (rotated := self.ropes[layer.rope].rotary_dim):
                raise ValueError(f"the rope of layer {number} rotates {rotated} dimensions of heads of size {size}")
            if layer.attention.keeps != (layer.reads is None):
                raise ValueError(f"layer {number} must either keep keys and values or read those of an earlier layer")
            if layer.reads is not None and (
                not 0 <= layer.reads < number
                or self.layers[layer.reads].reads is not None
                or self.layers[layer.reads].memory != layer.memory
            ):
                raise ValueError(f"layer {number} cannot read layer {layer.reads}: it must be an earlier one like it")

    @property
    def group_size(self) -> int:
        """The number of query heads that share a KV head, G."""
        return self.num_heads // self.num_kv_heads

    @property
    def seen_windows(self) -> tuple[int | None, ...]:
        """The windows of the layers whose tokens see positions, which those that keep a state do not."""
        return tuple(layer.window for layer in self.layers if not layer.memory.keeps_state)

    @property
    def usual_attention(self) -> GroupedQueryAttention:
        """The attention of every layer, unless `attentions` names others."""
        return GroupedQueryAttention(
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            norm=self.norm,
            qk_norm=self.qk_norm,
            qkv_bias=self.qkv_bias,
            o_bias=self.o_bias,
            rope_pairs=self.rope_pairs,
            q_growth=self.q_growth,
        )

    @property
    def usual_ffn(self) -> GatedFfn:
        """The FFN of every layer, unless `ffns` names others."""
        return GatedFfn(self.hidden_size, self.ffn_size, self.activation, self.ffn_bias)

    @cached_property
    def layers(self) -> tuple[Block, ...]:
        """All layers, in order."""
        attentions = self.attentions or (self.usual_attention,) * self.num_layers
        ffns = self.ffns or (self.usual_ffn,) * self.num_layers
        reads = self.reads or (None,) * self.num_layers
        of_all = partial(
            Block,
            hidden_size=self.hidden_size,
            norm=self.norm,
            placement=self.placement,
            residual_scale=self.residual_scale,
            embedding=self.layer_embedding,
            has_scale=self.layer_scales,
        )
        each = zip(attentions, ffns, self.windows, self.layer_rope, reads, strict=True)
        return tuple(
            of_all(attention=attention, ffn=ffn, window=window, rope=rope, reads=read)
            for attention, ffn, window, rope, read in each
        )
