"""Reads the layers for multi-token prediction that lie in a model's own checkpoint."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxvllm.models.attention import GroupedQueryAttention
from jaxvllm.models.block import Block
from jaxvllm.models.experts import ExpertsFfn
from jaxvllm.models.families import find_family
from jaxvllm.models.families.family import Family
from jaxvllm.models.ffn import GatedFfn
from jaxvllm.models.heads.head_tensors import HeadTensors, told_of
from jaxvllm.models.heads.kinds import open_draft
from jaxvllm.models.heads.mtp import MtpHead
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.latent_attention import LatentAttention
from jaxvllm.models.orbax_tree import TREE
from jaxvllm.models.params import Params
from jaxvllm.models.spec import ModelSpec


def read_mtp(
    directory: Path, config: Mapping[str, Any], target: ModelSpec, most: int
) -> tuple[tuple[MtpHead, ...], Params]:
    """Reads the first `most` MTP heads that lie in the checkpoint of the model `target` itself, or all there are.

    They have the names that the model's family says. Returns their values, and their arrays on the host. Raises
    ValueError that names the directory and what is wrong with it.
    """
    family = find_family(config)
    mtp = family.mtp
    with told_of(directory):
        count = HfConfig(family.text_config(config), understood=family.understood).integer(
            mtp.count, mtp.usual_count, least=0
        )
        if not count:
            raise ValueError(f"method mtp needs a model with {mtp.count} in its config: take another method")
        block = _block(family, target)
        if (directory / TREE).is_dir():
            raise ValueError("a converted model has no MTP layer, which is no part of the decoder: give the original")
    spec = replace(target, layers=(block,))
    depths = (target.num_layers,) if mtp.sees_states else ()
    heads = tuple(MtpHead(spec, depths, number, mtp.final_norm is not None) for number in range(min(count, most)))
    places = [(family.prefixes[0], target.num_layers, number) for number in range(count)]
    names = [mtp.names(*place) for place in places]
    names, left_out = names[: len(heads)], names[len(heads) :]
    files = open_draft(directory)
    starts, foreign = (tuple(of["others"] for of in names)), tuple(of["block"] for of in left_out)
    own = {name for name in files.names if name.startswith(starts) and not name.startswith(foreign)}
    tensors = HeadTensors(files, own.difference(*(mtp.copied(*place) for place in places)))
    params = {"heads": [_params(tensors, of, head, family) for of, head in zip(names, heads, strict=True)]}
    tensors.end()
    return heads, params


def _block(family: Family, target: ModelSpec) -> Block:
    """Returns the block of a head. Raises ValueError where the head cannot compute it."""
    if not all(layer.keeps_state for layer in target.layers):
        layer = family.mtp.block_of(target)
        if isinstance(layer.ffn, ExpertsFfn):  # every device has the whole head
            layer = replace(layer, ffn=layer.ffn.whole())
        is_known = isinstance(layer.attention, GroupedQueryAttention | LatentAttention)
        is_known &= isinstance(layer.ffn, GatedFfn | ExpertsFfn)
        if is_known and layer == Block(layer.attention, layer.ffn, layer.norm, rope=layer.rope, window=layer.window):
            return layer
    raise ValueError(
        "method mtp knows layers with attention and a gated FFN or experts, and a norm before each, "
        f"not those of {family.architecture}"
    )


def _params(tensors: HeadTensors, names: Mapping[str, str], head: MtpHead, family: Family) -> Params:
    """Returns the arrays of an MTP head, whose parts have these `names`."""
    parts = {key: f"{name}.weight" for key, name in names.items() if key not in ("block", "others")}
    params = tensors.named(head.declare(), parts)
    if family.mtp.is_feature_first:
        params["fc"] = np.concatenate(np.split(params["fc"], 2, axis=1)[::-1], axis=1)
    sources, [decls] = family.mtp.sources or family.layer_sources, head.declare()["layers"]
    params["layers"] = [tensors.layer(decls, sources(head.spec, 0, names["block"]))]
    return params
