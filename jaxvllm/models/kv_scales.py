"""The scales of keys and values in eight bits that a checkpoint was calibrated with, for each KV head of each layer."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from jaxvllm.models.attention import GroupedQueryAttention
from jaxvllm.models.block import Block
from jaxvllm.models.latent_attention import LatentAttention
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import Source

# The ends of the names of tensors, after those of a layer's attention, of its qkv_proj (Qwen 3), its k_proj and v_proj
# (ModelOpt, and older compressed-tensors by the name output_scale), or its attn. Old checkpoints have one for both.
_BOTH = ".kv_scale"
_KEYS = (".k_scale", ".k_cache.scale", ".k_proj.output_scale", _BOTH)
_VALUES = (".v_scale", ".v_cache.scale", ".v_proj.output_scale", _BOTH)
# Queries and weights of attention are not quantized here, and zero points are zeros, so these say nothing.
_OTHERS = (
    *(".q_scale", ".q_proj.output_scale", ".self_attn.q.scale", ".prob_scale", ".prob_output_scale"),
    *(".k_zero_point", ".v_zero_point", ".q_zero_point"),
)
KV_SCALE_ENDS = (*_KEYS, *_VALUES, *_OTHERS)


def with_kv_scales(spec: ModelSpec, has_kv_scales: bool = True) -> ModelSpec:
    """Returns the spec whose layers with keys and values have scales for these, or have none."""

    def of(layer: Block) -> Block:
        if not isinstance(layer.attention, GroupedQueryAttention | LatentAttention):
            return layer
        return replace(layer, attention=replace(layer.attention, has_kv_scales=has_kv_scales))

    return replace(spec, layers=tuple(map(of, spec.layers)))


def kv_scale_sources(
    names: Iterable[str], shape_of: Callable[[str], tuple[int, ...]], prefix: str, num_kv_heads: int
) -> tuple[Source, ...]:
    """Returns the sources of the scales of a layer whose tensors' names begin with `prefix`: none if it has none.

    A scale is of one number, which all heads have, or of as many as there are KV heads. Where there are only those of
    keys or of values, they are those of both. Raises ValueError for other shapes, and for several scales of the keys.
    """
    own = sorted(name for name in names if name.startswith(prefix))
    keys, values = ([name for name in own if name.endswith(ends)] for ends in (_KEYS, _VALUES))
    sources: list[Source] = []
    for half, found in enumerate((keys or values, values or keys)):
        if len(found) > 1:
            raise ValueError(f"{found[0]} and {found[1]} are both scales of the same keys or values: leave one out")
        for name in found:
            shape = shape_of(name)
            if math.prod(shape) == 1:
                sources += [Source(name, shape, (head, half), (1, 1)) for head in range(num_kv_heads)]
            elif math.prod(shape) == num_kv_heads:
                sources.append(Source(name, shape, (0, half), (num_kv_heads, 1)))
            else:
                raise ValueError(f"{name} has shape {shape}, and should be one scale or {num_kv_heads}")
    return tuple(sources)
