"""Reads draft heads from the formats in which they are published: EAGLE, EAGLE-3, speculators, and Medusa."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxvllm.models.families.llama import llama_spec
from jaxvllm.models.heads.eagle import Eagle3Head, EagleHead
from jaxvllm.models.heads.medusa import MedusaHeads
from jaxvllm.models.hf_config import HfConfig
from jaxvllm.models.hf_weights import WeightFiles, open_weights
from jaxvllm.models.params import Params
from jaxvllm.models.spec import ModelSpec

# Tensors that say again what others say.
_REDUNDANT = ("t2d",)


class _Tensors:
    """The tensors of a head, of which each must be used."""

    def __init__(self, directory: Path):
        self._files: WeightFiles = open_weights(directory)
        self._left = self._files.names - set(_REDUNDANT)

    def __contains__(self, name: str) -> bool:
        return name in self._files.names

    def take(self, name: str, *shape: int) -> np.ndarray:
        self._left.discard(name)
        return self._files.tensor(name, shape)

    def integers(self, name: str, *shape: int) -> np.ndarray:
        self._left.discard(name)
        return self._files.integers(name, shape)

    def end(self) -> None:
        if self._left:
            name = min(self._left)
            raise ValueError(
                f"{self._files.directory}: unexpected tensor {name}: a head of this kind has none of that name, and "
                "ignoring it would change what it guesses"
            )


def read_eagle(directory: Path, config: Mapping[str, Any], target: ModelSpec) -> tuple[EagleHead, Params]:
    """Reads an EAGLE head for the model `target`: its value, and its arrays on the host.

    Raises ValueError that names the file and what is wrong with it.
    """
    spec = _layer_spec(config)
    _check_hidden(directory, spec, target)
    tensors, E = _Tensors(directory), spec.hidden_size
    params: Params = {"fc": tensors.take("fc.weight", E, 2 * E)}
    if "fc.bias" in tensors:
        params["fc_bias"] = tensors.take("fc.bias", E)
    params["layers"] = [_layer(tensors, spec, f"layers.{number}.", E) for number in range(spec.num_layers)]
    params |= _outer(tensors, spec.vocab_size, spec)
    tensors.end()
    return EagleHead(spec), params


def read_eagle3(directory: Path, config: Mapping[str, Any], target: ModelSpec) -> tuple[Eagle3Head, Params]:
    """Reads an EAGLE-3 head, also in the format of speculators. The rest is as for `read_eagle`."""
    values = dict(config.get("transformer_layer_config") or {}) | {
        key: value for key, value in config.items() if key != "transformer_layer_config"
    }
    options = values | dict(values.get("eagle_config") or {})
    layers = target.num_layers
    depths = options.get("eagle_aux_hidden_state_layer_ids") or (2, layers // 2, layers - 3)
    if not all(type(depth) is int and 0 <= depth <= layers for depth in depths):
        raise ValueError(f"{directory}: the model has {layers} layers, and the head wants the states behind {depths}")
    spec = _layer_spec(values)
    head = Eagle3Head(spec, tuple(depths), bool(options.get("norm_before_residual")), bool(options.get("norm_output")))
    tensors, E, H = _Tensors(directory), spec.hidden_size, target.hidden_size
    params: Params = {"fc": tensors.take("fc.weight", E, len(depths) * H)}
    if options.get("norm_before_fc"):
        params["input_norm"] = tensors.take("input_norm.weight", len(depths) * H)
    if options.get("fc_norm"):
        params["fc_norms"] = np.stack([tensors.take(f"fc_norm.{i}.weight", H) for i in range(len(depths))])
    first = "midlayer." if "midlayer.hidden_norm.weight" in tensors else "layers.0."
    params["layers"] = [_layer(tensors, spec, first, 2 * E)]
    params["layers"][0]["feature_norm"] = tensors.take(f"{first}hidden_norm.weight", E)
    params["layers"] += [_layer(tensors, spec, f"layers.{i}.", E) for i in range(1, spec.num_layers)]
    params["final_norm"] = tensors.take("norm.weight", E)
    size = values.get("draft_vocab_size") or spec.vocab_size
    if "lm_head.weight" not in tensors:
        raise ValueError(f"{directory} lacks the tensor lm_head.weight: an EAGLE-3 head has an LM head of its own")
    params |= _outer(tensors, size, spec)
    ids = np.arange(size)
    if "d2t" in tensors:
        ids += tensors.integers("d2t", size)
    params["columns"] = _columns(directory, ids, target.vocab_size)
    tensors.end()
    return head, params


def read_medusa(directory: Path, config: Mapping[str, Any], target: ModelSpec) -> tuple[MedusaHeads, Params]:
    """Reads Medusa heads, by the names of vLLM or of their authors. The rest is as for `read_eagle`."""
    values = HfConfig(config)
    count = values.integer("num_heads", config.get("medusa_num_heads"))
    depth = values.integer("num_hidden_layers", config.get("medusa_num_layers"))
    tensors, E = _Tensors(directory), target.hidden_size
    is_vllm = "blocks.0.layers.0.weight" in tensors
    params: Params = {"blocks": []}
    for head in range(count):
        blocks = []
        for number in range(depth):
            name = f"blocks.{head}.layers.{number}" if is_vllm else f"{head}.{number}.linear"
            blocks.append({"weight": tensors.take(f"{name}.weight", E, E)})
            if f"{name}.bias" in tensors:
                blocks[-1]["bias"] = tensors.take(f"{name}.bias", E)
        params["blocks"].append(blocks)
    size = target.vocab_size
    if "token_map" in tensors:
        size = values.integer("truncated_vocab_size")
        params["columns"] = _columns(directory, tensors.integers("token_map", size), target.vocab_size)
    names = [f"lm_heads.{head}.weight" if is_vllm else f"{head}.{depth}.weight" for head in range(count)]
    if not values.flag("original_lm_head", False):
        params["lm_heads"] = [tensors.take(name, size, E) for name in names]
    elif "columns" in params:
        raise ValueError(
            f"{directory}: heads that share the model's LM head have its whole vocabulary, not a token_map"
        )
    tensors.end()
    return MedusaHeads(E, count, depth), params


def _layer_spec(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a head's layers, whose config is that of a Llama."""
    spec = llama_spec(HfConfig(config))
    return replace(spec, tie_embeddings=False)


def _check_hidden(directory: Path, spec: ModelSpec, target: ModelSpec) -> None:
    if spec.hidden_size != target.hidden_size:
        raise ValueError(
            f"{directory} is a head for hidden states of {spec.hidden_size}, and the model has {target.hidden_size}: "
            "take the head that was trained for it"
        )


def _outer(tensors: _Tensors, vocab_size: int, spec: ModelSpec) -> Params:
    """The embedding and the LM head, where a head has its own."""
    outer: Params = {}
    if "embed_tokens.weight" in tensors:
        outer["embed"] = tensors.take("embed_tokens.weight", spec.vocab_size, spec.hidden_size)
    if "lm_head.weight" in tensors:
        outer["lm_head"] = tensors.take("lm_head.weight", vocab_size, spec.hidden_size)
    return outer


def _columns(directory: Path, ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """i32[vocab_size]: the place of each token among `ids`, or behind them all for a token that is not there."""
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ValueError(f"{directory} maps its tokens to {ids.min()}..{ids.max()}, and the model has {vocab_size}")
    columns = np.full(vocab_size, len(ids), np.int32)
    columns[ids] = np.arange(len(ids), dtype=np.int32)
    return columns


def _layer(tensors: _Tensors, spec: ModelSpec, prefix: str, size_in: int) -> Params:
    """The arrays of a decoder layer, as `GroupedQueryAttention` and `GatedFfn` declare them but for `size_in`."""
    E, K, G, D, F = spec.hidden_size, spec.num_kv_heads, spec.group_size, spec.head_size, spec.ffn_size

    def heads(kind: str, *tail: int) -> np.ndarray:
        parts = {"q": K * G * D, "k": K * D, "v": K * D}
        taken = [tensors.take(f"{prefix}self_attn.{x}_proj.{kind}", size, *tail) for x, size in parts.items()]
        return np.concatenate([part.reshape(K, -1, *tail) for part in taken], axis=1)

    layer: Params = {
        "qkv": heads("weight", size_in),
        "o": tensors.take(f"{prefix}self_attn.o_proj.weight", E, K * G * D),
        "ffn_norm": tensors.take(f"{prefix}post_attention_layernorm.weight", E),
        "gate_up": np.stack([tensors.take(f"{prefix}mlp.{half}_proj.weight", F, E) for half in ("gate", "up")]),
        "down": tensors.take(f"{prefix}mlp.down_proj.weight", E, F),
    }
    if f"{prefix}input_layernorm.weight" in tensors:
        layer["attention_norm"] = tensors.take(f"{prefix}input_layernorm.weight", E)
    if spec.qkv_bias:
        layer["qkv_bias"] = heads("bias")
    if spec.o_bias:
        layer["o_bias"] = tensors.take(f"{prefix}self_attn.o_proj.bias", E)
    return layer
