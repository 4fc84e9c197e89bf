"""`MtpFormat`: how the checkpoints of a family hold their layers for multi-token prediction (MTP)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from jaxvllm.models.block import Block
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import LayerSources


def like_last(spec: ModelSpec) -> Block:
    """Returns the model's last layer that keeps no state, without its window."""
    return replace(next(layer for layer in reversed(spec.layers) if not layer.keeps_state), window=None)


def like_first(spec: ModelSpec) -> Block:
    """Returns the model's first layer, which is dense, without its window."""
    return replace(spec.layers[0], window=None)


@dataclass(frozen=True)
class MtpFormat:
    """The names of the parts of an MTP head, and how the head was trained. By default they are DeepSeek V3's.

    In a name `{prefix}` stands for the beginning of the decoder's names, `{number}` for that of the head, `{layer}`
    for that of the layer after the model's last one, and `{block}` for the beginning of the names in the head's block.
    """

    block: str = "{prefix}layers.{layer}."
    embedding_norm: str = "{block}enorm"
    feature_norm: str = "{block}hnorm"
    fc: str = "{block}eh_proj"  # over the embedding and then the feature
    final_norm: str | None = "{block}shared_head.norm"  # None: the final norm is the model's own
    others: str = "{block}"  # the beginning of the names of all tensors of a head, none of which may be ignored
    # Copies of the model's own tensors, which are not read.
    copies: tuple[str, ...] = ("{block}embed_tokens.weight", "{block}shared_head.head.weight")
    count: str = "num_nextn_predict_layers"  # the key of the number of heads in a config
    usual_count: int = 0  # where a config lacks that key
    is_feature_first: bool = False  # `fc` is over the feature and then the embedding
    # It was trained on the states before a final norm, those of the model and of the head before it, and not on the
    # hidden states after one.
    sees_states: bool = False
    block_of: Callable[[ModelSpec], Block] = like_last  # the block of a head, for a model
    sources: LayerSources | None = None  # of the block; None: its tensors are named as those of the model's layers

    def names(self, prefix: str, num_layers: int, number: int) -> Mapping[str, str]:
        """Returns the names of the parts of head `number`, and under `others` and `block` how names begin."""
        given = self._given(prefix, num_layers, number)
        norms = {"embedding_norm": self.embedding_norm, "feature_norm": self.feature_norm}
        parts = norms | {"fc": self.fc, "others": self.others, "block": self.block}
        parts |= {} if self.final_norm is None else {"final_norm": self.final_norm}
        return {key: name.format(**given) for key, name in parts.items()}

    def copied(self, prefix: str, num_layers: int, number: int) -> frozenset[str]:
        """Returns the names of the tensors of head `number` that are copies of the model's."""
        given = self._given(prefix, num_layers, number)
        return frozenset(name.format(**given) for name in self.copies)

    def _given(self, prefix: str, num_layers: int, number: int) -> Mapping[str, str]:
        given = {"prefix": prefix, "number": str(number), "layer": str(num_layers + number)}
        return given | {"block": self.block.format(**given)}


# Qwen 3-Next, and Qwen 3.5: the heads share all but their blocks.
OF_QWEN = MtpFormat(
    block="mtp.layers.{number}.",
    embedding_norm="mtp.pre_fc_norm_embedding",
    feature_norm="mtp.pre_fc_norm_hidden",
    fc="mtp.fc",
    final_norm="mtp.norm",
    others="mtp.",
    copies=(),
    usual_count=1,
)
