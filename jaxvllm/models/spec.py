"""What a model computes, as one frozen value: everything the decoder needs to know except the weights."""

import math
from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh"]
# pre: norms before attention and FFN (Llama). sandwich: before and after (Gemma 2, 3). post: after (OLMo 2).
NormPlacement = Literal["pre", "sandwich", "post"]
# head: over each head alone (Qwen 3). full: over all heads together (OLMo 2).
QkNorm = Literal["none", "head", "full"]


@dataclass(frozen=True)
class RopeSpec:
    """A rotary embedding with every scaling already worked out; `jaxvllm.models.rope` makes them.

    `inv_freq` is in radians a position, one for each pair of rotated dimensions. All zeros is no rotation at
    all, which is how a layer without positions (SmolLM 3) is written. cos and sin are multiplied by `scale`.
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
class ModelSpec:
    """A decoder-only transformer. Hashable, so that a jitted function may take it as a static argument."""

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
        """Query heads that share a KV head: G."""
        return self.num_heads // self.num_kv_heads
