"""Fixtures of models, with an MTP head beside each that its family's published checkpoints have."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tests.models.fixture import Fixture

_DEEPSEEK = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
_QWEN = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
_ERNIE = ("model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.mtp_linear_proj.0")
_MIMO = ("enorm", "hnorm", "eh_proj", "final_layernorm")
_LONGCAT = ("enorm.m", "hnorm.m", "eh_proj")


@dataclass(frozen=True)
class WrittenMtp:
    """Where a fixture's checkpoint has its head."""

    block: str  # the beginning of the names of the tensors of its block
    like: int  # the model's layer that the block is like
    # Norms of embedding and feature, what joins them, and the last norm. Without one that is the model's own, and the
    # head sees and hands on what is before it.
    parts: tuple[str, ...]
    alone: Mapping[str, Any]  # config of a model of that layer alone
    told: Mapping[str, Any] = field(default_factory=lambda: {"num_nextn_predict_layers": 1})
    copies: tuple[str, ...] = ()  # of the model's embedding
    ffn_like: int | None = None  # the model's layer that its FFN is like, where that is another one
    beginnings: tuple[str, ...] = ("",)  # of the names of that layer's tensors that the block has
    renamed: tuple[tuple[str, str], ...] = ()  # what names of that layer have, and what those of the block have for it

    def of_block(self, fixture: Fixture) -> dict[str, list[int]]:
        """The tensors of the block, by the ends of their names in a layer of the model."""
        own = self._of_layer(fixture, self.like)
        if self.ffn_like is not None:
            ffn = self._of_layer(fixture, self.ffn_like)
            own = {name: shape for name, shape in own.items() if not name.startswith("mlp.")}
            own |= {name: shape for name, shape in ffn.items() if name.startswith("mlp.")}
        return {name: shape for name, shape in own.items() if name.startswith(self.beginnings)}

    def stored(self, name: str) -> str:
        """The name in the block of a tensor of a layer."""
        for old, new in self.renamed:
            name = name.replace(old, new)
        return self.block + name

    def beside(self, fixture: Fixture) -> Fixture:
        """The fixture with the head in its checkpoint."""
        size, vocab = fixture.config["hidden_size"], fixture.shapes["model.embed_tokens.weight"]
        shapes = {self.stored(name): shape for name, shape in self.of_block(fixture).items()}
        shapes |= {f"{part}.weight": [size, size * 2] if "norm" not in part else [size] for part in self.parts}
        shapes |= {f"{name}.weight": vocab for name in self.copies}
        return replace(fixture, config=fixture.config | self.told, shapes=fixture.shapes | shapes)

    def silent(self, fixture: Fixture) -> dict[str, np.ndarray]:
        """What a layer has beside the block, in a model of that layer alone: it adds nothing."""
        if self.beginnings == ("",):
            return {}
        experts, own = fixture.config["n_routed_experts"], self.of_block(fixture)
        rest = {name: shape for name, shape in self._of_layer(fixture, self.like).items() if name not in own}
        unknown = tuple(f"mlp.experts.{number}." for number in range(experts, experts + 8))
        known = {name: shape for name, shape in rest.items() if not name.startswith(unknown)}
        return {
            name: np.zeros([experts, *shape[1:]] if name.startswith("mlp.router.") else shape, np.float32)
            for name, shape in known.items()
        }

    def _of_layer(self, fixture: Fixture, layer: int) -> dict[str, list[int]]:
        prefix = f"model.layers.{layer}."
        return {name.removeprefix(prefix): shape for name, shape in fixture.shapes.items() if name.startswith(prefix)}


def _deepseek(layers: int, like: int | None = None, **options: Any) -> WrittenMtp:
    block = f"model.layers.{layers}."
    copies = (f"{block}embed_tokens", f"{block}shared_head.head")
    parts = tuple(block + part for part in _DEEPSEEK)
    like = layers - 1 if like is None else like
    return WrittenMtp(block, like, parts, {"first_k_dense_replace": 0} | options, copies=copies)


def _qwen(like: int, told: Mapping[str, Any], **options: Any) -> WrittenMtp:
    return WrittenMtp("mtp.layers.0.", like, _QWEN, {"layer_types": ["full_attention"]} | options, told)


def _mimo_v2() -> WrittenMtp:
    block = "model.mtp.layers.0."
    return WrittenMtp(
        block,
        1,
        tuple(block + part for part in _MIMO),
        {"layer_types": ["sliding_attention"]},
        {"num_nextn_predict_layers": 1},
        ffn_like=0,
        renamed=(("post_attention_layernorm", "pre_mlp_layernorm"),),
    )


def _longcat() -> WrittenMtp:
    block = "model.mtp.layers.0."
    return WrittenMtp(
        block,
        0,
        (*(block + part for part in _LONGCAT), "model.mtp.norm"),
        {"num_layers": 1, "num_hidden_layers": 2, "zero_expert_num": 0},
        {},
        copies=("model.mtp.embed_tokens",),
        beginnings=("input_layernorm.0.", "post_attention_layernorm.0.", "self_attn.0.", "mlps.0."),
        renamed=(
            ("layernorm.0.", "layernorm."),
            ("self_attn.0.", "self_attn."),
            ("mlps.0.", "transformer_layer.mlp."),
        ),
    )


WRITTEN: dict[str, WrittenMtp] = {
    "deepseek_v3": _deepseek(4),
    "deepseek_v32": _deepseek(3),
    "glm4_moe": _deepseek(4),
    "glm_moe_dsa": _deepseek(4, like=1, index_topk_pattern="F"),  # the last layers have no index
    "qwen3_next": _qwen(3, {}, mlp_only_layers=[]),
    "qwen3_5": _qwen(4, {"mtp_num_hidden_layers": 1}),
    "ernie4_5_moe": WrittenMtp("model.mtp_block.0.", 0, _ERNIE, {}),
    "mimo_v2": _mimo_v2(),
    "longcat_flash": _longcat(),
}
