"""Specs that differ from others in some parts of all layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxvllm.models.spec import ModelSpec


def changed(
    spec: ModelSpec, attention: Mapping[str, Any] | None = None, ffn: Mapping[str, Any] | None = None, **block: Any
) -> ModelSpec:
    """The spec with other values in the attention, the FFN and the block of every layer."""
    layers = (
        replace(
            layer,
            attention=replace(layer.attention, **attention or {}),
            ffn=replace(layer.ffn, **ffn or {}),
            **block,
        )
        for layer in spec.layers
    )
    return replace(spec, layers=tuple(layers))


def in_windows(spec: ModelSpec, *windows: int | None) -> ModelSpec:
    """The spec with a layer like its first for each window."""
    return replace(spec, layers=spec.layers[0].in_windows(windows))
