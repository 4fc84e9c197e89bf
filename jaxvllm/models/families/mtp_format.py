"""`MtpFormat`: how the checkpoints of a family hold their layers for multi-token prediction (MTP)."""

from collections.abc import Mapping
from dataclasses import dataclass


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
    final_norm: str | None = "{block}shared_head.norm"
    others: str = "{block}"  # the beginning of the names of all tensors of a head, none of which may be ignored
    copies: tuple[str, ...] = ("embed_tokens.weight", "shared_head.head.weight")  # of the model's own, in the block
    count: str = "num_nextn_predict_layers"  # the key of the number of heads in a config
    usual_count: int = 0  # where a config lacks that key
    is_feature_first: bool = False  # `fc` is over the feature and then the embedding
    sees_states: bool = False  # its first feature is the state before the model's final norm, and not the one after it
    hides_first: bool = True  # the first embedding that stands beside a feature is zeros
    is_like_first: bool = False  # the block is like the model's first layer, and not like the last one with attention

    def names(self, prefix: str, num_layers: int, number: int) -> Mapping[str, str]:
        """Returns the names of the parts of head `number`, and under `others` and `block` how names begin."""
        given = {"prefix": prefix, "number": number, "layer": num_layers + number}
        block = self.block.format(**given)
        norms = {"embedding_norm": self.embedding_norm, "feature_norm": self.feature_norm}
        parts = norms | {"fc": self.fc, "others": self.others}
        parts |= {} if self.final_norm is None else {"final_norm": self.final_norm}
        return {"block": block} | {key: name.format(block=block, **given) for key, name in parts.items()}


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
    hides_first=False,
)
