"""A model family: the name of an architecture, the meaning of its config, and the names of its tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxvllm.models.families.mtp_format import MtpFormat
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import LayerSources, OuterNames, separate_projections


@dataclass(frozen=True)
class Family:
    """One supported architecture, as `architectures[0]` of a config.json names it."""

    architecture: str
    spec: Callable[[HfConfig], ModelSpec]
    layer_sources: LayerSources = separate_projections
    names: OuterNames = OuterNames()  # of the tensors outside the layers
    # The names of the decoder's tensors begin with one of these. The newest is first, and the checkpoint decides.
    prefixes: tuple[str, ...] = ("model.",)
    # Beginnings of the names of tensors that are not the decoder's, such as a vision tower's.
    foreign: tuple[str, ...] = ()
    # Ends of the names of tensors that say nothing, such as masks in old checkpoints.
    redundant: tuple[str, ...] = ()
    # Keys of `UNSUPPORTED` in hf_config that its spec takes into account.
    understood: tuple[str, ...] = ()
    # The key under which the decoder's config is nested.
    nested_in: str | None = None
    # Whether hidden states are beyond the largest number of float16, so that it is refused, as in vLLM.
    exceeds_float16: bool = False
    # How its checkpoints hold MTP heads, where they have any.
    mtp: MtpFormat = MtpFormat()

    def text_config(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the decoder's own part of the config."""
        if self.nested_in is None:
            return config
        inner = config.get(self.nested_in)
        if not isinstance(inner, dict):
            raise ValueError(f"config of {self.architecture} lacks {self.nested_in}: config.json must have it")
        # This one concerns the whole checkpoint, and stands outside that part.
        outer = ("tie_word_embeddings",)
        return {key: config[key] for key in outer if key in config} | inner


def beside_vision(architecture: str, spec: Callable[[HfConfig], ModelSpec], *, exceeds_float16: bool = False) -> Family:
    """Returns the family of the decoder in a multimodal checkpoint, whose vision tower is not read."""
    return Family(
        architecture,
        spec,
        prefixes=("model.language_model.", "language_model.model."),
        foreign=("model.vision_tower.", "model.multi_modal_projector.", "vision_tower.", "multi_modal_projector."),
        nested_in="text_config",
        exceeds_float16=exceeds_float16,
    )
