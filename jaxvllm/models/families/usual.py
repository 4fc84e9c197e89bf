"""`UsualParts`: what nearly every decoder has, read from the keys that nearly every config has."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from jaxvllm.models.attention import GroupedQueryAttention
from jaxvllm.models.block import Block
from jaxvllm.models.expert_router import ExpertRouter
from jaxvllm.models.experts import ExpertsFfn
from jaxvllm.models.ffn import GatedFfn
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import Norm
from jaxvllm.models.rope import RopeSpec
from jaxvllm.models.spec import ModelSpec


def multi_head(hidden_size: int, num_heads: int, norm: Norm, *, has_bias: bool) -> GroupedQueryAttention:
    """Returns attention whose heads have the hidden size together, each with a key and a value of its own."""
    head_size = hidden_size // num_heads
    return GroupedQueryAttention(
        hidden_size, num_heads, num_heads, head_size, norm, scale=head_size**-0.5, qkv_bias=has_bias, o_bias=has_bias
    )


@dataclass(frozen=True)
class UsualParts:
    """The parts of a decoder with the sizes of `config`. A family takes them as they are, or changes them.

    Without `num_key_value_heads` a config means as many KV heads as query heads, and without `head_dim` heads that
    have the hidden size together. A family with other defaults gives them to the config (`HfConfig.with_defaults`).
    """

    config: HfConfig

    @property
    def hidden_size(self) -> int:
        return self.config.integer("hidden_size")

    @property
    def num_layers(self) -> int:
        return self.config.integer("num_hidden_layers")

    @property
    def head_size(self) -> int:
        return self.config.integer("head_dim", self.hidden_size // self.config.integer("num_attention_heads"))

    @property
    def ffn_size(self) -> int:
        return self.config.integer("intermediate_size")

    @property
    def max_position(self) -> int:
        """The positions that the model was trained for, without what a scaling of its rope adds."""
        return self.config.integer("max_position_embeddings")

    @property
    def attention_bias(self) -> bool:
        return self.config.flag("attention_bias", False)

    def attention(self, norm: Norm) -> GroupedQueryAttention:
        """Returns grouped-query attention without biases, and without norms of its queries and keys."""
        num_heads = self.config.integer("num_attention_heads")
        return GroupedQueryAttention(
            hidden_size=self.hidden_size,
            num_heads=num_heads,
            num_kv_heads=self.config.integer("num_key_value_heads", num_heads),
            head_size=self.head_size,
            norm=norm,
            scale=self.head_size**-0.5,
        )

    def head_normed_attention(self, norm: Norm) -> GroupedQueryAttention:
        """Returns attention with a norm over each query and key head, whose biases `attention_bias` asks for."""
        has_bias = self.attention_bias
        return replace(self.attention(norm), qk_norm="head", qkv_bias=has_bias, o_bias=has_bias)

    def experts(self, router: ExpertRouter, size: int, shared_size: int = 0) -> ExpertsFfn:
        """Returns experts of `size`, and beside them one of `shared_size`, where that is not 0."""
        activation = self.config.activation("hidden_act", "silu")
        shared = GatedFfn(self.hidden_size, shared_size, activation) if shared_size else None
        return ExpertsFfn(self.hidden_size, size, router, activation, shared)

    def gated_ffn(self) -> GatedFfn:
        """Returns a gated FFN, with biases if `mlp_bias` says so."""
        activation, has_bias = self.config.activation("hidden_act", "silu"), self.config.flag("mlp_bias", False)
        return GatedFfn(self.hidden_size, self.ffn_size, activation, has_bias)

    def rope(self) -> RopeSpec:
        """Returns the rope of all layers."""
        theta = self.config.number("rope_theta", 10_000.0)
        return self.config.rope(self.config.rope_parameters(), theta, self.head_size, self.max_position)

    def model(self, layers: Iterable[Block], norm: Norm) -> ModelSpec:
        """Returns the model that has these layers, then `norm`."""
        return ModelSpec(
            vocab_size=self.config.integer("vocab_size"),
            layers=tuple(layers),
            norm=norm,
            max_position=self.config.served_positions(self.config.rope_parameters(), self.max_position),
            tie_embeddings=self.config.flag("tie_word_embeddings", False),
        )
