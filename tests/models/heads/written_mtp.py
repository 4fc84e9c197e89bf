"""Fixtures of models, with an MTP head beside each that its family's published checkpoints have."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tests.models.fixture import Fixture

_DEEPSEEK = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
_QWEN = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
_ERNIE = ("model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.mtp_linear_proj.0")


@dataclass(frozen=True)
class WrittenMtp:
    """Where a fixture's checkpoint has its head."""

    block: str  # the beginning of the names of the tensors of its block
    like: int  # the model's layer that the block is like
    parts: tuple[str, ...]  # norms of embedding and feature, what joins them, and the last norm, where there is one
    alone: Mapping[str, Any]  # config of a model of that layer alone
    told: Mapping[str, Any] = field(default_factory=lambda: {"num_nextn_predict_layers": 1})
    hides_first: bool = True

    def of_block(self, fixture: Fixture) -> dict[str, list[int]]:
        """The tensors of the block, by the ends of their names."""
        prefix = f"model.layers.{self.like}."
        return {name.removeprefix(prefix): shape for name, shape in fixture.shapes.items() if name.startswith(prefix)}

    def beside(self, fixture: Fixture) -> Fixture:
        """The fixture with the head in its checkpoint."""
        size = fixture.config["hidden_size"]
        shapes = {self.block + name: shape for name, shape in self.of_block(fixture).items()}
        shapes |= {f"{part}.weight": [size, size * 2] if "norm" not in part else [size] for part in self.parts}
        if self.block in self.parts[0]:  # DeepSeek's has copies of what the model has
            vocab = fixture.shapes["model.embed_tokens.weight"]
            shapes |= {f"{self.block}{name}.weight": vocab for name in ("embed_tokens", "shared_head.head")}
        return replace(fixture, config=fixture.config | self.told, shapes=fixture.shapes | shapes)


def _deepseek(layers: int) -> WrittenMtp:
    block = f"model.layers.{layers}."
    return WrittenMtp(block, layers - 1, tuple(block + part for part in _DEEPSEEK), {"first_k_dense_replace": 0})


def _qwen(like: int, told: Mapping[str, Any], **options: Any) -> WrittenMtp:
    return WrittenMtp(
        "mtp.layers.0.", like, _QWEN, {"layer_types": ["full_attention"]} | options, told, hides_first=False
    )


WRITTEN: dict[str, WrittenMtp] = {
    "deepseek_v3": _deepseek(4),
    "deepseek_v32": _deepseek(3),
    "glm4_moe": _deepseek(4),
    "qwen3_next": _qwen(3, {}, mlp_only_layers=[]),
    "qwen3_5": _qwen(4, {"mtp_num_hidden_layers": 1}),
    "ernie4_5_moe": WrittenMtp("model.mtp_block.0.", 0, _ERNIE, {}),
}
