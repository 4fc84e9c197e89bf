"""`GgufArchitecture`: the names in GGUF files of an architecture, and what such files do not say of a model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxvllm.models.published.shaped_part import ShapedPart

# Returns the keys of a config.json that only this architecture has, from the metadata under its name.
OwnKeys = Callable[[Mapping[str, Any]], Mapping[str, Any]]

EXPERT_KEYS = ("expert_count", "expert_used_count", "expert_feed_forward_length")
USUAL_PRESENT: Mapping[str, str] = {"attention_bias": "attn_output.bias", "mlp_bias": "ffn_down.bias"}


@dataclass(frozen=True)
class RebuiltTensor:
    """A tensor of a layer that a file has in another form, or as several.

    names: those in the file, in a layer, with their kinds
    make: makes it of these, and of the metadata under the architecture's name
    """

    names: tuple[str, ...]
    make: Callable[[Sequence[ShapedPart], Mapping[str, Any]], ShapedPart]


@dataclass(frozen=True)
class GgufArchitecture:
    """The family of Hugging Face that an architecture is, and how its files differ from that family's checkpoints.

    tensors: the name in a Hugging Face layer of each of a layer's tensors; `*` is the number of a matrix in a stack. A
        name with its kind, such as `x.bias`, comes before that of all kinds. Where two tensors have the same name, that
        one tensor has their rows alternately: the first row of the first, the first row of the second, and so on
    turned: the ends of the names of stacks of matrices that a file has the other way round
    present: keys of a config.json that say whether there are such tensors as one of a layer
    has_turned_heads: rows of queries and keys are stored so that a rope turns neighbours, not halves of a head
    norm_offset: what is added to the weights of norms before they are stored
    needs: keys of metadata that must be there, beside those of all architectures
    understood: keys that `own_keys` takes into account, and others refuse
    usual_values: the only values that are known of some keys, where they are others than for most
    refused: keys that change the model in a way that is not known
    rope_parameters: what files do not say of a rope
    rebuilt: how the tensors are made that a file has otherwise, by the ends of their names
    norm_epsilon: the key of the number that norms add, and its name in a config.json
    lacks: keys of all other architectures that need not be there, nor be one number
    steepness: what a file states of how steep YaRN makes logits is multiplied by this; None: that is not known
    outside: names outside the layers, beside those that all have
    rows: keys of a config.json that are the rows of a tensor
    stack_size: how many matrices a stack has, from the metadata under the architecture's name
    is_latent: keys and values are made of a latent, so that heads have no one size
    prefix: how the names of the decoder's tensors begin in a checkpoint
    has_attention: without it, what files say of heads, FFNs and positions means nothing
    numbers: tensors of one number, by the ends of their names, and the metadata that have it for each layer
    """

    family: str
    tensors: Mapping[str, str]
    own_keys: OwnKeys = lambda _: {}
    has_turned_heads: bool = False
    norm_offset: float = 0.0
    needs: tuple[str, ...] = ()
    present: Mapping[str, str] = field(default_factory=lambda: USUAL_PRESENT)
    understood: tuple[str, ...] = ()
    usual_values: Mapping[str, Any] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    turned: tuple[str, ...] = ()
    rope_parameters: Mapping[str, Any] = field(default_factory=dict)
    rebuilt: Mapping[str, RebuiltTensor] = field(default_factory=dict)
    norm_epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    lacks: tuple[str, ...] = ()
    steepness: float | None = None
    outside: Mapping[str, str] = field(default_factory=dict)
    rows: Mapping[str, str] = field(default_factory=dict)
    stack_size: Callable[[Mapping[str, Any]], Any] = lambda values: values.get("expert_count")
    is_latent: bool = False
    prefix: str = "model."
    has_attention: bool = True
    numbers: Mapping[str, str] = field(default_factory=dict)
