"""Reads draft heads from the formats in which they are published: EAGLE, EAGLE-3, speculators and Medusa."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxvllm.models.attention import GroupedQueryAttention
from jaxvllm.models.block import Block
from jaxvllm.models.families.llama import llama_spec
from jaxvllm.models.heads.eagle import Eagle3Head, EagleHead
from jaxvllm.models.heads.head_tensors import HeadTensors, told_of
from jaxvllm.models.heads.kinds import SPECULATORS
from jaxvllm.models.heads.medusa import MedusaHeads
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.norm import bias_of
from jaxvllm.models.params import Params
from jaxvllm.models.spec import ModelSpec
from jaxvllm.models.weight_names import separate_projections

# The tensors of an embedding and an LM head, where a head has its own.
_OWN = {"embed": "embed_tokens.weight", "lm_head": "lm_head.weight"}


def read_eagle(directory: Path, config: Mapping[str, Any], target: ModelSpec) -> tuple[EagleHead, Params]:
    """Reads an EAGLE head for the model `target`: its value, and its arrays on the host.

    Raises ValueError that names the directory and what is wrong with it.
    """
    with told_of(directory):
        spec = replace(llama_spec(HfConfig(config)), tie_embeddings=False)
    _check_hidden(directory, spec.hidden_size, target)
    tensors = HeadTensors.open(directory)
    head = EagleHead(spec, tensors.those({"fc_bias": "fc.bias", **_OWN}))
    params = tensors.named(head.declare(), {"fc": "fc.weight", "fc_bias": "fc.bias", **_OWN})
    layers = [dict(separate_projections(spec, number, f"layers.{number}.")) for number in range(spec.num_layers)]
    del layers[0]["attention_norm"]  # `fc` stands in front of it
    params["layers"] = [tensors.layer(*of) for of in zip(head.declare()["layers"], layers, strict=True)]
    tensors.end()
    return head, params


def read_eagle3(directory: Path, config: Mapping[str, Any], target: ModelSpec) -> tuple[Eagle3Head, Params]:
    """Reads an EAGLE-3 head, also in the format of speculators. The rest is as for `read_eagle`."""
    values = dict(config.get("transformer_layer_config") or {})
    values |= {key: value for key, value in config.items() if key != "transformer_layer_config"}
    values.setdefault("norm_before_residual", SPECULATORS in config)
    values |= dict(values.get("eagle_config") or {})
    layers = target.num_layers
    depths = values.get("eagle_aux_hidden_state_layer_ids") or (2, layers // 2, layers - 3)
    is_rising = all(type(depth) is int for depth in depths) and list(depths) == sorted(set(depths))
    if not is_rising or depths[0] < 0 or depths[-1] > layers:
        raise ValueError(
            f"{directory}: eagle_aux_hidden_state_layer_ids must rise from 0 to at most {layers}, the layers of the "
            f"model, and are {list(depths)}"
        )
    with told_of(directory):
        options = HfConfig(values)
        spec = replace(llama_spec(options), tie_embeddings=False)
        norm_before_residual, norm_output = (
            options.flag(name, False) for name in ("norm_before_residual", "norm_output")
        )
        if not options.flag("use_aux_hidden_state", True):
            raise ValueError("eagle_config use_aux_hidden_state = False is not supported: take another head")
        norm_before_fc, fc_norm = options.flag("norm_before_fc", False), options.flag("fc_norm", False)
        size = options.integer("draft_vocab_size", spec.vocab_size)
    tensors, E, H = HeadTensors.open(directory), spec.hidden_size, target.hidden_size
    _check_hidden(directory, values.get("target_hidden_size") or E, target)
    if "embed_tokens.weight" not in tensors:
        _check_hidden(directory, E, target)
    names = [f"layers.{number}." for number in range(spec.num_layers)]
    if "midlayer.hidden_norm.weight" in tensors:
        names[0] = "midlayer."
    if f"{names[0]}self_attn.q_norm.weight" in tensors:
        spec = replace(spec, layers=tuple(map(_with_head_norms, spec.layers)))  # those of a Qwen 3
    sources = [dict(separate_projections(spec, number, name)) for number, name in enumerate(names)]
    sources[0]["qkv"] = tuple(
        replace(part, shape=(part.shape[0], 2 * E), view=(*part.view[:2], 2 * E)) for part in sources[0]["qkv"]
    )
    if "lm_head.weight" not in tensors:
        raise ValueError(f"{directory} lacks the tensor lm_head.weight: an EAGLE-3 head has an LM head of its own")
    has = {"input_norm": norm_before_fc, "fc_norms": fc_norm, "embed": _OWN["embed"] in tensors}
    head = Eagle3Head(
        spec,
        tuple(depths),
        H,
        size,
        target.vocab_size,
        frozenset(name for name, is_there in has.items() if is_there),
        norm_before_residual,
        norm_output,
    )
    outer = {"fc": "fc.weight", "input_norm": "input_norm.weight", "final_norm": "norm.weight", **_OWN}
    params = tensors.named(head.declare(), outer)
    if fc_norm:
        params["fc_norms"] = np.stack([tensors.take(f"fc_norm.{i}.weight", H) for i in range(len(depths))])
    params["layers"] = [tensors.layer(*of) for of in zip(head.declare()["layers"], sources, strict=True)]
    params["layers"][0]["feature_norm"] = tensors.take(f"{names[0]}hidden_norm.weight", E)
    ids = np.arange(size)
    if "d2t" in tensors:
        ids += tensors.integers("d2t", size)
    params["columns"] = _columns(directory, ids, target.vocab_size)
    tensors.end()
    return head, params


def read_medusa(directory: Path, config: Mapping[str, Any], target: ModelSpec) -> tuple[MedusaHeads, Params]:
    """Reads Medusa heads, by the names of vLLM or of their authors. The rest is as for `read_eagle`."""
    with told_of(directory):
        values = HfConfig(config)
        count = values.integer("num_heads", config.get("medusa_num_heads"))
        depth = values.integer("num_hidden_layers", config.get("medusa_num_layers"))
        shares = values.flag("original_lm_head", False)
    tensors, E = HeadTensors.open(directory), target.hidden_size
    _check_hidden(directory, config.get("hidden_size") or E, target)
    is_vllm = "blocks.0.layers.0.weight" in tensors
    start = "medusa_heads." if "medusa_heads.0.0.linear.weight" in tensors else ""
    params: Params = {}
    size, ids = target.vocab_size, None
    if "token_map" in tensors:
        with told_of(directory):
            size = values.integer("truncated_vocab_size")
        ids = tensors.integers("token_map", size)
        params["columns"] = _columns(directory, ids, target.vocab_size)
    names = [f"lm_heads.{head}.weight" if is_vllm else f"{start}{head}.{depth}.weight" for head in range(count)]
    if shares:  # vLLM wants a copy of the model's LM head in the file; here the model's own will do
        names = [name for name in (f"{start}lm_head.weight", f"{start}lm_heads.0.weight") if name in tensors][:1]
    elif not any(name in tensors for name in names):
        raise ValueError(
            f"{directory} has no LM heads, such as {names[0]}: each Medusa head has one, unless its config.json says "
            '"original_lm_head": true, so that all share the one of the model'
        )
    blocks = [
        [f"blocks.{head}.layers.{number}" if is_vllm else f"{start}{head}.{number}.linear" for number in range(depth)]
        for head in range(count)
    ]
    has_biases = any(f"{name}.bias" in tensors for head in blocks for name in head)
    medusa = MedusaHeads(E, count, depth, len(names), size, target.vocab_size, has_biases, ids is not None)
    params["blocks"] = [
        [
            tensors.named(decls, {"weight": f"{name}.weight", bias_of("weight"): f"{name}.bias"})
            for name, decls in zip(*head, strict=True)
        ]
        for head in zip(blocks, medusa.declare()["blocks"], strict=True)
    ]
    if names:
        # A head may have rows for all tokens, also where it only guesses some.
        is_whole = ids is not None and tensors.num_rows(names[0]) > size
        heads = [tensors.take(name, target.vocab_size if is_whole else size, E) for name in names]
        params["lm_heads"] = [head[ids] for head in heads] if is_whole else heads
    elif ids is not None:
        raise ValueError(
            f"{directory}: heads that share the model's LM head have its whole vocabulary, not a token_map"
        )
    tensors.end()
    return medusa, params


def _with_head_norms(layer: Block) -> Block:
    assert isinstance(layer.attention, GroupedQueryAttention), "EAGLE's layers are those of a Llama"
    return replace(layer, attention=replace(layer.attention, qk_norm="head"))


def _check_hidden(directory: Path, hidden_size: int, target: ModelSpec) -> None:
    if hidden_size != target.hidden_size:
        raise ValueError(
            f"{directory} is a head for hidden states of {hidden_size}, and the model has {target.hidden_size}: "
            "take the head that was trained for it"
        )


def _columns(directory: Path, ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """Returns i32[vocab_size]: the place of each token among `ids`, or one past the last if it is missing."""
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ValueError(f"{directory} maps its tokens to {ids.min()}..{ids.max()}, and the model has {vocab_size}")
    columns = np.full(vocab_size, len(ids), np.int32)
    columns[ids] = np.arange(len(ids), dtype=np.int32)
    return columns
