"""The spec of a model: one frozen value with everything that the decoder needs to know, except the weights."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from jaxvllm.models.attention import Attention, GroupedQueryAttention, QkNorm
from jaxvllm.models.ffn import Activation, Ffn, GatedFfn
from jaxvllm.models.ops import RmsNorm

# Norms stand before attention and FFN (pre: Llama), before and after (sandwich: Gemma 2, 3), or after (post: OLMo 2).
NormPlacement = Literal["pre", "sandwich", "post"]


@dataclass(frozen=True)
class RopeSpec:
    """A rotary embedding with its scaling already applied. `jaxvllm.models.rope` makes such specs.

    `inv_freq` is in radians per position, with one number for each pair of rotated dimensions. A layer without
    positions (SmolLM 3) has zeros there, which rotate nothing. cos and sin are multiplied by `scale`.
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
class LayerSpec:
    """The computation of one layer. Consecutive equal layers are one loop on the device."""

    attention: Attention
    ffn: Ffn
    window: int | None  # the last positions a token sees, itself included; None is all
    rope: int  # an index into the ropes of the model


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
    norm_eps: float
    max_position: int  # tokens that the model can serve, its RoPE scaling included
    attention_scale: float  # multiplies q . k
    windows: tuple[int | None, ...]  # one a layer: the last positions a token sees, itself included; None is all
    ropes: tuple[RopeSpec, ...]
    layer_rope: tuple[int, ...]  # one a layer: an index into ropes
    activation: Activation = "silu"
    norm_placement: NormPlacement = "pre"
    norm_offset: float = 0.0  # added to every norm weight: Gemma stores w and means 1 + w
    qk_norm: QkNorm = "none"
    qkv_bias: bool = False
    o_bias: bool = False
    ffn_bias: bool = False
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # multiplies what attention and FFN add to the hidden state
    logit_scale: float = 1.0  # multiplies the logits, before the soft cap
    tie_embeddings: bool = False  # the LM head is the embedding
    attentions: tuple[Attention, ...] = ()  # one a layer; empty: `usual_attention` in all
    ffns: tuple[Ffn, ...] = ()  # one a layer; empty: `usual_ffn` in all

    def __post_init__(self) -> None:
        for name in (
            "vocab_size hidden_size num_layers num_heads num_kv_heads head_size ffn_size norm_eps "
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
        for name in ("attentions", "ffns"):
            if (count := len(getattr(self, name))) not in (0, self.num_layers):
                raise ValueError(f"{count} {name} for {self.num_layers} layers: name one for each layer, or none")
        if not all(window is None or window > 0 for window in self.windows):
            raise ValueError(f"windows must be positive or None, not {self.windows}")
        if not all(0 <= index < len(self.ropes) for index in self.layer_rope):
            raise ValueError(f"layer_rope {self.layer_rope} must index the {len(self.ropes)} ropes")
        rotary_dims = {rope.rotary_dim for rope in self.ropes}
        if len(rotary_dims) != 1 or max(rotary_dims) > self.head_size:
            raise ValueError(
                f"ropes rotate {sorted(rotary_dims)} dimensions: all must rotate the same number, "
                f"at most head_size {self.head_size}"
            )

    @property
    def group_size(self) -> int:
        """The number of query heads that share a KV head, G."""
        return self.num_heads // self.num_kv_heads

    @property
    def norm(self) -> RmsNorm:
        """The norm that the model uses everywhere."""
        return RmsNorm(self.norm_eps, self.norm_offset)

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
        )

    @property
    def usual_ffn(self) -> GatedFfn:
        """The FFN of every layer, unless `ffns` names others."""
        return GatedFfn(self.hidden_size, self.ffn_size, self.activation, self.ffn_bias)

    @cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """All layers, in order."""
        attentions = self.attentions or (self.usual_attention,) * self.num_layers
        ffns = self.ffns or (self.usual_ffn,) * self.num_layers
        return tuple(map(LayerSpec, attentions, ffns, self.windows, self.layer_rope))
